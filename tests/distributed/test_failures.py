"""Several processes, one of which gets a signal or fails: all leave together, and what is continued is the same run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accmt.checkpoint.store import CheckpointStore
from tests.launching import SCRIPTS, launch

ROOT = Path(__file__).parents[2]
MOMENTS = [
    ("on_before_training_step", 1),
    ("on_after_backward", 4),
    ("on_before_validation_step", 1),
    ("on_validation_end", 1),
    ("on_update_end", 2),
    ("on_epoch_end", 1),
    ("on_save_model", 1),
]
SENT = ["SIGTERM", "SIGINT", "SIGUSR1"]
ERRORS = {"SIGTERM": "Preempted", "SIGUSR1": "Preempted", "SIGINT": "KeyboardInterrupt"}
ENDS = ("counters", "weights", "best")


def parts_of(folder: Path, processes: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return an unbroken run, then for each moment a run that is left there and one that continues it."""
    parts: list[dict[str, Any]] = [{"folder": str(folder / "unbroken"), "act": "none"}]
    places = [*MOMENTS, *((round(rng.uniform(0, 0.5), 3), 1) for _ in range(4))]
    for index, (moment, number) in enumerate(places):
        process = processes - 1 if moment in ("on_save_model",) else rng.randrange(processes)
        act = SENT[index % len(SENT)]
        name = str(folder / str(index))
        parts.append({"folder": name, "act": act, "moment": moment, "number": number, "process": process})
        parts.append({"folder": name, "act": "none"})
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_signal_to_any_process_at_any_moment_is_one_checkpoint_for_all(tmp_path: Path, processes: int) -> None:
    seed = int(os.environ.get("ACCMT_TEST_SEED", time.time()))
    sys.stdout.write(f"seed {seed}: ACCMT_TEST_SEED={seed} repeats this\n")
    parts = parts_of(tmp_path, processes, random.Random(seed))
    result = tmp_path / "result.json"
    env = {"PYTHONPATH": str(ROOT)}
    launch(SCRIPTS / "failures.py", str(result), json.dumps(parts), processes=processes, result=result, env=env)
    everywhere = [json.loads((tmp_path / f"result.json.{index}").read_text()) for index in range(processes)]
    for part, *outcomes in zip(parts, *everywhere, strict=True):
        assert len({(outcome["ended"], outcome["counters"]["global_step"]) for outcome in outcomes}) == 1, part
    unbroken, *rest = everywhere[0]
    for part, left, continued in zip(parts[1::2], rest[::2], rest[1::2], strict=True):
        may_be_late = part["moment"] == "on_save_model" or not isinstance(part["moment"], str)
        is_late = may_be_late and left["ended"] == "finished"
        assert is_late or left["ended"] == ERRORS[part["act"]], part
        assert {name: continued[name] for name in ENDS} == {name: unbroken[name] for name in ENDS}, part


def start(folder: Path, processes: int, part: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """Launch one part, and return how it ended; fail if a process is left."""
    script = str(SCRIPTS / "failures.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", script]
    part = {"folder": str(folder / "run"), **part}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    process = subprocess.Popen(
        [*command, str(folder / "result.json"), json.dumps([part])],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=90)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, printed)


FAULTS = [
    ("raise", "on_after_backward", 1, "ValueError: the fault of this test"),
    ("raise", "on_validation_end", 0, "ValueError: the fault of this test"),
    ("exit", "on_before_training_step", 1, "SystemExit: 0"),
    ("SIGKILL", "on_before_training_step", 1, "it is gone without a word"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("act", "moment", "process", "said"), FAULTS, ids=lambda value: str(value))
def test_where_one_process_fails_all_end_and_a_checkpoint_is_there(
    tmp_path: Path, act: str, moment: str, process: int, said: str
) -> None:
    settings = {"handlers": "all"}
    number = 1 if moment == "on_validation_end" else 5
    part = {"act": act, "moment": moment, "number": number, "process": process, "settings": settings}
    ended = start(tmp_path, 2, part)
    assert (tmp_path / "run" / "acted").exists(), ended.stdout[-3000:]
    seconds = time.time() - float((tmp_path / "run" / "acted").read_text())
    assert seconds < 10 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert ended.returncode != 0
    assert said in ended.stdout
    assert f"process {process}" in ended.stdout or process == 0
    newest = CheckpointStore(tmp_path / "run" / "checkpoint-model").newest()
    assert newest is not None
    assert newest.info["global_step"] in (2, 3)  # in its backward, a process gives the others what they need
    assert not list((tmp_path / "run" / "checkpoint-model").glob(".tmp-*"))
    continued = start(tmp_path, 2, {"act": "none"})
    assert continued.returncode == 0, continued.stdout[-3000:]
    counters = json.loads((tmp_path / "result.json").read_text())[0]["counters"]
    assert (counters["epoch"], counters["global_step"], counters["samples_seen"]) == (3, 6, 66)


@pytest.mark.slow
def test_a_hang_of_one_process_ends_all_and_says_where_it_was(tmp_path: Path) -> None:
    settings = {"hang_timeout_s": 5.0, "checkpoint_every": "1 step"}
    part = {"act": "hang", "moment": "on_before_training_step", "number": 5, "process": 1, "settings": settings}
    ended = start(tmp_path, 2, part)
    assert ended.returncode != 0
    assert "in act" in ended.stdout, "the stack of the process that hangs"
    seconds = time.time() - float((tmp_path / "run" / "acted").read_text())
    assert seconds < 20 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    continued = start(tmp_path, 2, {"act": "none"})
    assert continued.returncode == 0, continued.stdout[-3000:]
    counters = json.loads((tmp_path / "result.json").read_text())[0]["counters"]
    assert (counters["epoch"], counters["global_step"], counters["samples_seen"]) == (3, 6, 66)
