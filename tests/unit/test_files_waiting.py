"""Taking turns in a folder: one at a time, with nothing left behind; MLflow's database is made so."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from accelerate.tracking import MLflowTracker

from accmt.files import taking_turns
from accmt.tracking.trackers.mlflow import MLFlowRun


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
