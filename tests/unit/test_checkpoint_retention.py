import shutil

import pytest

from accmt.checkpoint.manifest import MANIFEST_NAME
from accmt.checkpoint.store import CheckpointStore
from tests.checkpoints import empty, names_in, newest_content, save


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("max_checkpoints", "kept"), [(None, [5]), (1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_the_newest_are_kept_and_each_can_be_loaded(tmp_path, max_checkpoints, kept):
    for step in range(1, 6):
        save(tmp_path, step, max_checkpoints=max_checkpoints)
    assert names_in(tmp_path) == [f"step-{step:08d}" for step in kept]
    for step in kept:
        assert CheckpointStore(tmp_path).find(tmp_path / f"step-{step:08d}").info == {"content": f"at {step}"}


def test_pinned_checkpoints_stay_and_do_not_count(tmp_path):
    for step in range(1, 6):
        path = save(tmp_path, step, max_checkpoints=2)
        if step in (1, 3):
            (path / "PINNED").write_text("for the paper")
    assert names_in(tmp_path) == [f"step-0000000{step}" for step in (1, 3, 4, 5)]


def test_a_pinned_checkpoint_whose_step_is_saved_again_stays_under_another_name(tmp_path):
    for content in ("first", "second", "third"):
        path = save(tmp_path, 1, content)
        (path / "PINNED").write_text("")
    assert newest_content(tmp_path) == "third"
    assert names_in(tmp_path) == ["replaced-step-00000001", "replaced-step-00000001-2", "step-00000001"]
    assert (tmp_path / "replaced-step-00000001" / "weights.bin").read_text() == "first"
    assert CheckpointStore(tmp_path).find(tmp_path / "replaced-step-00000001-2").info == {"content": "second"}
    save(tmp_path, 2)
    assert len(names_in(tmp_path)) == 4


def test_what_has_no_manifest_of_ours_stays(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "mine").write_text("x")
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / MANIFEST_NAME).write_text('{"of": "another program"}')
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-00000003").symlink_to(save(tmp_path / "elsewhere", 3))
    for step in (1, 4):
        save(tmp_path, step)
    names = ["elsewhere", "replaced-step-00000001", "step-00000002", "step-00000003", "step-00000004"]
    assert names_in(tmp_path) == names
    assert (tmp_path / "replaced-step-00000001" / "mine").exists()
    assert (tmp_path / "step-00000003" / "weights.bin").exists()


def test_a_damaged_checkpoint_goes_once_a_newer_one_has_its_step_behind_it(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, max_checkpoints=2)
    empty(tmp_path / "step-00000020" / "weights.bin")
    assert newest_content(tmp_path) == "at 10"
    save(tmp_path, 15)
    assert names_in(tmp_path) == ["damaged-step-00000020", "step-00000015"]
    save(tmp_path, 20)
    assert names_in(tmp_path) == ["step-00000020"]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning_and_goes_next_time(tmp_path, caplog, monkeypatch):
    save(tmp_path, 1)

    def fail(path):
        raise OSError(5, "Input/output error")

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path: rmtree(path) if ".part" in str(path) else fail(path))
    save(tmp_path, 2)
    assert [warning.split(": ")[0] for warning in warnings_in(caplog)] == [
        f"could not delete the old checkpoint {tmp_path / 'step-00000001'}"
    ]
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    save(tmp_path, 3)
    assert names_in(tmp_path) == ["step-00000003"]


def test_a_replaced_checkpoint_that_can_neither_go_nor_be_renamed_is_a_warning(tmp_path, caplog, monkeypatch):
    (save(tmp_path, 1, "first") / "PINNED").write_text("")
    monkeypatch.setattr("accmt.checkpoint.retention.find_free_name", lambda path: path / "nowhere" / "x")
    save(tmp_path, 1, "second")
    assert "could not rename" in warnings_in(caplog)[0]
    assert newest_content(tmp_path) == "second"
    monkeypatch.undo()
    save(tmp_path, 2)
    assert names_in(tmp_path) == ["replaced-step-00000001", "step-00000002"]
