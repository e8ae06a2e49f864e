import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from accelerate.tracking import MLflowTracker

from accmt.addons.run_folders import is_locked, taking_turns
from accmt.addons.trackers.mlflow import MLFlowRun
from accmt.files import LOCK_NAME, FolderLock, FolderTakenError


def take_elsewhere(folder):
    """Return what another process says that tries to take the folder."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            FolderLock.take(folder)
            said = "taken"
        except Exception as error:  # noqa: BLE001 - told to the test
            said = str(error) if isinstance(error, FolderTakenError) else repr(error)
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


def test_whatever_opens_and_closes_the_file_does_not_give_the_lock_up(tmp_path):
    (tmp_path / "folder").mkdir()
    lock = FolderLock.take(tmp_path / "folder")
    with (tmp_path / "folder" / LOCK_NAME).open():
        pass
    shutil.copytree(tmp_path / "folder", tmp_path / "copy")
    assert f"process {os.getpid()}" in take_elsewhere(tmp_path / "folder")
    assert take_elsewhere(tmp_path / "copy") == "taken"
    lock.release()
    assert take_elsewhere(tmp_path / "folder") == "taken"


def test_a_lock_is_seen_as_long_as_it_is_held(tmp_path):
    assert not is_locked(tmp_path)
    lock = FolderLock.take(tmp_path)
    assert is_locked(tmp_path)
    lock.release()
    assert not is_locked(tmp_path)
    (tmp_path / LOCK_NAME).touch()  # of a process that was killed
    assert not is_locked(tmp_path)


def test_a_process_takes_a_folder_for_two_uses_and_holds_it_until_both_are_released(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    locks = [FolderLock.take(tmp_path, "model"), FolderLock.take(tmp_path / "link", "logs")]
    with pytest.raises(FolderTakenError, match="another run in this process"):
        FolderLock.take(tmp_path, "logs")
    locks[0].release()
    assert "process" in take_elsewhere(tmp_path)
    locks[1].release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_a_forked_process_holds_no_lock_and_releases_none(tmp_path):
    lock = FolderLock.take(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        lock.release()
        os.read(reading, 1)
        os._exit(0)
    try:
        assert (tmp_path / LOCK_NAME).exists()
        assert "process" in take_elsewhere(tmp_path)
        lock.release()
        assert take_elsewhere(tmp_path) == "taken"  # though the child lives
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_forked_process_that_outlives_the_killed_one_holds_no_lock(tmp_path):
    """As a loader's worker does until it sees that its parent is gone."""
    code = "import os, signal; from pathlib import Path; from accmt.files import FolderLock;"
    code += f"lock = FolderLock.take(Path({str(tmp_path)!r})); child = os.fork();"
    code += "child and print(child, flush=True); os.kill(os.getpid(), signal.SIGKILL if child else signal.SIGSTOP)"
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(run.stdout.readline())
    try:
        assert run.wait() == -9
        assert (tmp_path / LOCK_NAME).exists()
        assert take_elsewhere(tmp_path) == "taken"  # though the child lives
    finally:
        os.kill(child, 9)
        run.stdout.close()


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    def fail(file, operation):
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    assert FolderLock.take(tmp_path) is None


def test_the_lock_of_a_process_that_is_gone_is_free(tmp_path):
    code = "import os; from pathlib import Path; from accmt.files import FolderLock;"
    code += f"FolderLock.take(Path({str(tmp_path)!r})); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    FolderLock.take(Path(tmp_path)).release()
    with pytest.raises(FolderTakenError):
        raise FolderTakenError("by none")


class Meeting:
    """Counts how many are inside at once; who is alone waits a moment for others."""

    def __init__(self) -> None:
        self.inside, self.most = 0, 0
        self.are_two = threading.Event()

    def attend(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.inside > 1:
            self.are_two.set()
        self.are_two.wait(0.2)
        self.inside -= 1


def run_at_once(*functions) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_one_at_a_time_is_in_a_folder(tmp_path: Path) -> None:
    def work() -> None:
        with taking_turns(tmp_path):
            meeting.attend()

    meeting = Meeting()
    run_at_once(work, work, work)
    assert meeting.most == 1
    assert not list(tmp_path.iterdir())
    with taking_turns(tmp_path / "missing"):
        pass


@pytest.mark.parametrize(("uri", "most"), [("sqlite:///{}/mlflow.db", 1), ("file:{}", 2)])
def test_runs_on_one_database_start_in_turn(uri: str, most: int, tmp_path: Path, monkeypatch) -> None:
    meeting = Meeting()
    monkeypatch.setattr(MLflowTracker, "start", lambda self: meeting.attend())
    monkeypatch.setattr(MLFlowRun, "_forget_a_missing_run", lambda self: None)
    runs = [MLFlowRun(uri.format(tmp_path), is_quiet=True) for _ in range(2)]
    run_at_once(*(run._start_in_turn for run in runs))
    assert meeting.most == most
