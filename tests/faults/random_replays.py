"""Kills and resumes random runs, replays random steps of each, and shows that all are as the ledger says, bit for bit.

    python tests/faults/random_replays.py --runs 30 --steps 30

Runs take turns with datasets, streams, a token budget, manual optimization, packed documents and LoRA, and differ at
random in the number of processes (1 or 2, or 2 with a sharded model), precision, accumulation and seed. Each is killed
once (SIGKILL) and resumed. Two replays, from different checkpoints, make all the random steps again; in half of them
samples are measured too, which must not change anything.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from accmt.addons.flight_recorder.ledger import LEDGER_FILE, read_ledger
from accmt.addons.flight_recorder.replay import replay
from tests.distributed.hosts import groups_below
from tests.launching import ENGINES, ROOT

SCRIPT = Path(__file__).parent / "scripts" / "replayed_run.py"
KINDS = ("dataset", "stream", "tokens", "manual", "packed", "lora")
LAUNCHES = ("1", "2", "fsdp-2")
TIMEOUT_S = 600


class Variant(NamedTuple):
    """How a run is made: its kind, processes, precision, accumulation and seed."""

    kind: str
    launch: str
    precision: str
    accumulation: int
    seed: int

    @classmethod
    def draw(cls, number: int, rng: random.Random) -> Variant:
        kind = KINDS[number % len(KINDS)]
        launch = rng.choice(LAUNCHES[:2] if kind == "manual" else LAUNCHES)
        accumulation = 1 if kind == "manual" else rng.randint(1, 3)
        return cls(kind, launch, rng.choice(("no", "bf16")), accumulation, rng.randrange(10_000))


def start(variant: Variant, folder: Path) -> subprocess.Popen[bytes]:
    """Start a run really, not in a fork, so that it can be started again in the same way."""
    arguments = [folder, variant.kind, variant.precision, variant.accumulation, variant.seed]
    command = [str(SCRIPT), *map(str, arguments)]
    engine = ENGINES["fsdp"] if variant.launch == "fsdp-2" else {}
    if variant.launch != "1":
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command]
    environment = {**os.environ, **engine, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "log").open("ab") as log:
        command = [sys.executable, *command]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def kill_after(process: subprocess.Popen[bytes], ledger: Path, step: int) -> None:
    """Kill a run and all its processes once the ledger has a step."""
    while process.poll() is None:
        if ledger.exists() and any(line.get("step", 0) >= step for line in read_ledger(ledger).lines):
            for group in groups_below(process.pid):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            process.wait()
        time.sleep(0.05)


def try_run(variant: Variant, num_steps: int, folder: Path, rng: random.Random) -> tuple[int, int]:
    """Make a run, kill it once, and replay random steps; return how many are as recorded, and how many were tried."""
    run_folder = folder / "logs" / "model" / "run"
    kill_after(start(variant, folder), run_folder / LEDGER_FILE, rng.randint(8, 30))
    if start(variant, folder).wait(TIMEOUT_S) != 0:
        print((folder / "log").read_text()[-2000:])
        return 0, num_steps
    recorded = [line["step"] for _, line in read_ledger(run_folder / LEDGER_FILE).effective() if "batches" in line]
    steps = sorted(rng.choice(sorted(set(recorded))) for _ in range(num_steps))
    middle = rng.choice(steps)
    equal = 0
    for part in ([step for step in steps if step < middle], [step for step in steps if step >= middle]):
        if not part:
            continue
        found = replay(run_folder, part[0], part[-1], examines=rng.random() < 0.5)
        print(f"  steps {part[0]} to {part[-1]} from {found.begin}: {found.difference or 'identical'}", flush=True)
        at = int(found.difference.split()[1].rstrip(":")) if found.difference else part[-1] + 1
        equal += sum(step < at for step in part)
    return equal, num_steps


def main(runs: int, steps: int, seed: int, first: int = 0) -> bool:
    """Try so many runs; return whether all replayed steps were as recorded."""
    print(f"seed {seed}")
    equal = tried = 0
    for number in range(first, first + runs):
        rng = random.Random(f"{seed} {number}")
        variant = Variant.draw(number, rng)
        print(f"run {number + 1}: {variant}", flush=True)
        with tempfile.TemporaryDirectory(prefix="accmt-replays-") as folder:
            one, of = try_run(variant, steps, Path(folder), rng)
        equal, tried = equal + one, tried + of
    print(f"{equal} of {tried} replayed steps are bit-identical, in {runs} runs, each killed once")
    return equal == tried


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--steps", type=int, default=30, help="random steps of each run")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="the number of the first run, to continue a series")
    sys.exit(0 if main(**vars(parser.parse_args())) else 1)
