"""A failure at every operation of a save, one after the other: the new or the previous checkpoint, never a third."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from accmt.errors import CheckpointError
from tests.checkpoints import names_in, newest_content, save
from tests.faults.injection import (
    SimulatedKill,
    error_at,
    error_from,
    exception_at,
    injected,
    kill_at,
    simulated_kill_at,
)

MAX_POINTS = 300

FAULTS = {
    "the disk is full": lambda point: error_at(point, errno.ENOSPC),
    "a disk that stays away": lambda point: error_from(point, errno.EIO),
    "an exception": exception_at,
    "a kill": simulated_kill_at,
}


def prepare_nothing(folder: Path) -> None:
    pass


def prepare_one(folder: Path) -> None:
    save(folder, 10, "previous")


def prepare_same_step(folder: Path) -> None:
    save(folder, 20, "previous")


def prepare_killed_save(folder: Path) -> None:
    save(folder, 10, "previous")
    with injected(simulated_kill_at(12)), pytest.raises(SimulatedKill):
        save(folder, 20, "unfinished")


def prepare_killed_replacement(folder: Path) -> None:
    save(folder, 20, "previous")

    def kill(count: int) -> None:
        if [operation[0] for operation in operations.trace].count("rename") == 4:  # two files, the old, the new
            raise SimulatedKill

    with injected(kill) as operations, pytest.raises(SimulatedKill):
        save(folder, 20, "unfinished")
    assert not (folder / "step-00000020").exists()


SITUATIONS = [
    prepare_nothing,
    prepare_one,
    prepare_same_step,
    prepare_killed_save,
    prepare_killed_replacement,
]


def check_after(folder: Path, *, had_previous: bool) -> str | None:
    """Check that the folder is sound after a failure, that saving goes on, and return what the newest one held."""
    found = newest_content(folder) if folder.exists() else None
    assert found in (["previous", "new"] if had_previous else [None, "new"])
    save(folder, 40, "next")
    assert newest_content(folder) == "next"
    assert names_in(folder) == ["step-00000040"]
    return found


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("prepare", SITUATIONS, ids=lambda prepare: prepare.__name__)
def test_a_save_that_fails_anywhere_leaves_the_new_or_the_previous_checkpoint(prepare, fault, tmp_path):
    outcomes = []
    for point in range(MAX_POINTS):
        folder = tmp_path / str(point)
        with injected():
            prepare(folder)
        was_told = False
        with injected(fault(point)) as operations:
            try:
                save(folder, 20, "new")
            except (CheckpointError, SimulatedKill):
                was_told = True
        with injected():
            outcomes.append(check_after(folder, had_previous=prepare is not prepare_nothing))
        assert was_told or outcomes[-1] == "new"
        if len(operations.trace) <= point:
            break
    assert len(outcomes) == point + 1 > 20
    assert set(outcomes) == {"previous" if prepare is not prepare_nothing else None, "new"}
    assert outcomes[-1] == "new"
    if fault is simulated_kill_at:
        is_new = [outcome == "new" for outcome in outcomes]
        assert is_new == sorted(is_new), "the new one was there and then gone"


@pytest.mark.parametrize("prepare", [prepare_one, prepare_same_step], ids=lambda prepare: prepare.__name__)
def test_a_process_that_is_killed_anywhere_in_a_save_leaves_the_new_or_the_previous_checkpoint(prepare, tmp_path):
    outcomes = []
    for point in range(MAX_POINTS):
        folder = tmp_path / str(point)
        with injected():
            prepare(folder)
        was_killed = save_in_a_process_killed_at(point, folder)
        outcomes.append(newest_content(folder))
        save(folder, 40, "next")
        assert names_in(folder) == ["step-00000040"]
        if not was_killed:
            break
    assert outcomes[0] == "previous"
    assert outcomes[-1] == "new"
    assert set(outcomes) == {"previous", "new"}
    assert len(outcomes) > 20


def count_operations(prepare: Callable[[Path], None], folder: Path) -> int:
    with injected():
        prepare(folder)
    with injected() as operations:
        save(folder, 20, "new")
    return len(operations.trace)


def test_the_documentation_says_how_many_failures_are_injected(tmp_path):
    counts = {prepare: count_operations(prepare, tmp_path / prepare.__name__) for prepare in SITUATIONS}
    total, killed = sum(counts.values()), counts[prepare_one] + counts[prepare_same_step]
    page = " ".join((Path(__file__).parents[2] / "docs" / "formats.md").read_text().split())
    assert (len(SITUATIONS), len(FAULTS)) == (5, 4), "five situations ... four kinds of failure"
    assert f"{total * len(FAULTS)} injected failures" in page
    assert f"and {killed} more with a real SIGKILL" in page


def save_in_a_process_killed_at(point: int, folder: Path) -> bool:
    """Save in a child process that dies by SIGKILL; return whether it did."""
    child = os.fork()
    if child == 0:
        try:
            with injected(kill_at(point)):
                save(folder, 20, "new")
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_a_failed_save_leaves_no_temporary_folder_behind(tmp_path):
    with injected() as operations:
        save(tmp_path / "counted", 20, "new")
    # Making a folder that is there already may fail without harm.
    harmful = [point for point, (name, *_) in enumerate(operations.trace) if name in ("open", "write", "fsync")]
    for point in harmful[1:-1]:  # but for the folder itself before, and its entry for the new checkpoint after
        folder = tmp_path / str(point)
        with injected(error_at(point, errno.ENOSPC)), pytest.raises(CheckpointError, match="No space left on device"):
            save(folder, 20, "new")
        assert names_in(folder) == []


def test_retention_that_fails_anywhere_keeps_the_newest(tmp_path):
    for point in range(MAX_POINTS):
        folder = tmp_path / str(point)
        with injected():
            for step in (10, 20, 30):
                save(folder, step, f"at {step}", max_checkpoints=3)
        with injected(error_at(point, errno.EIO)) as operations, contextlib.suppress(CheckpointError):
            save(folder, 40, "new", max_checkpoints=1)
        assert newest_content(folder) in ("at 30", "new")
        with injected():
            save(folder, 50, "next", max_checkpoints=1)
        assert names_in(folder) == ["step-00000050"]
        if len(operations.trace) <= point:
            return
    pytest.fail("the save never got through")


def test_everything_is_durable_before_its_name_is_and_the_name_before_the_old_one_goes(tmp_path):
    save(tmp_path, 10, "previous")
    with injected() as operations:
        save(tmp_path, 20, "new")
    trace = [(operation, *(Path(subject).name for subject in subjects)) for operation, *subjects in operations.trace]
    staged = next(subjects[0] for operation, *subjects in trace if operation == "mkdir")
    publication = trace.index(("rename", staged, "step-00000020"))

    def last(*operation: str) -> int:
        return len(trace) - 1 - trace[::-1].index(operation)

    for name in ("weights.bin", "state.json"):
        assert last("write", name) < trace.index(("fsync", name)) < publication
    temporary, _ = next(subjects for operation, *subjects in trace if operation == "replace")
    manifest_begins = trace.index(("open", temporary))
    assert trace.index(("fsync", staged)) < manifest_begins, "the names of the files"
    assert trace.index(("fsync", "parts")) < manifest_begins
    assert last("write", temporary) < trace.index(("fsync", temporary)) < publication
    assert publication - 1 == last("fsync", staged), "the name of the manifest"
    assert trace[publication + 1] == ("fsync", tmp_path.name)
    deletion = next(index for index, (_, *names) in enumerate(trace) if names[0] == "step-00000010")
    assert deletion > publication + 1


def test_a_replacement_whose_second_rename_fails_is_undone_at_once(tmp_path):
    save(tmp_path, 20, "previous")

    def fail(count: int) -> None:
        operation, *subjects = operations.trace[-1]
        if (
            operation == "rename"
            and Path(subjects[0]).name.startswith(".tmp-")
            and subjects[1].endswith("step-00000020")
        ):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with injected(fail) as operations, pytest.raises(CheckpointError, match="Input/output error"):
        save(tmp_path, 20, "new")
    assert names_in(tmp_path) == ["step-00000020"]
    assert newest_content(tmp_path) == "previous"
