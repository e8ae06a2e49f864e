"""Kills sweeps of accmt, and of Optuna with other trainers by hand, at the same moments, and counts what is left.

    python tests/faults/compare_sweeps.py --trials 12 --kills 10

By hand, the study is in SQLite, with Optuna's heartbeat and RetryFailedTrialCallback. Each sweep runs once without a
kill, then with kills of its process, each followed by the same command. Needs the package lightning (or `--only
transformers`).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.faults import random_sweep_kills
from tests.faults.random_sweep_kills import ROOT, write_sweep

BY_HAND = ROOT / "tests" / "faults" / "scripts" / "swept_by_hand.py"
Start = Callable[[Path], "subprocess.Popen[bytes]"]


def start_by_hand(trainer: str, trials: int, sleep_s: float) -> Start:
    def start(folder: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(BY_HAND), trainer, str(folder / "study.db"), str(trials)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SWEPT_SLEEP": str(sleep_s)}
        environment["SWEPT_STEPS"] = str(folder / "steps")
        with (folder / "worker.log").open("ab") as log:
            return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)

    return start


def start_accmt(trials: int, sleep_s: float) -> Start:
    def start(folder: Path) -> subprocess.Popen[bytes]:
        os.environ["SWEPT_STEPS"] = str(folder / "steps")
        return random_sweep_kills.start(write_sweep(folder, trials), functions=True, sleep_s=sleep_s)

    return start


def run(start: Start, folder: Path, kills: int, longest_s: float) -> int:
    """Run a sweep to its end, and return how many kills there were."""
    folder.mkdir()
    chooser, done, worker = random.Random(0), 0, start(folder)
    while done < kills and worker.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(chooser.uniform(3, longest_s))
        if worker.poll() is None:
            worker.kill()
            worker.wait()
            done, worker = done + 1, start(folder)
    if worker.wait() != 0:
        raise SystemExit((folder / "worker.log").read_text()[-3000:])
    return done


def read_by_hand(folder: Path) -> list[Any]:
    return optuna.load_study(study_name="killed", storage=f"sqlite:///{folder / 'study.db'}").trials


def read_accmt(folder: Path) -> list[Any]:
    from accmt.addons.sweep.spec import read_spec
    from accmt.addons.sweep.study import SweepStudy

    return SweepStudy(read_spec(folder / "sweep.json")).trials()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--longest", type=float, default=20.0, help="longest time between two kills, in seconds")
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a batch")
    parser.add_argument("--only", choices=("accmt", "lightning", "transformers"))
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="accmt-sweeps-"))
    for name in ("accmt", "lightning", "transformers") if options.only is None else (options.only,):
        is_accmt = name == "accmt"
        start = (start_accmt if is_accmt else lambda *of, name=name: start_by_hand(name, *of))(
            options.trials, options.sleep
        )
        read = read_accmt if is_accmt else read_by_hand
        run(start, root / f"{name}-unbroken", 0, options.longest)
        done = run(start, root / f"{name}-killed", options.kills, options.longest)
        unbroken, killed = read(root / f"{name}-unbroken"), read(root / f"{name}-killed")
        finished = [trial for trial in killed if trial.state.name in ("COMPLETE", "PRUNED")]
        same = [
            before.params == after.params and before.values == after.values and before.state == after.state
            for before, after in zip(unbroken, finished, strict=True)
        ]
        steps = [(root / f"{name}-{kind}" / "steps").stat().st_size for kind in ("unbroken", "killed")]
        best = [min(trial.values[0] for trial in each if trial.values) for each in (unbroken, finished)]
        print(
            f"{name}: {done} kills; {sum(same)} of {len(unbroken)} trials are those of the unbroken sweep; "
            f"{len(killed) - len(finished)} trials were left unfinished; {steps[1]} steps trained instead of "
            f"{steps[0]}; best value {best[1]:.6g} instead of {best[0]:.6g}",
            flush=True,
        )


if __name__ == "__main__":
    main()
