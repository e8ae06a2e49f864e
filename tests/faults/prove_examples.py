"""Proves every example, and compares what is named with what its mathematics is known to depend on.

    python tests/faults/prove_examples.py --steps 2 --samples 16

Three examples depend on how a step's samples are divided: batch norm uses the statistics of a micro-batch, in-batch
negatives are those of a micro-batch, and mixup pairs the samples of a micro-batch. All others must pass.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPENDS = {
    "gan": "batch norm",
    "retrieval": "a loss that compares samples",
    "vision": "a collate function that mixes samples",
}
_AT_LEAST = ("2 processes", "interrupted and resumed", "2 loader workers")


def prove_example(name: str, folder: Path, steps: int = 2, samples: int = 16, timeout_s: float = 900) -> str:
    """Prove an example, and return what is wrong with the result; "" if it is as expected."""
    sizes = ["--steps", str(steps), "--samples", str(samples)]
    command = [sys.executable, "-m", "accmt.cli.main", "prove", *sizes, str(ROOT / "examples" / f"{name}.py"), "--"]
    command += ["--limit", "32", "--output", str(folder / name)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    table, _, causes = ended.stdout.partition("\n\n")
    if missing := [launch for launch in _AT_LEAST if launch not in table]:
        return f"not tried: {', '.join(missing)}\n{ended.stdout}{ended.stderr}"
    named = [line.partition(":")[0] for line in causes.splitlines() if line[:1] not in (" ", "") and ":" in line]
    expected = [DEPENDS[name]] if name in DEPENDS else []
    is_right = named == expected and ended.returncode == len(expected)
    return "" if is_right else f"named {named}, expected {expected}\n{ended.stdout}"


def main() -> int:
    """Prove the examples, and print a line for each."""
    parser = argparse.ArgumentParser(description="Prove every example.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("names", nargs="*", help="examples; default: all")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stdout)
    names = options.names or sorted(path.stem for path in (ROOT / "examples").glob("*.py"))
    num_right = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            wrong = prove_example(name, Path(folder), options.steps, options.samples)
            num_right += not wrong
            logging.info("%-26s %s", name, wrong or DEPENDS.get(name, "all launches compute the same"))
    logging.info("%s of %s examples as expected", num_right, len(names))
    return int(num_right < len(names))


if __name__ == "__main__":
    sys.exit(main())
