"""Forks random runs at random steps, and shows that up to there each fork is its parent, bit for bit.

    python tests/faults/random_forks.py --forks 30

Runs take turns as in `random_replays.py`. Each gets two forks. One changes nothing: it is killed once (SIGKILL) and
resumed by the same command, also while it makes its parent's steps again, and has to end with the weights and the
optimizer state of its parent. The other one changes the learning rate, and has to differ after the step. It begins
while its parent is running, or afterwards. No file of a parent may change.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))

from accmt.addons.flight_recorder.ledger import LEDGER_FILE, read_ledger
from accmt.checkpoint.retention import list_published
from tests.faults.random_replays import TIMEOUT_S, Variant, kill_after, start
from tests.launching import ROOT


def fork(run: Path, step: int, *changes: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "accmt.cli.main", "fork", str(run), "--at", str(step), *changes]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (run.parents[2] / "log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def read_steps(run: Path) -> dict[Any, tuple[Any, ...]]:
    """Return what each window of a run's ledger holds."""
    lines = [line for _, line in read_ledger(run / LEDGER_FILE).effective() if "batches" in line]
    return {(line["epoch"], line["batches"][0]): (line["step"], line["samples"], line["loss"]) for line in lines}


def read_end(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the last checkpoint."""
    files = sorted(list_published(checkpoints)[-1].glob("*.safetensors"))
    return {f"{file.name} {name}": tensor for file in files for name, tensor in load_file(file).items()}


def content_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [*(folder / "logs" / "model" / "run").glob("*.*"), *(folder / "checkpoint-model").rglob("*.*")]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files if path.is_file()}


def try_unchanged(run: Path, step: int, rng: random.Random) -> str:
    """Fork without a change, kill the fork once, and return what differs from the parent; "" if nothing does."""
    folder, name = run.parents[2], f"run-at-{step}"
    kill_after(fork(run, step), run.with_name(name) / LEDGER_FILE, rng.randint(1, max(read_steps(run).values())[0]))
    if fork(run, step).wait(TIMEOUT_S) != 0:
        return "the fork failed"
    one, other = read_end(folder / "checkpoint-model"), read_end(folder / f"checkpoint-model-{name}")
    if one.keys() != other.keys() or not all(torch.equal(one[key], other[key]) for key in one):
        return "it ended with other weights"
    parent = read_steps(run)
    different = [line for key, line in read_steps(run.with_name(name)).items() if parent[key] != line]
    return f"step {different[0][0]} differs" if different else ""


def try_changed(run: Path, step: int) -> str:
    """Fork with another learning rate, and return what is wrong: a difference before the step, or none after it."""
    if fork(run, step, "--hps.optim.lr=0.05", "--run-name", "changed").wait(TIMEOUT_S) != 0:
        return "the fork failed"
    parent, own = read_steps(run), read_steps(run.with_name("changed"))
    for key, line in own.items():
        if line[0] <= step + 1 and parent[key] != line:  # the rate changes what follows the next step
            return f"step {line[0]} differs"
    return (
        "" if any(parent[key] != line for key, line in own.items()) or max(own.values())[0] < step + 2 else "no change"
    )


def try_run(variant: Variant, folder: Path, rng: random.Random) -> list[str]:
    """Make a run and two forks of it; return what is wrong with each."""
    run = folder / "logs" / "model" / "run"
    process = start(variant, folder)
    found = []
    is_early = rng.random() < 0.5  # a fork of a run that is still running
    while is_early and process.poll() is None and not found:
        kept = [path for path in list_published(folder / "checkpoint-model") if (path / "PINNED").exists()]
        if kept:
            found.append(try_changed(run, int(kept[-1].name[5:])))
        time.sleep(0.05)
    if process.wait(TIMEOUT_S) != 0:
        print((folder / "log").read_text()[-3000:])
        return ["the parent failed"] * 2
    before = content_of(folder)
    first = int(list_published(folder / "checkpoint-model")[0].name[5:])
    last = max(read_steps(run).values())[0]
    if not found:
        found.append(try_changed(run, rng.randint(first, last - 1)))
    found.append(try_unchanged(run, rng.randint(first, last), rng))
    if content_of(folder) != before:
        found[-1] = "the parent has changed"
    if any(found):
        print((folder / "log").read_text()[-3000:])
    return found


def main(forks: int, seed: int, first: int = 0) -> bool:
    """Try so many forks; return whether all were as they should be."""
    print(f"seed {seed}")
    good = 0
    for number in range(first, first + forks // 2):
        rng = random.Random(f"{seed} {number}")
        variant = Variant.draw(number, rng)
        with tempfile.TemporaryDirectory(prefix="accmt-forks-") as folder:
            found = try_run(variant, Path(folder), rng)
        print(f"run {number + 1}: {variant}: {', '.join(fault or 'identical' for fault in found)}", flush=True)
        good += sum(not fault for fault in found)
    print(f"{good} of {forks} forks are bit-identical to their parents up to their step, without a change to their end")
    return good == forks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forks", type=int, default=30)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0, help="the number of the first run, to continue a series")
    sys.exit(0 if main(**vars(parser.parse_args())) else 1)
