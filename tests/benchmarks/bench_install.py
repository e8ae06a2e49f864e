"""What accmt's core adds to an environment with torch and transformers: megabytes, packages and seconds.

    .venv/bin/python tests/benchmarks/bench_install.py

Makes a fresh environment in a temporary folder, with the versions of constraints.txt, and installs first torch and
transformers, then the wheel of this clone with all that it needs. Sizes are those of files, compiled ones included; the
seconds contain downloads. Needs 2 GB of disk and an index of packages.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).resolve().parents[2]
MEGABYTE = 1_000_000
LIMIT_MB = 30


def install(python: Path, packages: Sequence[str | Path]) -> float:
    """Install packages into the environment of a Python, and return the seconds."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "-c",
        ROOT / "constraints.txt",
        *packages,
    ]
    start_s = perf_counter()
    subprocess.run(list(map(str, command)), check=True)
    return perf_counter() - start_s


def sizes_in(python: Path) -> dict[str, int]:
    """Return the bytes of each entry of an environment's folder of packages."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return {
        entry.name: sum(path.stat().st_size for path in [entry, *entry.rglob("*")] if path.is_file())
        for entry in packages.iterdir()
    }


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "environment", with_pip=False)
        python = Path(folder) / "environment" / "bin" / "python"
        before_s = install(python, ["torch", "transformers"])
        before = sizes_in(python)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        added_s = install(python, [wheel])
        after = sizes_in(python)
    added = {name: size - before.get(name, 0) for name, size in after.items() if size > before.get(name, 0)}
    added_mb = sum(added.values()) / MEGABYTE
    print(f"torch and transformers: {sum(before.values()) / MEGABYTE:,.0f} MB, {before_s:.0f} s")
    print(f"accmt and what it needs besides: {added_mb:.1f} MB (at most {LIMIT_MB}), {added_s:.0f} s")
    for name, size in sorted(added.items(), key=lambda entry: -entry[1])[:8]:
        print(f"  {name:<28} {size / MEGABYTE:6.1f} MB")
    return 0 if added_mb <= LIMIT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
