"""Prints the table of examples/well-known-scripts.md: how far originals and ports are from plain torch, one big batch.

.venv/bin/python tests/benchmarks/compare_their_examples.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.scripts.their_examples import EXAMPLES, in_plain_torch
from tests.launching import SCRIPTS, launch


def run(who: str, processes: int) -> dict[str, list[float]]:
    """Train each example and return its losses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        launch(SCRIPTS / "their_examples.py", str(path), folder, who, processes=processes, result=path, timeout_s=300)
        losses: dict[str, list[float]] = json.loads(path.read_text())
        return losses


def main() -> None:
    """Run originals and ports, and print the table."""
    found = [run(who, processes) for who in ("there", "here") for processes in (1, 2)]
    print("| example | original, 1 process | original, 2 processes | here, 1 process | here, 2 processes |")
    print("|---|---|---|---|---|")
    for example in EXAMPLES:
        expected = in_plain_torch(example)
        cells = []
        for losses in found:
            pairs = zip(losses[example.title], expected, strict=True)
            cells.append(f"{max(abs(got - true) for got, true in pairs):.0e}")
        print(f"| {' | '.join([example.title, *cells])} |")


if __name__ == "__main__":
    main()
