"""Print whether accmt can be installed beside other packages, and which versions a resolver then takes.

Needs `uv` (`pip install uv`), which downloads metadata only and installs nothing. Run it in the clone:

    python docs/resolve_beside_others.py [PACKAGE ...] [--python 3.12]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("trl", "peft", "vllm", "axolotl", "unsloth", "lightning", "torchtune")
SHOWN = ("torch", "transformers", "accelerate", "datasets", "pydantic")


def resolve(package: str, python: str) -> dict[str, str] | str:
    """Return the versions of a resolution with accmt and `package`, or why there is none."""
    wanted = f"accmt-trainer[transformers] @ {ROOT.as_uri()}\n{package}\n"
    command = ["uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", "--python-version", python]
    run = subprocess.run(command, input=wanted, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        return " ".join(run.stderr.replace("×", "").split())[:300]
    return dict(re.findall(r"^([\w.-]+)==(\S+)", run.stdout, re.MULTILINE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", default=OTHERS)
    parser.add_argument("--python", default="3.12", help="the version of Python to resolve for")
    options = parser.parse_args()
    print(f"| with | {' | '.join(SHOWN)} |\n|---|{'---|' * len(SHOWN)}")
    failed = 0
    for package in options.packages:
        found = resolve(package, options.python)
        if isinstance(found, str):
            failed += 1
            print(f"| {package} | no: {found} |", flush=True)
        else:
            version = found.get(re.split(r"[=<>\[ ]", package)[0], "")
            print(f"| {package} {version} | {' | '.join(found.get(name, '-') for name in SHOWN)} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
