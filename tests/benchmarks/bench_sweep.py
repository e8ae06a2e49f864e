"""Seconds of a sweep, beside those of the same runs by hand.

    make bench

A run takes some 30 seconds, in most of which it sleeps in place of a large model; the rounds alternate the order. What
a sweep adds is the start of its worker, once, and for each trial the import of Optuna and a line for each evaluation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "faults" / "scripts" / "swept.py"
SWEEP = """
name: timed
objective: val_loss
trials: [{rates}]
"""


def timed(command: list[str], folder: Path, sleep_s: float) -> float:
    """Return the seconds of a command in a new folder."""
    folder.mkdir(parents=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SWEPT_SLEEP": str(sleep_s)}
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.6, help="seconds that a batch sleeps")
    options = parser.parse_args()
    run = [sys.executable, str(SCRIPT)]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        sweep = root / "sweep.yaml"
        rates = ", ".join(f"{{optim.lr: {0.01 + 0.001 * number}}}" for number in range(options.trials))
        sweep.write_text(SWEEP.format(rates=rates))
        times: dict[str, list[float]] = {"by hand": [], "sweep": []}

        def by_hand(folder: Path) -> float:
            return sum(timed(run, folder / str(number), options.sleep) for number in range(options.trials))

        def by_sweep(folder: Path) -> float:
            return timed(
                [sys.executable, "-m", "accmt.cli.main", "sweep", str(sweep), "--", *run], folder, options.sleep
            )

        for number in range(options.rounds):
            ways: list[tuple[str, Callable[[Path], float]]] = [("by hand", by_hand), ("sweep", by_sweep)]
            for way, measure in ways if number % 2 == 0 else reversed(ways):
                times[way].append(measure(root / f"{number}-{way.replace(' ', '-')}"))
    hand, swept = (statistics.median(times[way]) for way in ("by hand", "sweep"))
    print(f"{options.trials} runs by hand: {hand:.1f} s; as a sweep: {swept:.1f} s; ratio {swept / hand:.3f}")


if __name__ == "__main__":
    main()
