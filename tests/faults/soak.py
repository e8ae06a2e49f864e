"""Meets the digits example with faults of every kind at random moments, and shows that its end is the unbroken run's.

    python tests/faults/soak.py --faults 100

Runs of 1, 2 and 3 processes, with and without loader workers, meet one to three faults each, are continued each time by
the same command, and then left to end. A fault counts only if it came before the run had ended. After each, no process
may be left; at the end no temporary folder, a status of FINISHED, and the bits of a run that met no fault.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from accmt import read_history

SCRIPT = Path(__file__).parent / "scripts" / "soaked_digits.py"
ROOT = Path(__file__).parents[2]
UPDATES = 69
HOOKS = {  # how often each is called in a run, about
    "on_before_training_step": UPDATES,
    "on_after_backward": UPDATES,
    "on_before_optimizer_step": UPDATES,
    "on_after_optimizer_step": UPDATES,
    "on_update_end": UPDATES,
    "on_log": 14,
    "on_save_checkpoint": 9,
    "on_before_validation_step": 24,
    "on_validation_end": 4,
    "on_save_model": 3,
    "on_epoch_end": 3,
    "on_fit_start": 1,
}
SIGNALS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1")
ACTS = (*SIGNALS, "raise", "exit", "memory", "nan", "full disk", "kill worker", "hang")
SETUPS = [(1, 0), (2, 0), (1, 2), (3, 0), (2, 2)]  # processes, loader workers
TIMEOUT_S = 240


def draw_fault(processes: int, workers: int, rng: random.Random) -> dict[str, Any]:
    """Draw what happens, when, and on which process."""
    act = rng.choice([act for act in ACTS if act != "kill worker" or workers])
    if act in SIGNALS and rng.random() < 0.5:
        moment: Any = round(rng.uniform(0, 1.0), 3)
        number = 1
    else:
        moment = rng.choice(list(HOOKS)) if act != "nan" else "on_before_training_step"
        number = rng.randint(1, max(1, HOOKS[moment] // 2))
    return {"act": act, "moment": moment, "number": number, "process": rng.randrange(processes)}


def attempt(folder: Path, processes: int, workers: int, fault: dict[str, Any]) -> tuple[int, str]:
    """Start the run, wait for its end, and see that no process is left; return its exit code and what it printed."""
    part = {"folder": str(folder), "workers": workers, **fault}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(SCRIPT), json.dumps(part)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    (folder / "acted").unlink(missing_ok=True)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        code = process.wait(TIMEOUT_S)
    for _ in range(50):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return code, (folder / "log").read_text()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    raise AssertionError(f"processes were left behind after {fault}: see {folder}")


NO_FAULT = {"act": "none", "moment": "on_fit_start", "number": 1, "process": 0}


def end(folder: Path, processes: int, workers: int) -> str:
    """Let the run come to its end, and return the digest of it."""
    code, printed = attempt(folder, processes, workers, NO_FAULT)
    aborted_late = code != 0 and (folder / "result").exists()  # gloo does, now and then, at the very exit
    assert code == 0 or aborted_late, f"the run did not end well: see {folder}\n{printed[-2000:]}"
    (run_folder,) = (folder / "logs").glob("*/soak")
    last = [row["status"] for row in map(json.loads, (run_folder / "history.jsonl").open()) if "status" in row][-1]
    assert last == "FINISHED", f"status {last}: see {folder}"
    left = [path for pattern in (".tmp-*", ".old-*") for path in folder.rglob(pattern)]
    assert not left, f"left behind: {left}"
    steps = [row["step"] for row in read_history(run_folder) if "train_loss" in row.get("values", {})]
    assert steps == sorted(set(steps)), f"rows twice: {steps}, see {folder}"
    return (folder / "result").read_text()


def soak_one(processes: int, workers: int, expected: str, rng: random.Random) -> Counter[str]:
    """Meet one run with faults, continue it each time, and compare its end; return the faults that came."""
    folder = Path(tempfile.mkdtemp(prefix="accmt-soak-"))
    met: Counter[str] = Counter()
    for _ in range(rng.randint(1, 3)):
        fault = draw_fault(processes, workers, rng)
        code, printed = attempt(folder, processes, workers, fault)
        came = (folder / "acted").exists()
        may_be_late = fault["act"] == "full disk" or not isinstance(fault["moment"], str)
        is_heard = code != 0 or not came or (may_be_late and (folder / "result").exists())
        assert is_heard, f"exit code 0 after {fault}, and no end: see {folder}\n{printed[-2000:]}"
        print(f"  {processes} processes, {workers} workers: {fault} -> {code if came else 'came too late'}", flush=True)
        met[fault["act"]] += came
    result = end(folder, processes, workers)
    assert result == expected, f"another end: see {folder}"
    shutil.rmtree(folder)
    return met


def main(faults: int, seed: int) -> None:
    """Meet runs with so many faults in all."""
    print(f"seed {seed}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts by `&` ignore it
    rng, met, runs = random.Random(seed), Counter[str](), 0
    unbroken: dict[tuple[int, int], str] = {}
    while met.total() < faults:
        setup = SETUPS[runs % len(SETUPS)]
        if setup not in unbroken:
            with tempfile.TemporaryDirectory() as folder:
                unbroken[setup] = end(Path(folder), *setup)
        met += soak_one(*setup, unbroken[setup], rng)
        runs += 1
        print(f"run {runs}: the end of the unbroken run, bit for bit; {met.total()} faults so far", flush=True)
    print(f"{runs} runs, {met.total()} faults, every end bit-identical: {dict(met)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    main(arguments.faults, arguments.seed)
