#!/usr/bin/env bash
# Runs tests in an environment of its own: laid_over.sh ENVIRONMENT BASE 'TESTS ...' PACKAGE==VERSION ...
# WORKERS is how many processes run tests, 0 (the default) this one alone; SELECT a mark expression, such as "not slow".
# It sees the packages of the environment BASE, and installs only what the packages need besides or in other versions.
set -euo pipefail
venv=$1 base=$(realpath "$2") tests=$3
shift 3

if [[ $(cat "$venv/.installed" 2>/dev/null || true) != "$*" ]]; then
	rm -rf "$venv"
	"$base/bin/python" -m venv "$venv"
	"$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	"$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$@"
	echo "$*" >"$venv/.installed"
fi
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n "${WORKERS:-0}" --dist load -p no:cacheprovider -q -m "${SELECT:-}" $tests
