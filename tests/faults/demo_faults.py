"""Interrupts the demo in every way that a day can bring, resumes it each time, and compares its end.

    python tests/faults/demo_faults.py                     # one process, as `make demo`
    python tests/faults/demo_faults.py --processes 2
    python tests/faults/demo_faults.py --processes 2 --limit 200

The demo is run once without interruption and once with: SIGKILL, SIGTERM, Ctrl-C, a disk that fills up (a small tmpfs,
where the user may mount one), and with several processes a SIGKILL of one of them. Saved weights, what is printed, and
the rows of the log have to be those of the first run. However few updates there are, a checkpoint is due a dozen times,
and an interruption comes by what was done, not by the clock.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from safetensors.torch import load_file

from accmt import read_history

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "tests" / "faults" / "scripts" / "demo_often.py"
TIMEOUT_S = 1200
EPOCHS, BATCH, ARTICLES = 2, 16, 1488  # of the demo
CHECKPOINTS = 12
GOES_ON = 4  # rows of the log
LARGE, LEFT = 4 << 30, 50 << 20  # room for everything, and for no further checkpoint (273 MB) nor model (91 MB)


class Demo:
    """The demo in a folder of its own.

    Args:
        folder: The folder.
        processes: How many processes train.
        limit: Articles of each part; None is all.
    """

    def __init__(self, folder: Path, processes: int, limit: int | None) -> None:
        self.folder = folder
        self.processes = processes
        self.arguments = [] if limit is None else ["--limit", str(limit)]
        num_updates = EPOCHS * math.ceil(min(limit or ARTICLES, ARTICLES) / (BATCH * processes))
        self.checkpoint_every = f"{max(1, num_updates // CHECKPOINTS)} steps"
        folder.mkdir()

    def start(self, *, resume: bool) -> subprocess.Popen[bytes]:
        """Start it, in a session of its own."""
        # Not `accelerate launch`, which starts one process where there are no GPUs, whatever number it is told.
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        command = [sys.executable, *launch, str(DEMO), *self.arguments, *(["--resume"] if resume else [])]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "CHECKPOINT_EVERY": self.checkpoint_every}
        env["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.processes))
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log, start_new_session=True)

    def finish(self, *, resume: bool) -> None:
        """Let it come to its end."""
        assert self.start(resume=resume).wait(TIMEOUT_S) == 0, f"see {self.folder / 'log'}"

    def updates(self) -> int:
        """Return the updates of the newest complete checkpoint; 0 where there is none."""
        found = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("out/checkpoint-*/step-*")]
        return max((int(match[1]) for match in found if match), default=0)

    def lines(self) -> int:
        """Return how many rows were logged, in all starts together."""
        return sum(path.read_bytes().count(b'"values"') for path in self.folder.glob("logs/*/*/history.jsonl"))

    def printed(self) -> list[str]:
        """Return what the last start printed about the saved model."""
        text = (self.folder / "log").read_text(errors="replace")
        return text[text.rindex("test accuracy") :].splitlines()[:7]

    def weights(self) -> str:
        """Return a digest of the saved weights."""
        digest = hashlib.sha256()
        for _, tensor in sorted(load_file(self.folder / "out" / "bbc_news" / "model.safetensors").items()):
            digest.update(tensor.numpy().data)  # not those of the file: safetensors writes its header in any order
        return digest.hexdigest()

    def rows(self) -> list[tuple[int, dict[str, float]]]:
        """Return the logged losses."""
        (run,) = self.folder.glob("logs/*/*/history.jsonl")
        history = list(read_history(run.parent))
        assert {row["config"]["num_processes"] for row in history if "config" in row} == {self.processes}
        rows = [row for row in history if "values" in row]
        return [(row["step"], {k: v for k, v in row["values"].items() if "loss" in k}) for row in rows]


def interrupt(demo: Demo, sent: signal.Signals, *, whole_group: bool = False, resume: bool = True) -> None:
    """Start the demo, send a signal in the middle of its work, and wait until no process of it is left.

    SIGKILL waits for a checkpoint, the others until training has gone on for a while.
    """
    measure, more = (demo.updates, 1) if sent is signal.SIGKILL else (demo.lines, GOES_ON)
    before, end = measure(), time.monotonic() + TIMEOUT_S
    process = demo.start(resume=resume)
    while measure() < before + more and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    members = trainers(process.pid)
    for pid in [process.pid, *members] if whole_group else members[-1:]:
        os.kill(pid, sent)
    code = process.wait(TIMEOUT_S)
    time.sleep(1.0)
    left = trainers(process.pid)
    print(f"{sent.name}: left with {code} at update {demo.updates()}, {len(left)} processes behind", flush=True)
    assert code != 0
    assert not left


def trainers(launcher: int) -> list[int]:
    """Return the processes that run the demo's script, under a launcher or orphaned, the oldest first."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        command = process.info["cmdline"] or []
        if str(DEMO) in command and process.pid != launcher:
            found.append((process.info["create_time"], process.pid))
    return [pid for _, pid in sorted(found)]


def fill_disk(demo: Demo) -> None:
    """Let the disk be full for a while; the run goes on without new checkpoints, is killed, and gets room again."""
    before, out = demo.updates(), demo.folder / "out"
    for unfinished in out.glob("checkpoint-*/.tmp-*"):  # the next save would get its room
        shutil.rmtree(unfinished)
    mount(out, shutil.disk_usage(out).used + LEFT)
    process = demo.start(resume=True)
    end = time.monotonic() + TIMEOUT_S
    while b"could not" not in (log := (demo.folder / "log").read_bytes()) and b"No space left" not in log:
        assert process.poll() is None, "the demo did not go on"
        assert time.monotonic() < end
        time.sleep(0.2)
    time.sleep(2.0)
    is_training = process.poll() is None
    for pid in [process.pid, *trainers(process.pid)]:
        os.kill(pid, signal.SIGKILL)
    process.wait(TIMEOUT_S)
    print(
        f"full disk: still training: {is_training}; newest checkpoint {demo.updates()} (before: {before})", flush=True
    )
    assert demo.updates() >= before
    mount(out, LARGE)


def mount(folder: Path, size: int) -> None:
    """Give a folder a disk of its own in memory, or one that is there another size in bytes."""
    is_there = folder.is_mount()
    what = ["-o", f"remount,size={size}"] if is_there else ["-t", "tmpfs", "-o", f"size={size}", "tmpfs"]
    subprocess.run(["mount", *what, str(folder)], check=True)


def main(processes: int, limit: int | None) -> None:
    """Compare a run with every interruption and one without."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it starts by `&` ignore it
    base = Path(tempfile.mkdtemp(prefix="accmt-demo-"))
    unbroken, broken = Demo(base / "unbroken", processes, limit), Demo(base / "broken", processes, limit)
    unbroken.finish(resume=False)
    print("\n".join(unbroken.printed()), flush=True)
    out = broken.folder / "out"
    out.mkdir()
    may_mount = os.geteuid() == 0
    if may_mount:
        mount(out, LARGE)
    try:
        interrupt(broken, signal.SIGKILL, whole_group=True, resume=False)
        if may_mount:
            fill_disk(broken)
        interrupt(broken, signal.SIGTERM)
        if processes > 1:
            interrupt(broken, signal.SIGKILL)
        interrupt(broken, signal.SIGINT)
        broken.finish(resume=True)
        print("\n".join(broken.printed()), flush=True)
        same = {
            "weights": broken.weights() == unbroken.weights(),
            "printed": broken.printed() == unbroken.printed(),
            "rows": broken.rows() == unbroken.rows(),
        }
        print(f"the same as without interruption: {same}")
        assert all(same.values())
    finally:
        if may_mount:
            subprocess.run(["umount", "-l", str(out)], check=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    main(arguments.processes, arguments.limit)
