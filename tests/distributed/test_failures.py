"""Several processes, one of which gets a signal or fails: all leave together, and what is continued is the same run."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accmt.checkpoint.store import CheckpointStore
from tests.launching import ROOT, SCRIPTS, launch, run_together

SCRIPT = SCRIPTS / "failures.py"
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
Start = Callable[[Path, dict[str, Any]], tuple[bool, str]]


def parts_of(folder: Path, processes: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return an unbroken run, then for each moment a run that is left there and one that continues it."""
    parts: list[dict[str, Any]] = [{"folder": str(folder / "unbroken"), "act": "none"}]
    places = [*MOMENTS, *((round(rng.uniform(0, 0.5), 3), 1) for _ in range(2))]
    for index, (moment, number) in enumerate(places):
        process = processes - 1 if moment in ("on_save_model",) else rng.randrange(processes)
        act = SENT[index % len(SENT)]
        name = str(folder / str(index))
        parts.append({"folder": name, "act": act, "moment": moment, "number": number, "process": process})
        parts.append({"folder": name, "act": "none"})
    return parts


def test_a_signal_to_any_process_at_any_moment_is_one_checkpoint_for_all(tmp_path: Path) -> None:
    processes = 3
    seed = int(os.environ.get("ACCMT_TEST_SEED", time.time()))
    sys.stdout.write(f"seed {seed}: ACCMT_TEST_SEED={seed} repeats this\n")
    parts = parts_of(tmp_path, processes, random.Random(seed))
    result = tmp_path / "result.json"
    launch(SCRIPT, str(result), json.dumps(parts), processes=processes, result=result)
    everywhere = [json.loads((tmp_path / f"result.json.{index}").read_text()) for index in range(processes)]
    for part, *outcomes in zip(parts, *everywhere, strict=True):
        assert len({(outcome["ended"], outcome["counters"]["global_step"]) for outcome in outcomes}) == 1, part
    unbroken, *rest = everywhere[0]
    for part, left, continued in zip(parts[1::2], rest[::2], rest[1::2], strict=True):
        may_be_late = part["moment"] == "on_save_model" or not isinstance(part["moment"], str)
        is_late = may_be_late and left["ended"] == "finished"
        assert is_late or left["ended"] == ERRORS[part["act"]], part
        assert {name: continued[name] for name in ENDS} == {name: unbroken[name] for name in ENDS}, part


def start(folder: Path, part: dict[str, Any]) -> tuple[bool, str]:
    """Run one part in two processes; return whether both ended well and what they printed; fail if one is left."""
    part = {"folder": str(folder / "run"), **part}
    forks, printed = run_together(SCRIPT, str(folder / "result.json"), json.dumps([part]), processes=2, timeout_s=90)
    for fork in forks:
        with pytest.raises(ProcessLookupError):
            os.killpg(fork.pid, 0)
    return not any(fork.poll() for fork in forks), printed


def start_with_torchrun(folder: Path, part: dict[str, Any]) -> tuple[bool, str]:
    """As `start`, but torchrun ends the process that is left when the other one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
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
    return process.returncode == 0, printed


FAULTS = [
    (start, "raise", "on_validation_end", 0, "ValueError: the fault of this test"),
    (start, "exit", "on_before_training_step", 1, "SystemExit: 0"),
    (start, "memory", "on_after_backward", 1, "OutOfMemoryError: the fault of this test"),
    pytest.param(
        *(start_with_torchrun, "SIGKILL", "on_before_training_step", 1, "it exited without an error message"),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("start_it", "act", "moment", "process", "said"), FAULTS)
def test_where_one_process_fails_all_end_and_a_checkpoint_is_there(
    tmp_path: Path, start_it: Start, act: str, moment: str, process: int, said: str
) -> None:
    settings = {"handlers": "CUDA_OUT_OF_MEMORY" if act == "memory" else "all"}
    number = 1 if moment == "on_validation_end" else 5
    part = {"act": act, "moment": moment, "number": number, "process": process, "settings": settings}
    is_well, printed = start_it(tmp_path, part)
    assert (tmp_path / "run" / "acted").exists(), printed[-3000:]
    assert not is_well
    assert said in printed
    assert f"process {process}" in printed or process == 0
    newest = CheckpointStore(tmp_path / "run" / "checkpoint-model").newest()
    assert newest is not None
    assert newest.info["global_step"] in (2, 3)  # in its backward, a process gives the others what they need
    assert not list((tmp_path / "run" / "checkpoint-model").glob(".tmp-*"))
    is_well, printed = start(tmp_path, {"act": "none"})
    assert is_well, printed[-3000:]
    counters = json.loads((tmp_path / "result.json").read_text())[0]["counters"]
    assert (counters["epoch"], counters["global_step"], counters["samples_seen"]) == (3, 6, 66)


@pytest.mark.parametrize(("where", "said"), [("get_optimizer", "process 1"), ("on_fit_end", "ValueError")])
def test_where_one_process_fails_before_or_after_training_all_end_with_that_error(
    tmp_path: Path, where: str, said: str
) -> None:
    forks, printed = run_together(SCRIPTS / "one_fails.py", "fit", where, str(tmp_path), processes=2)
    assert all(fork.poll() for fork in forks)
    of_main = "\n".join(line for line in printed.splitlines() if line.startswith("[rank0]"))
    assert said in of_main
    assert "the fault of this test" in of_main
    assert "Connection reset" not in of_main


@pytest.mark.parametrize(
    ("function", "act"),
    [
        ("validate", "kill"),
        ("predict", "raise"),
    ],
)
def test_where_one_process_fails_outside_of_a_run_all_end_and_it_is_named(tmp_path: Path, function: str, act) -> None:
    script = SCRIPTS / "one_fails.py"
    forks, printed = run_together(script, function, act, str(tmp_path), processes=2, timeout_s=90)
    assert all(fork.poll() for fork in forks), printed[-3000:]
    assert "process 1 was killed" in printed or "process 1" in printed.split("ProcessFailedError")[-1]
    assert ("the fault of this test" in printed) == (act == "raise")
    assert not list(tmp_path.glob("done-*"))


def test_an_error_on_all_processes_outside_of_a_run_can_be_caught(tmp_path: Path) -> None:
    script = SCRIPTS / "one_fails.py"
    forks, printed = run_together(script, "validate", "all", str(tmp_path), processes=2)
    assert sorted(path.name for path in tmp_path.glob("*-?")) == ["done-0", "done-1", "error-0", "error-1"], printed
    assert not any(fork.poll() for fork in forks)


def test_a_process_that_others_wait_for_outside_of_a_run_is_named(tmp_path: Path) -> None:
    script = SCRIPTS / "one_fails.py"
    forks, printed = run_together(script, "predict", "wait", str(tmp_path), processes=2)
    assert len(list(tmp_path.glob("done-*"))) == 2, printed
    assert "for process 1 in " in printed
    assert not any(fork.poll() for fork in forks)


ALONE = ("on_fit_start:validate", "on_update_end:save_model", "on_update_end:save_checkpoint", "on_epoch_end:predict")


def test_a_call_by_the_main_process_alone_is_no_hang_but_an_error_that_names_both(tmp_path: Path) -> None:
    cases = (*ALONE, "on_fit_end:validate")
    _, printed = run_together(SCRIPTS / "called_alone.py", str(tmp_path), *cases, processes=2)
    for index in range(2):
        errors = json.loads((tmp_path / f"{index}.json").read_text())
        assert len(errors) == len(cases), printed[-3000:]
        for case, error in zip(cases, errors, strict=True):
            assert f"process 0: trainer.{case.split(':')[1]}, " in error
            assert "(called_alone.py:" in error
            assert "; process 1: " in error
            assert "outside `if trainer.is_main" in error


@pytest.mark.slow
def test_a_call_by_the_main_process_alone_while_another_is_in_its_step_ends_both_and_says_so(tmp_path: Path) -> None:
    case = "on_before_training_step:save_model"
    forks, printed = run_together(SCRIPTS / "called_alone.py", str(tmp_path), case, processes=2)
    assert -signal.SIGKILL in [fork.poll() for fork in forks]  # where it waits, in a collective, no error reaches it
    assert re.search(r"process 0: trainer.save_model, .* in \w+ \(called_alone.py:", printed)
    assert re.search(r"; process 1: .* in step \(toys.py:", printed), printed


@pytest.mark.slow
def test_a_hang_of_one_process_ends_all_and_says_where_it_was(tmp_path: Path) -> None:
    settings = {"failures": {"hang_timeout_s": 5.0}, "checkpoint_every": "1 step"}
    part = {"act": "hang", "moment": "on_before_training_step", "number": 5, "process": 1, "settings": settings}
    is_well, printed = start(tmp_path, part)
    assert not is_well
    assert "in act" in printed, "the stack of the process that hangs"
    is_well, printed = start(tmp_path, {"act": "none"})
    assert is_well, printed[-3000:]
    counters = json.loads((tmp_path / "result.json").read_text())[0]["counters"]
    assert (counters["epoch"], counters["global_step"], counters["samples_seen"]) == (3, 6, 66)
