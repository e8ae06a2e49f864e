"""Prints which runs with `same_bits` have the bits of one process, as the table of the documentation.

    OMP_NUM_THREADS=1 python tests/benchmarks/same_bits_table.py            # a few minutes on two cores
    OMP_NUM_THREADS=1 python tests/benchmarks/same_bits_table.py LoRA EMA   # kinds of runs with these in their name

The kinds are `CELLS` in `tests/distributed/scripts/same_bits.py`. MD5 digests are compared of the weights, the state of
the optimizer, the other contents of the last checkpoint, the rows of the history, and the saved models.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed.scripts.same_bits import CELLS
from tests.launching import SCRIPTS, launch

LAUNCHES = {"1 process": ("ddp", 1), "DDP, 2": ("ddp", 2), "DDP, 4": ("ddp", 4), "FSDP2, 2": ("fsdp", 2)}
LAUNCHES |= {"FSDP2, 4": ("fsdp", 4)}
RESUMED = {4: 2, 2: 5, 1: 7}
"""By processes: after which step a run is interrupted; it ends on 4."""

Digests = dict[str, dict[str, str]]


def launch_cells(folder: Path, engine: str, processes: int, cells: list[str], stops: dict[str, Any]) -> Digests:
    """Return the digests of runs by their name."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    plan = json.dumps({engine: (cells, stops)})
    launch(SCRIPTS / "same_bits.py", str(result), str(folder), plan, processes=processes, result=result, timeout_s=900)
    digests: Digests = json.loads(result.read_text(encoding="utf-8"))[engine]
    return digests


def compare(digests: dict[str, str], expected: dict[str, str]) -> str:
    """Return "equal", or what differs."""
    parts = [part for part, digest in expected.items() if digests[part] != digest]
    return f"differs: {', '.join(parts)}" if parts else "equal"


def main(words: list[str]) -> None:
    """Run everything, and print the table; exit with 1 if something differs."""
    names = [name for name in CELLS if not words or any(word in name for word in words)]
    rows: dict[str, list[str]] = {name: [] for name in [*names, "resumed on 4, 2, 1 and 4 processes"]}
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        for engine, processes in LAUNCHES.values():
            cells = [name for name in names if engine in CELLS[name].engines]
            digests = launch_cells(folder, engine, processes, cells, {"unbroken": None} if processes == 1 else {})
            if processes == 1:
                expected = digests
            for name in names:
                rows[name].append(compare(digests[name], expected[name]) if name in digests else "-")
        ends = {}
        for engine in ("ddp", "fsdp"):
            for processes, stop in RESUMED.items():
                launch_cells(folder, engine, processes, [], {"resumed": stop})
            ends[engine] = launch_cells(folder, engine, 4, [], {"resumed": None})["resumed"]
        for engine, processes in LAUNCHES.values():
            outcome = compare(ends[engine], expected["unbroken"]) if processes == 4 else "-"
            rows["resumed on 4, 2, 1 and 4 processes"].append(outcome)
    rows = {name: [expected[name]["weights"][:8] if name in names else "-", *row[1:]] for name, row in rows.items()}
    print(f"| run | {' | '.join(LAUNCHES)} |\n|---|{'---|' * len(LAUNCHES)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(row)} |")
    outcomes = [outcome for row in rows.values() for outcome in row[1:] if outcome != "-"]
    print(f"\n{outcomes.count('equal')} of {len(outcomes)} equal; first column: the weights' MD5, its first digits")
    sys.exit(outcomes.count("equal") != len(outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])
