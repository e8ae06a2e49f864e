import json
import math
import time

import pytest

from accmt.tracking.history import HISTORY_FILE, History, read_history


@pytest.mark.feature("P41")
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


def test_rows_carry_the_step_and_the_time_of_logging(tmp_path):
    before = time.time()
    history = History(tmp_path)
    history.add_values({"loss": 1.0}, 7)
    history.close()
    (row,) = read_history(tmp_path)
    assert row["step"] == 7
    assert before <= row["time"] <= time.time()


def test_rows_are_readable_before_the_file_is_closed(tmp_path):
    history = History(tmp_path)
    history.add_values({"loss": math.inf}, 1)
    assert read_history(tmp_path)[0]["values"] == {"loss": math.inf}
    history.close()


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


def test_reading_a_folder_without_history_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"history\.jsonl"):
        read_history(tmp_path)
