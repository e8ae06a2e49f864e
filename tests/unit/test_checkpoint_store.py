import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from accmt.checkpoint.manifest import MANIFEST_NAME, make_unfinished_name
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import CheckpointCorruptError, CheckpointError
from tests.checkpoints import (
    clean,
    cut_in_half,
    delete,
    empty,
    flip,
    names_in,
    newest_content,
    save,
    save_with,
    truncate,
    write_version,
    writer_of,
)
from tests.raising import raises_at


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_saved_checkpoint_is_found_again_with_its_files_and_info(tmp_path):
    folder = tmp_path / "not" / "there" / "yet"
    path = save(folder, 120)
    assert path == folder / "step-00000120"
    assert names_in(folder) == ["step-00000120"]
    assert names_in(path) == ["manifest.json", "parts", "weights.bin"]
    found = CheckpointStore(folder).newest()
    assert (found.folder, found.step, found.info) == (path, 120, {"content": "at 120"})
    assert list(found.manifest.files) == ["parts/state.json", "weights.bin"]
    assert CheckpointStore(folder).find(path) == found


def test_the_newest_is_the_last_one_saved_not_the_one_with_the_highest_step(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, max_checkpoints=3)
    save(tmp_path, 15, "after going back to 10", max_checkpoints=3)
    assert newest_content(tmp_path) == "after going back to 10"
    assert names_in(tmp_path) == ["step-00000015", "step-00000020", "step-00000030"]
    save(tmp_path, 20, "again", max_checkpoints=3)
    assert newest_content(tmp_path) == "again"


# Writing apart from publishing


def test_files_can_be_written_by_another_thread_and_are_out_of_sight_until_published(tmp_path):
    save(tmp_path, 1)
    store = CheckpointStore(tmp_path)
    staging = store.begin(2)
    thread = threading.Thread(target=staging.write, args=(writer_of("at 2"),))
    thread.start()
    thread.join()
    assert newest_content(tmp_path) == "at 1"
    assert store.publish(staging, {"content": "at 2"}) == tmp_path / "step-00000002"
    assert newest_content(tmp_path) == "at 2"


def test_a_checkpoint_that_was_begun_and_not_published_is_given_up_by_the_next(tmp_path):
    store = CheckpointStore(tmp_path)
    first = store.begin(1)
    store.publish(store.begin(2), {})
    assert names_in(tmp_path) == ["step-00000002"]
    first.write(writer_of("late"))
    with pytest.raises(CheckpointError, match="FileNotFoundError"):
        store.publish(first, {})
    assert names_in(tmp_path) == ["step-00000002"]


# Failures


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), r"OSError: \[Errno 28\] No space(?s:.*)max_checkpoints"),
        (OSError(122, "Disk quota exceeded"), "Disk quota exceeded(?s:.*)free space there"),
        (OSError(30, "Read-only file system"), "Read-only file system(?s:.*)make the folder writable"),
        (ValueError("of type Lock"), "ValueError: of type Lock(?s:.*)see the cause above"),
        (CheckpointError("callbacks[0].lock cannot be stored"), "process 0: callbacks.0..lock cannot be stored"),
    ],
)
def test_an_error_while_writing_names_cause_process_and_what_helps(tmp_path, error, told):
    save(tmp_path, 1)

    def write(files):
        (files / "half").write_text("x")
        raise error

    message = rf"(?s)checkpoint of step 2 in {tmp_path}.*on process 0: .*complete checkpoints are untouched"
    with pytest.raises(CheckpointError, match=told) as raised:
        save_with(CheckpointStore(tmp_path), 2, write, {})
    assert raised.match(message)
    assert raised.value.__cause__ is error
    assert names_in(tmp_path) == ["step-00000001"]
    assert newest_content(tmp_path) == "at 1"


def test_after_an_error_nothing_more_is_written(tmp_path):
    store = CheckpointStore(tmp_path)
    staging = store.begin(1)
    staging.write(lambda files: 1 / 0)
    staging.write(lambda files: pytest.fail("written"))
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        store.publish(staging, {})


def test_a_file_named_like_the_manifest_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"more than one file called manifest\.json"):
        save_with(CheckpointStore(tmp_path), 1, lambda files: (files / MANIFEST_NAME).write_text("{}"), {})
    assert names_in(tmp_path) == []


# Damage


@pytest.mark.parametrize("name", ["weights.bin", "parts/state.json", MANIFEST_NAME])
@pytest.mark.parametrize("damage", [truncate, cut_in_half, flip, empty, delete], ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_set_aside_and_the_one_before_used(tmp_path, caplog, name, damage):
    for step in (1, 2, 3):
        save(tmp_path, step, max_checkpoints=3)
    damage(tmp_path / "step-00000003" / name)
    if damage is truncate and name == MANIFEST_NAME:
        truncate(tmp_path / "step-00000003" / name)  # its last byte is a line break, which says nothing
    assert newest_content(tmp_path) == "at 2"
    (warning,) = warnings_in(caplog)
    assert f"{tmp_path / 'step-00000003'} is damaged: {name} " in warning
    assert "renamed it to damaged-step-00000003" in warning
    assert names_in(tmp_path) == ["damaged-step-00000003", "step-00000001", "step-00000002"]
    assert newest_content(tmp_path) == "at 2"
    assert len(warnings_in(caplog)) == 1


def test_damage_to_all_leaves_none_and_each_is_named(tmp_path, caplog):
    for step in (1, 2):
        save(tmp_path, step, max_checkpoints=2)
        empty(tmp_path / f"step-0000000{step}" / "weights.bin")
    assert CheckpointStore(tmp_path).newest() is None
    assert len(warnings_in(caplog)) == 2
    save(tmp_path, 2, "again", max_checkpoints=2)
    empty(tmp_path / "step-00000002" / "weights.bin")
    assert CheckpointStore(tmp_path).newest() is None
    assert "damaged-step-00000002" in warnings_in(caplog)[-1]


def test_a_damaged_checkpoint_that_cannot_be_set_aside_is_skipped_all_the_same(tmp_path, caplog, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, max_checkpoints=2)
    empty(tmp_path / "step-00000002" / "weights.bin")

    def fail(*paths):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", fail)
    assert newest_content(tmp_path) == "at 1"
    assert "could not rename it" in warnings_in(caplog)[0]


def test_an_explicit_path_to_a_damaged_checkpoint_is_an_error(tmp_path):
    path = save(tmp_path, 1)
    flip(path / "weights.bin")
    with raises_at(CheckpointCorruptError, str(path), "weights.bin"):
        CheckpointStore(tmp_path).find(path)
    assert names_in(tmp_path) == ["step-00000001"]


def test_a_newest_checkpoint_of_a_future_version_is_neither_used_nor_skipped(tmp_path):
    for step in (1, 2):
        save(tmp_path, step, max_checkpoints=2)
    write_version(tmp_path / "step-00000002", 3)
    for look in (CheckpointStore(tmp_path).newest, lambda: CheckpointStore(tmp_path).find(tmp_path / "step-00000002")):
        with raises_at(CheckpointError, "step-00000002", "format 3"):
            look()
    save(tmp_path, 3)
    assert (tmp_path / "step-00000002").exists()


def test_foreign_folders_beside_are_neither_read_nor_touched(tmp_path, caplog):
    foreign = ["best", "step-12", "step-00000120.bak", ".tmp-step-mine", ".tmp-weights", "damaged-notes"]
    for name in foreign:
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("mine")
    (tmp_path / "step-00000999").write_text("a file")
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert newest_content(tmp_path) == "at 3"
    assert names_in(tmp_path) == sorted([*foreign, "step-00000999", "step-00000003"])
    assert warnings_in(caplog) == []


# What killed processes leave


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    own = make_unfinished_name("tmp", 3)
    started = int(psutil.Process(process.pid).create_time())
    of_living = own.replace(f"-{os.getpid()}-{int(psutil.Process().create_time())}-", f"-{process.pid}-{started}-")
    for name in (own, of_living):
        (tmp_path / name).mkdir()
    clean(CheckpointStore(tmp_path))
    assert names_in(tmp_path) == [of_living]
    process.communicate()
    clean(CheckpointStore(tmp_path))
    assert names_in(tmp_path) == []


def test_a_leftover_that_cannot_be_removed_is_a_warning(tmp_path, caplog, monkeypatch):
    (tmp_path / make_unfinished_name("tmp", 3)).mkdir()

    def fail(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("shutil.rmtree", fail)
    clean(CheckpointStore(tmp_path))
    assert "could not delete leftover checkpoint files" in warnings_in(caplog)[0]


@pytest.mark.parametrize(
    "look", [CheckpointStore.newest, lambda store: store.find(store.folder / "step-00000007"), clean]
)
def test_a_replacement_that_was_killed_between_its_renames_is_undone(tmp_path, look):
    path = save(tmp_path, 7)
    path.rename(tmp_path / make_unfinished_name("old", 7))
    look(CheckpointStore(tmp_path))
    assert names_in(tmp_path) == ["step-00000007"]
    assert newest_content(tmp_path) == "at 7"


def test_a_replacement_that_was_killed_after_its_renames_is_finished(tmp_path):
    save(tmp_path, 7, "first").rename(tmp_path / make_unfinished_name("old", 7))
    (tmp_path / "kept").mkdir()
    save(tmp_path / "kept", 7, "second").rename(tmp_path / "step-00000007")
    assert newest_content(tmp_path) == "second"
    assert names_in(tmp_path) == ["kept", "step-00000007"]


def test_a_checkpoint_that_cannot_have_its_name_back_is_an_error_rather_than_a_fresh_start(tmp_path, monkeypatch):
    save(tmp_path, 7).rename(tmp_path / make_unfinished_name("old", 7))

    def fail(*paths):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match=r"(?s)checkpoint folder.*Read-only.*make the folder writable"):
        CheckpointStore(tmp_path).newest()


# A fresh run where an older one left checkpoints


def test_the_checkpoints_of_an_earlier_run_are_moved_and_never_deleted(tmp_path, caplog):
    caplog.set_level(logging.INFO, "accmt")
    folder = tmp_path / "checkpoint-model"
    assert CheckpointStore(folder).set_aside_previous() is None
    for expected in ("checkpoint-model.previous", "checkpoint-model.previous-2"):
        for step in (1, 2):
            save(folder, step, max_checkpoints=2)
        (folder / "damaged-step-00000003").mkdir()
        (folder / "notes").mkdir(exist_ok=True)
        moved = CheckpointStore(folder).set_aside_previous()
        assert moved == tmp_path / expected
        assert names_in(folder) == ["notes"]
        assert names_in(moved) == ["damaged-step-00000003", "step-00000001", "step-00000002"]
        assert newest_content(moved) == "at 2"
        assert f" to {moved}" in caplog.records[-1].getMessage()
    assert CheckpointStore(folder).set_aside_previous() is None


def test_checkpoints_that_cannot_be_moved_are_an_error(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def fail(*paths):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "rename", fail)
    with raises_at(CheckpointError, f"checkpoint folder {tmp_path}", "Errno 18"):
        CheckpointStore(tmp_path).set_aside_previous()
