import json

import pytest

from accmt.addons.trackers.delivery_state import (
    DELIVERY_FILE,
    Account,
    DeliveryFile,
    Replay,
    Rewinding,
    count_rows_left,
)
from accmt.tracking.history import History

KEEPS, WITHDRAWS, UNKNOWN = Rewinding.KEEPS, Rewinding.WITHDRAWS, Rewinding.UNKNOWN


@pytest.fixture
def history(tmp_path):
    """Steps 0 to 9 in lines 1 to 10, taken back to step 5 (line 7) in line 11, and steps 6 to 8 again after it."""
    history = History(tmp_path)
    history.add_config({})
    for step in range(10):
        history.add_values({"loss": 1.0, "lr": 0.1}, step)
    history.add_rewind(line=7, step=5, attempt=2)
    for step in range(6, 9):
        history.add_values({"loss": 2.0, "new": 0.0}, step)
    history.close()
    return history.path


def delivered(history, replay):
    """Return the lines that the tracker gets, and the names in each."""
    from accmt.files import read_json_lines

    rows = enumerate(read_json_lines(history))
    wanted = {line: replay.wanted(line, row) for line, row in rows if "values" in row and line >= replay.start}
    return {line: sorted(values) for line, values in wanted.items() if values}


def account(delivered, handed=None, first=0):
    return Account(first=first, delivered=delivered, handed=delivered if handed is None else handed)


@pytest.mark.parametrize("rewinding", list(Rewinding))
def test_one_that_has_nothing_gets_what_counts(history, rewinding):
    replay = Replay(history, account(0), rewinding)
    assert list(delivered(history, replay)) == [1, 2, 3, 4, 5, 6, 12, 13, 14]
    assert replay.first_step is None


def test_one_that_forgets_is_told_from_which_step_and_gets_the_rest(history):
    replay = Replay(history, account(11), WITHDRAWS)
    assert replay.first_step == 6
    assert list(delivered(history, replay)) == [12, 13, 14]


def test_one_that_forgets_gets_again_what_it_may_or_may_not_have(history):
    replay = Replay(history, account(4, handed=11), WITHDRAWS)
    assert replay.first_step == 3
    assert list(delivered(history, replay)) == [4, 5, 6, 12, 13, 14]


def test_rows_of_the_checkpoints_own_step_are_withdrawn_and_given_back(tmp_path):
    history = History(tmp_path)
    history.add_values({"loss": 1.0}, 5)
    history.add_values({"val_loss": 1.0}, 5)  # after the checkpoint, at the same step
    history.add_rewind(line=1, step=5, attempt=2)
    history.close()
    replay = Replay(history.path, account(2), WITHDRAWS)
    assert replay.first_step == 5
    assert delivered(history.path, replay) == {0: ["loss"]}


def test_what_an_earlier_resume_withdrew_is_not_withdrawn_again(history):
    replay = Replay(history, account(15), WITHDRAWS)
    assert replay.first_step is None
    assert delivered(history, replay) == {}


def test_one_that_keeps_its_points_gets_no_second_one_at_a_step(history):
    replay = Replay(history, account(9), KEEPS)  # it has steps 6 and 7 of the first attempt
    assert delivered(history, replay) == {12: ["new"], 13: ["new"], 14: ["loss", "new"]}


def test_one_that_keeps_its_points_gets_for_certain_what_was_under_way(history):
    replay = Replay(history, account(8, handed=10), KEEPS)
    assert delivered(history, replay) == {
        8: ["loss", "lr"],
        9: ["loss", "lr"],
        12: ["new"],
        13: ["new"],
        14: ["new"],
    }


def test_one_of_which_nothing_is_known_gets_the_new_rows(history):
    replay = Replay(history, account(11), UNKNOWN)
    assert delivered(history, replay) == {line: ["loss", "new"] for line in (12, 13, 14)}


@pytest.mark.parametrize("rewinding", list(Rewinding))
def test_rows_of_an_earlier_run_in_the_same_folder_are_left_alone(history, rewinding):
    replay = Replay(history, account(15, first=15), rewinding)
    assert (replay.start, replay.first_step) == (15, None)


@pytest.mark.parametrize("rewinding", [KEEPS, WITHDRAWS])
def test_what_an_earlier_run_of_the_same_name_took_back_is_none_of_the_points_of_the_new_one(history, rewinding):
    """Lines 0 to 14 are those of a run that nothing could be continued from; the new one begins with line 15."""
    later = History(history.parent)
    later.add_rewind(line=0, step=None, attempt=1)
    for step in range(4):
        later.add_values({"loss": 3.0}, step)
    later.add_rewind(line=18, step=1, attempt=2)
    for step in range(2, 9):
        later.add_values({"loss": 4.0}, step)
    later.close()
    replay = Replay(history, account(20, first=15), rewinding)  # the tracker has steps 0 to 3, and not more
    assert replay.first_step == (2 if rewinding is WITHDRAWS else None)
    lines = range(21, 28) if rewinding is WITHDRAWS else range(23, 28)
    assert delivered(history, replay) == dict.fromkeys(lines, ["loss"])


@pytest.fixture
def media_history(tmp_path):
    """Images and a file at steps 1 and 2 in lines 0 to 3, taken back to step 1 (line 2), and those of step 2 again."""
    history = History(tmp_path)
    for step in (1, 2):
        history.add_media("images", "samples", "media/samples", step)
        history.add_media("artifact", "note.txt", "media/note.txt", step)
    history.add_rewind(line=2, step=1, attempt=2)
    history.add_media("images", "samples", "media/samples", 2)
    history.add_media("artifact", "note.txt", "media/note.txt", 2)
    history.close()
    return history.path


@pytest.mark.parametrize(
    ("rewinding", "account", "expected"),
    [
        (KEEPS, account(0), [0, 1, 5, 6]),
        (KEEPS, account(4), [6]),  # it keeps the images of step 2, and a later file replaces an earlier one
        (KEEPS, account(2, handed=4), [2, 3, 6]),  # it may have those of lines 2 and 3
        (WITHDRAWS, account(4), [5, 6]),
        (WITHDRAWS, account(1, handed=4), [0, 1, 5, 6]),
        (UNKNOWN, account(4), [5, 6]),
    ],
)
def test_images_and_files_follow_the_rules_of_rows(media_history, rewinding, account, expected):
    from accmt.files import read_json_lines

    replay = Replay(media_history, account, rewinding)
    rows = [(line, row) for line, row in enumerate(read_json_lines(media_history)) if "media" in row]
    assert [line for line, row in rows if line >= replay.start and replay.is_media_wanted(line, row)] == expected


def test_rows_left_are_those_that_count(history):
    assert count_rows_left(history, account(0)) == 9
    assert count_rows_left(history, account(9)) == 3
    assert count_rows_left(history, account(15)) == 0


def test_a_later_process_reads_what_was_written(tmp_path):
    delivery_file = DeliveryFile(tmp_path, "track", "run")
    delivery_file.attempt = 3
    delivery_file.accounts["mlflow"] = Account(
        server="http://host", kwargs={"tags": {"a": "b"}}, run_id="1f", delivered=5, names={"a@": "a_at_"}
    )
    delivery_file.save()
    read = DeliveryFile.read(tmp_path)
    assert (read.track_name, read.run_name, read.attempt) == ("track", "run", 3)
    assert read.accounts == delivery_file.accounts


def test_no_file_and_a_damaged_one_are_no_delivery_file(tmp_path):
    assert DeliveryFile.read(tmp_path) is None
    DeliveryFile(tmp_path, "track", "run").save()
    path = tmp_path / DELIVERY_FILE
    whole = path.read_text()
    for damaged in ("", whole[:20], "[]", json.dumps({"track_name": "track"})):
        path.write_text(damaged)
        assert DeliveryFile.read(tmp_path) is None
    path.write_text(whole)
    assert DeliveryFile.read(tmp_path) is not None


def test_a_new_run_of_a_tracker_gets_everything_from_its_first_line_on():
    account = Account(first=3, delivered=9, handed=12, status="FAILED", names={"a": "a"})
    account.restart()
    assert account == Account(first=3, delivered=3, handed=3, settled=3, names={"a": "a"})


def test_what_a_killed_process_handed_over_counts_once_it_has_settled():
    killed = Account(delivered=9, handed=12, settled=4)
    killed.reopen()
    assert killed == Account(delivered=4, handed=12, settled=4)
    ended = Account(delivered=9, handed=12, settled=4, status="FAILED")
    ended.reopen()
    assert ended.delivered == 9
