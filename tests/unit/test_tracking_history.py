import errno
import json
import math
import os

from accmt.tracking.history import HISTORY_FILE, History, HistoryReader, read_history


def test_history_has_one_strict_json_line_per_row(tmp_path):
    history = History(tmp_path)
    history.add_config({"epochs": 1})
    history.add_values({"loss": 2.0, "accuracy": 0.5}, 3)
    history.add_values({"loss": math.nan, "norm": math.inf}, 6)
    history.add_status("FINISHED")
    history.close()

    def refuse(constant):
        raise AssertionError(constant)

    lines = (tmp_path / HISTORY_FILE).read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [set(row) - {"time"} for row in rows] == [{"config"}, {"step", "values"}, {"step", "values"}, {"status"}]
    assert rows[1]["values"] == {"loss": 2.0, "accuracy": 0.5}
    assert rows[2]["values"] == {"loss": "NaN", "norm": "Infinity"}


def test_a_continued_run_appends_after_a_torn_line(tmp_path):
    first = History(tmp_path)
    first.add_values({"loss": 1.0}, 1)
    first.close()
    with (tmp_path / HISTORY_FILE).open("a") as file:
        file.write('{"step": 2, "ti')
    second = History(tmp_path)
    second.add_values({"loss": 0.5}, 2)
    second.close()
    assert [row["step"] for row in read_history(tmp_path)] == [1, 2]


def test_a_resumed_run_takes_back_what_was_logged_after_the_checkpoint(tmp_path):
    history = History(tmp_path)
    history.add_config({})
    for step in (1, 2, 3):
        history.add_values({"loss": 1.0}, step)
    history.add_rewind(line=2, step=1, attempt=2)
    history.add_config({})
    history.add_values({"loss": 2.0}, 2)
    history.add_status("FINISHED")
    assert history.num_lines == 8
    history.close()
    rows = read_history(tmp_path)
    assert [(row["step"], row["values"]["loss"]) for row in rows if "values" in row] == [(1, 1.0), (2, 2.0)]
    assert [row["rewind"] for row in rows if "rewind" in row] == [{"line": 2, "step": 1, "attempt": 2}]
    assert [row["step"] for row in read_history(tmp_path, include_superseded=True) if "step" in row] == [1, 2, 3, 2]


def test_a_run_resumed_from_an_older_checkpoint_takes_back_the_newer_attempt_too(tmp_path):
    history = History(tmp_path)
    for step in (1, 2, 3):
        history.add_values({"loss": 1.0}, step)
    history.add_rewind(line=2, step=2, attempt=2)
    history.add_values({"loss": 2.0}, 3)
    history.add_rewind(line=1, step=1, attempt=3)
    history.add_values({"loss": 3.0}, 2)
    history.close()
    rows = [row for row in read_history(tmp_path) if "values" in row]
    assert [(row["step"], row["values"]["loss"]) for row in rows] == [(1, 1.0), (2, 3.0)]


def test_a_checkpoint_whose_history_is_not_here_takes_nothing_back(tmp_path):
    history = History(tmp_path)
    history.add_rewind(line=500, step=100, attempt=2)
    history.add_values({"loss": 1.0}, 101)
    history.close()
    assert [row["step"] for row in read_history(tmp_path) if "step" in row] == [101]


def test_a_reader_follows_the_writer_and_starts_at_any_line(tmp_path):
    history = History(tmp_path)
    for step in range(5):
        history.add_values({"loss": 1.0}, step)
    reader = HistoryReader(history, line=2)
    assert [(line, row["step"]) for line, row in reader.read(2)] == [(2, 2), (3, 3)]
    assert [line for line, _ in reader.read(10)] == [4]
    assert reader.read(10) == []
    history.add_values({"loss": 1.0}, 5)
    assert [row["step"] for _, row in reader.read(10)] == [5]
    reader.close()
    history.close()


def test_one_process_at_a_time_claims_the_file(tmp_path):
    first, second = History(tmp_path), History(tmp_path)
    assert first.is_ours_alone()
    assert not second.is_ours_alone()
    first.close()
    assert second.is_ours_alone()
    second.close()


def test_on_a_full_disk_the_first_rows_wait_and_those_beyond_the_limit_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("accmt.tracking.history.MAX_UNWRITTEN", 3)
    history, write, is_full = History(tmp_path), os.write, True

    def write_if_there_is_room(descriptor, data):
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_if_there_is_room)
    reader = HistoryReader(history)
    for step in range(1, 4):
        history.add_values({"loss": 1.0}, step)
    waiting = reader.read(2)
    for step in range(4, 7):
        history.add_values({"loss": 1.0}, step)
    waiting += reader.read(9)
    is_full = False
    history.add_values({"loss": 1.0}, 7)
    waiting += reader.read(9)
    reader.close()
    history.close()
    steps = [1, 2, 3, 7]  # the first three wait, and rows keep the lines under which readers got them
    assert [row["step"] for row in read_history(tmp_path)] == steps
    assert [(line, row["step"]) for line, row in waiting] == list(enumerate(steps))
    assert "3 rows could not be written" in caplog.text


def test_rows_that_waited_for_room_are_written_at_the_end(tmp_path, monkeypatch, caplog):
    def fail(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    history = History(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fail)
        history.add_values({"loss": 1.0}, 1)
    history.close()
    assert [row["step"] for row in read_history(tmp_path)] == [1]
    assert "never written" not in caplog.text
