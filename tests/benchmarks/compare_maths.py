"""Prints the table of docs/maths.md: how far two loops are from plain torch on one big batch.

    .venv/bin/python tests/benchmarks/compare_maths.py

Both run the same grid (tests/distributed/scripts) on 1 and 2 processes.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.distributed.scripts import windows
from tests.distributed.test_windows import reference
from tests.launching import SCRIPTS, launch

KINDS: dict[str, Callable[[windows.Case], bool]] = {
    "one batch a step, all full": lambda case: case.samples == 24 and case.accumulation == 1 and not case.weighted,
    "one batch a step, last one short": lambda case: case.samples in (17, 29) and case.accumulation == 1,
    "accumulation, last window short": lambda case: case.samples in (17, 29) and case.accumulation > 1,
    "weights (tokens), accumulation": lambda case: case.samples == 24 and case.accumulation > 1 and case.weighted,
    "fewer samples than a batch": lambda case: case.samples in (1, 3),
}


def compare(case: windows.Case, processes: int, result: dict[str, Any]) -> tuple[float, bool]:
    """Return the largest relative difference of a gradient, and whether steps and learning rates are the same."""
    expected = reference(case, processes)
    pairs = zip(result["gradients"], expected["gradients"], strict=False)
    differences = [((torch.tensor(got) - true).norm() / true.norm()).item() for got, true in pairs]
    return max(differences), result["learning_rates"] == expected["learning_rates"]


def run(script: str, processes: int) -> dict[str, Any]:
    """Run a script of the grid and return its results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        launch(SCRIPTS / script, str(path), processes=processes, result=path, timeout_s=300)
        results: dict[str, Any] = json.loads(path.read_text())
        return results


def main() -> None:
    """Run both loops and print the table."""
    print("| steps | processes | by hand: gradient | by hand: scheduler | accmt: gradient | accmt: scheduler |")
    print("|---|---|---|---|---|---|")
    by_processes = {count: (run("hand_written.py", count), run("windows.py", count)) for count in (1, 2)}
    for kind, belongs in KINDS.items():
        for processes, loops in by_processes.items():
            cases = [c for c in windows.make_cases() if belongs(c) and c.data == "sized" and not (c.micro or c.clip)]
            cells = []
            for results in loops:
                outcomes = [compare(case, processes, results[case.name]) for case in cases]
                same = all(is_same for _, is_same in outcomes)
                cells += [f"{max(difference for difference, _ in outcomes):.0e}", "same" if same else "other"]
            print(f"| {kind} | {processes} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
