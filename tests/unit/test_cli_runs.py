"""Run folders on the command line: a folder that holds runs is answered with the commands for them."""

from __future__ import annotations

import fcntl
import json
import os
import time

import pytest

from accmt.addons.fork.lineage import Origin
from accmt.addons.report import read_run
from accmt.cli.arguments import require_run
from accmt.cli.main import main
from accmt.errors import ArgumentError
from tests.raising import raises_at


def make_run(folder, time):
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")
    os.utime(folder / "history.jsonl", (time, time))


@pytest.mark.parametrize("command", ["report", "sync"])
@pytest.mark.parametrize("folder", ["logs", "logs/digits"])
def test_a_folder_of_runs_is_answered_with_the_command_for_each_the_newest_first(tmp_path, capsys, command, folder):
    for number, name in enumerate(["b", "new one", "a"]):
        make_run(tmp_path / "logs" / "digits" / name, 100 - abs(number - 1))
    (tmp_path / "logs" / "notes").mkdir()
    assert main([command, folder]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[:4] == [
        f"accmt {command} {folder}",
        "  got: a folder with 3 run(s)",
        "  expected: the folder of a run",
        "  do: choose one of them (newest first):",
    ]
    assert told[4] == f"    accmt {command} 'logs/digits/new one'"
    assert sorted(told[5:]) == [f"    accmt {command} logs/digits/{name}" for name in "ab"]


def test_of_many_runs_the_ten_newest_are_shown(tmp_path):
    for number in range(12):
        make_run(tmp_path / str(number), number)
    with raises_at(ArgumentError, "accmt report ") as caught:
        require_run(tmp_path, "report")
    assert [int(line.rpartition("/")[2]) for line in str(caught.value).splitlines()[4:]] == list(range(11, 1, -1))


def write_run(folder, began, *rows, fork=None):
    folder.mkdir(parents=True)
    config = {"config": {"model_saving": "best_accuracy", "metrics": {"accuracy": "higher is better"}}, "time": began}
    lines = [config, *({"time": began + 1, **row} for row in rows)]
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if fork is not None:
        parent, step, *changes = fork
        about = {"run_name": parent.name, "run_folder": str(parent), "run_ids": {}, "taken": []}
        Origin(folder.name, str(folder), about, step, step, {}, {}, {}, changes).write(folder)
    return folder


@pytest.fixture
def logs(tmp_path):
    """A run with two forks, one of which has a fork, and another run."""
    logs = tmp_path / "logs"
    first = write_run(
        logs / "news" / "a", 0, {"step": 9, "values": {"val_loss": 0.5, "accuracy": 0.75}}, {"status": "FINISHED"}
    )
    rows = [{"step": step, "values": {"train_loss": 1.0 / step}} for step in (3, 4, 5, 6)]
    second = write_run(logs / "news" / "a-at-4", 60, *rows, fork=(first, 4, "optim.lr: 0.1 -> 0.2"))
    write_run(logs / "news" / "b", 90, {"step": 1, "values": {"train_loss": 1.0}}, {"status": "FAILED"})
    write_run(logs / "news" / "a-at-4-at-5", 120, fork=(second, 5))
    write_run(logs / "news" / "a-at-6", 180, fork=(first, 6))
    return logs


def test_runs_are_listed_and_forks_drawn_below_their_parents(logs, capsys):
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(0))
    with (logs / "news" / "a-at-6" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["runs", str(logs), "--tree"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "status", "steps", "best", "started"]
    assert rows[0].endswith(f"accuracy 0.75 at 9  {started}")
    names = [row[: head.index("status")].rstrip() for row in rows]
    assert names == [
        "news/a",
        "├─ a-at-4 (at 4: optim.lr: 0.1 -> 0.2)",
        "│  └─ a-at-4-at-5 (at 5: no changes)",
        "└─ a-at-6 (at 6: no changes)",
        "news/b",
    ]
    status = [row[head.index("status") :].split()[:2] for row in rows]
    assert [(one, steps) for one, steps in status] == [
        ("finished", "9"),
        ("killed", "6"),
        ("killed", "0"),
        ("running", "0"),
        ("failed", "1"),
    ]
    assert main(["runs", str(logs / "news")]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == [
        *("a", "a-at-4", "b", "a-at-4-at-5", "a-at-6")
    ]
    assert main(["runs", str(logs / "nowhere")]) == 2
    assert "no such folder; you are in" in capsys.readouterr().err


def test_a_report_has_the_forks_and_the_parents_of_a_run_each_from_its_step(logs, tmp_path, capsys):
    assert read_run(logs / "news" / "a-at-4").curves["train_loss"].steps == [4, 5, 6]
    assert main(["report", str(logs / "news" / "a-at-4"), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert all(f'data-run="{number}"' in page for number in range(4))
    assert 'data-run="4"' not in page
    assert main(["report", str(logs / "news" / "a-at-4"), "--alone", "-o", str(tmp_path / "page.html")]) == 0
    assert 'data-run="1"' not in (tmp_path / "page.html").read_text()
