"""Run folders on the command line: a folder that holds runs is answered with the commands for them."""

from __future__ import annotations

import os

import pytest

from accmt.cli.arguments import require_run
from accmt.cli.main import main
from accmt.errors import ArgumentError


def make_run(folder, time):
    folder.mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")
    os.utime(folder / "history.jsonl", (time, time))


def test_a_run_folder_is_let_be(tmp_path):
    make_run(tmp_path / "run", 1)
    assert require_run(tmp_path / "run", "report") is None


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
    with pytest.raises(ArgumentError, match=r"a folder with 12 run\(s\)") as caught:
        require_run(tmp_path, "report")
    assert [int(line.rpartition("/")[2]) for line in str(caught.value).splitlines()[4:]] == list(range(11, 1, -1))


@pytest.mark.parametrize(
    ("name", "got"), [("nowhere", "no such folder"), ("file", "a file"), (".", "no history.jsonl")]
)
def test_what_is_no_folder_of_runs_is_told_what_a_run_folder_is(tmp_path, name, got):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match=rf"got: {got}.*\n.*\n  do: name a run folder: <logging_dir>/<track_name>/"):
        require_run(tmp_path / name, "report")
