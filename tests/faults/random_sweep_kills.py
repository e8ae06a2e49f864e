"""Kills sweeps at random moments and shows that what comes out is the unbroken study, bit for bit.

    python tests/faults/random_sweep_kills.py --trials 20 --kills 30

A sweep (TPE, median pruner) runs once without a kill. Then the same sweep is killed: by turns the worker (whose trial
then stops itself), the program of the trial (which the worker starts again), and both. After each kill of the worker,
the same command continues. Compared are the trials' values, all reported objectives, states and the weights of the best
trial. `--population` searches by population-based training instead, and compares the lineage, too. `--functions` runs
the trials as functions in the worker, which is killed each time; it takes a fraction of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
SCRIPT = ROOT / "tests" / "faults" / "scripts" / "swept.py"
POPULATION = {
    "space": {"optim.lr": {"log_uniform": [1e-3, 1.0]}, "trainer.clip_grad": [1.0, 2.0, 5.0]},
    "population": {"members": 4, "every": 4, "rounds": 4},
    "pruner": "none",
}
KINDS = ("worker", "trial", "all")
LIMIT_S = 3000


def write_sweep(folder: Path, trials: int | None, **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sweep = {
        "name": "killed",
        "folder": str(folder / "sweep"),
        "space": {
            "optim.lr": {"log_uniform": [1e-3, 1.0]},
            "optim.momentum": {"uniform": [0.0, 0.9]},
            "script.hidden": [4, 8],
            "trainer.clip_grad": [1.0, 5.0],
        },
        "objective": "val_loss",
        "trials": trials,
        "sampler": {"type": "tpe", "n_startup_trials": 3},
        "pruner": {"type": "median", "n_startup_trials": 2, "n_warmup_steps": 8},
        **keys,
    }
    path = folder / "sweep.json"
    path.write_text(json.dumps({key: value for key, value in sweep.items() if value is not None}))
    return path


def start(sweep: Path, *, functions: bool, sleep_s: float) -> subprocess.Popen[bytes]:
    """Start a worker."""
    own = [sys.executable, str(SCRIPT)]
    command = [sys.executable, "-m", "accmt.cli.main", "sweep", str(sweep), "--", *own]
    command = [*own, f"--sweep={sweep}"] if functions else command
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SWEPT_SLEEP": str(sleep_s)}
    with (sweep.parent / "worker.log").open("ab") as log:
        return subprocess.Popen(command, cwd=sweep.parent, env=environment, stdout=log, stderr=subprocess.STDOUT)


def find_programs(sweep: Path) -> list[int]:
    """Return the ids of the processes that run trials, as their locks name them."""
    found = []
    for lock in (sweep.parent / "sweep" / "trials").glob("*/process/.lock"):
        with suppress(OSError):
            if match := re.match(r"process (\d+)", lock.read_text()):
                found.append(int(match[1]))
    return found


def read_study(sweep: Path) -> dict[str, Any]:
    """Return what is compared of a finished study."""
    from safetensors.torch import load_file

    from accmt.addons.sweep.spec import read_spec
    from accmt.addons.sweep.study import SweepStudy, outcome_of, parent_of
    from accmt.addons.sweep.worker import Sweep

    best = Sweep.from_yaml(sweep).result().best
    with closing(SweepStudy(read_spec(sweep))) as study:
        found = study.trials()
    trials = [
        (
            trial.params,
            trial.state.name,
            trial.values,
            sorted(trial.intermediate_values.items()),
            outcome_of(trial)["steps"],
            parent_of(trial),
        )
        for trial in found
    ]
    model = best.model / "model.safetensors"  # of another machine, if workers share no disk
    weights = {name: one.numpy().tobytes() for name, one in load_file(model).items()} if model.exists() else {}
    return {"trials": trials, "best": best.number, "weights": weights}


def kill_at_random(
    sweep: Path, kills: int, seed: int, *, functions: bool, sleep_s: float, longest_s: float
) -> dict[str, int]:
    """Run a sweep to its end, with kills, and return how many there were of each kind."""
    chooser, done = random.Random(seed), dict.fromkeys(KINDS, 0)
    worker, deadline = start(sweep, functions=functions, sleep_s=sleep_s), time.monotonic() + LIMIT_S
    while sum(done.values()) < kills and worker.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(chooser.uniform(0.2, longest_s))
        if worker.poll() is not None:
            break
        kind = "worker" if functions else KINDS[sum(done.values()) % 3]
        programs = find_programs(sweep) if kind != "worker" else []
        if kind == "trial" and not programs:
            continue
        if kind != "trial":
            worker.kill()
            worker.wait()
        for program in programs:
            with suppress(ProcessLookupError):
                os.kill(program, signal.SIGKILL)
        done[kind] += 1
        if kind != "trial":
            worker = start(sweep, functions=functions, sleep_s=sleep_s)
    while worker.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if worker.poll() != 0:
        worker.kill()
        raise SystemExit((sweep.parent / "worker.log").read_text()[-4000:])
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--functions", action="store_true")
    parser.add_argument("--population", action="store_true")
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds of a batch, so that kills hit trials")
    parser.add_argument("--longest", type=float, default=15.0, help="longest time between two kills, in seconds")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="accmt-sweep-"))
    trials, keys = (None, POPULATION) if options.population else (options.trials, {})
    unbroken = write_sweep(folder / "unbroken", trials, **keys)
    if start(unbroken, functions=options.functions, sleep_s=options.sleep).wait(LIMIT_S) != 0:
        raise SystemExit((unbroken.parent / "worker.log").read_text()[-4000:])
    expected = read_study(unbroken)
    killed = write_sweep(folder / "killed", trials, **keys)
    done = kill_at_random(
        killed,
        options.kills,
        options.seed,
        functions=options.functions,
        sleep_s=options.sleep,
        longest_s=options.longest,
    )
    got = read_study(killed)
    states = [state for _, state, *_ in expected["trials"]]
    print(f"kills: {done}; trials: {len(states)}, {states.count('PRUNED')} pruned")
    for index, (before, now) in enumerate(zip(expected["trials"], got["trials"], strict=False)):
        if before != now:
            print(f"trial {index} differs:\n  {before}\n  {now}")
    is_same = got == expected
    print("identical: trials, objectives, states, best weights" if is_same else f"DIFFERENT, see {folder}")
    if is_same:
        shutil.rmtree(folder)
    raise SystemExit(not is_same)


if __name__ == "__main__":
    main()
