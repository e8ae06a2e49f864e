"""Kills training runs at random moments and shows that what comes out is the unbroken run, bit for bit.

    python tests/faults/random_kills.py --runs 30

Each run is killed three times (SIGKILL), continued each time by the same command, and then left to end. Runs take turns
with 0 and 2 loader workers, with and without asynchronous checkpoints. `--launch 2` kills runs of two processes, all at
once or one of them, after which the other ends by itself; `--launch fsdp-2` does so with sharded models, `--launch
tp-2` with split ones.
`--store s3` copies checkpoints to an S3 server (moto, which `make object-storage` installs), and wipes the disk at each
kill; ACCMT_TEST_WIDTH=512 makes checkpoints of 3 MB. With `--disks`, each process has a disk of its own (root only), of
which any number are wiped.
`--trainer mixed` trains on three sources, whose weights change at a step. `--trainer prefer` tunes a model on
preferences, after computing the reference; with ACCMT_TEST_LOSS=kto, on single answers; with ACCMT_TEST_QUANTIZED=1, an
adapter on a model in 4 bits (bitsandbytes, which `make quantized` installs).
`--trainer same_bits --launch 1,2,4` starts each run on other processes than before, and compares it with that of one.
`--max-tokens 12` cuts the samples of each step by a token budget; `--trainer packed` packs documents into rows.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.launching import Fork, start_together

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_OF = {
    "accmt": SCRIPTS / "killed_run.py",
    "packed": SCRIPTS / "killed_packed_run.py",
    "mixed": SCRIPTS / "killed_mixed_run.py",
    "prefer": SCRIPTS / "killed_prefer_run.py",
    "same_bits": SCRIPTS / "killed_same_bits_run.py",
}
KILLS = 3
TIMEOUT_S = 300
ENDS_WITHIN_S = 60.0


class Variant(NamedTuple):
    """How a run is made.

    Attributes:
        trainer: The script, by its name in `SCRIPT_OF`.
        workers: Loader workers.
        is_async: "1" where checkpoints are written while training goes on.
        launch: How many processes, and with which engine, as `tests.launching.launch` takes it; several with commas
            take turns from start to start.
        max_tokens: The token budget; "" is none.
    """

    trainer: str
    workers: str
    is_async: str
    launch: str
    max_tokens: str


@dataclass(frozen=True)
class Outcome:
    """How a killed run ended.

    Attributes:
        is_same: Whether its end is the unbroken run's, bit for bit.
        during_save: How many kills left an unfinished checkpoint behind.
        after_end: How many kills came too late.
    """

    is_same: bool
    during_save: int
    after_end: int


class Running:
    """The processes of a run; each has a process group of its own, so that its workers can be killed with it."""

    def __init__(self, folder: Path, variant: Variant, turn: int = 0) -> None:
        (folder / "started").unlink(missing_ok=True)
        command = [SCRIPT_OF[variant.trainer], "run", variant.workers, variant.is_async]
        command += [variant.max_tokens] if variant.max_tokens else []
        launches = variant.launch.split(",")
        name = launches[turn % len(launches)]
        with (folder / "log").open("ab") as log:
            if name == "1":
                self.forks, self.store = [Fork(*command, files=[log, log], folder=folder)], None
            else:
                launch = int(name) if name.isdigit() else name
                self.forks, self.store = start_together(*command, processes=launch, output=log, folder=folder)

    def poll(self, timeout_s: float = 0.0) -> int | None:
        """Return the largest exit code; None where a process still runs after so many seconds."""
        codes = [fork.poll(timeout_s) for fork in self.forks]
        return None if None in codes else max(map(abs, codes))

    def kill(self, rng: random.Random) -> None:
        """Kill all, or one, after which the others end by themselves."""
        victims = rng.choice([self.forks, self.forks[:1], self.forks[-1:]])
        for fork in victims:
            fork.kill()
        self.poll(ENDS_WITHIN_S)
        for fork in self.forks:
            fork.kill()


def finish(folder: Path, variant: Variant, turn: int = 0) -> tuple[str, float]:
    """Let the run come to its end; return the digest of it ("" if it failed), and the seconds that it trained."""
    process = Running(folder, variant, turn)
    began = wait_until_training(process, folder)
    code = process.poll(TIMEOUT_S)
    seconds = time.monotonic() - began
    if code == 0:
        return (folder / "result").read_text(), seconds
    print((folder / "log").read_text().splitlines()[-1])
    return "", seconds


def wait_until_training(process: Running, folder: Path) -> float:
    """Return the moment at which the run began to train, or ended."""
    while not (folder / "started").exists() and process.poll() is None:
        time.sleep(0.01)
    return time.monotonic()


def kill(process: Running, folder: Path, after_s: float, rng: random.Random) -> tuple[bool, bool]:
    """Kill the run so many seconds after it began to train.

    Returns:
        Whether a checkpoint was being written, and whether the run had ended before.
    """
    wait_until_training(process, folder)
    time.sleep(after_s)
    had_ended = process.poll() is not None
    process.kill(rng)
    disks = sorted(folder.glob("disk-*")) or [folder / "run"]
    was_saving = any(any(disk.glob("checkpoint-model/.[to][ml][pd]-*")) for disk in disks)
    if "ACCMT_TEST_STORE" in os.environ:
        for disk in disks if len(disks) == 1 else rng.sample(disks, rng.randint(0, len(disks))):
            shutil.rmtree(disk, ignore_errors=True)
    return was_saving, had_ended


def try_run(variant: Variant, expected: str, seconds: float, rng: random.Random) -> Outcome:
    """Kill one run at random moments, and compare its end."""
    folder = Path(tempfile.mkdtemp(prefix="accmt-kills-"))
    turn = rng.randrange(variant.launch.count(",") + 1)
    hits = [
        kill(Running(folder, variant, turn + number), folder, rng.uniform(0, 0.6 * seconds), rng)
        for number in range(KILLS)
    ]
    result, _ = finish(folder, variant, turn + KILLS)
    if result == expected:
        shutil.rmtree(folder)
    else:
        print(f"different: see {folder}")
    return Outcome(result == expected, sum(hit for hit, _ in hits), sum(ended for _, ended in hits))


def start_store() -> None:
    """Start an S3 server in this process, and let runs copy their checkpoints to it."""
    import fsspec
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    store = DomainDispatcherApplication(create_backend_app)

    server = make_server("127.0.0.1", 0, store, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{server.server_port}"
    os.environ["ACCMT_TEST_STORE"] = "s3://kills"
    fsspec.filesystem("s3").mkdir("kills")


def main(
    runs: int,
    seed: int,
    trainer: str = "accmt",
    launch: str = "1",
    max_tokens: str = "",
    store: str = "",
    *,
    disks: bool = False,
) -> bool:
    """Try so many runs; return whether all were the same as the unbroken one."""
    if disks:
        os.environ["ACCMT_TEST_DISKS"] = "1"
    if store:
        start_store()
    rng = random.Random(seed)
    print(f"seed {seed}")
    variants = [Variant(trainer, *others, launch, max_tokens) for others in product(("0", "2"), ("1", "0"))]
    unbroken: dict[Variant, tuple[str, float]] = {}
    outcomes = []
    for number in range(runs):
        variant = variants[number % len(variants)]
        if variant not in unbroken:
            with tempfile.TemporaryDirectory() as folder:
                unbroken[variant] = finish(Path(folder), variant)
                assert unbroken[variant][0], "the unbroken run failed"
        outcomes.append(try_run(variant, *unbroken[variant], rng))
        print(
            f"run {number + 1}: {variant.workers} workers, asynchronous {variant.is_async}: {outcomes[-1]}", flush=True
        )
    same = sum(outcome.is_same for outcome in outcomes)
    during, late = sum(o.during_save for o in outcomes), sum(o.after_end for o in outcomes)
    print(f"{same} of {runs} runs bit-identical; {KILLS * runs} kills, {during} inside a save, {late} after the end")
    return same == runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--trainer", choices=SCRIPT_OF, default="accmt")
    parser.add_argument("--launch", default="1", metavar="1, 2, fsdp-2, hsdp-4, tp-2, tpfsdp-4; 1,2,4")
    parser.add_argument("--max-tokens", default="")
    parser.add_argument("--store", choices=["s3"], default="")
    parser.add_argument("--disks", action="store_true")
    sys.exit(0 if main(**vars(parser.parse_args())) else 1)
