#!/usr/bin/env bash
# Tests one tracker in an environment of its own: run.sh PACKAGE==VERSION VENV
# The environment sees the packages of VENV, and installs only what the tracker needs besides or in other versions.
set -euo pipefail
package=$1 base=$(realpath "$2")
name=${package%%==*}
venv=.venv-trackers/$name

if [[ $(cat "$venv/.installed" 2>/dev/null || true) != "$package" ]]; then
	rm -rf "$venv"
	"$base/bin/python" -m venv "$venv"
	"$base/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	"$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$package"
	echo "$package" >"$venv/.installed"
fi
case $name in comet-ml) name=comet_ml ;; esac
OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest -n 0 -p no:cacheprovider -q "tests/trackers/test_$name.py"
