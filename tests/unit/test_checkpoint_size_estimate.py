import shutil

import pytest
import torch

from accmt.checkpoint.retention import estimate_size, find_shortage
from accmt.checkpoint.store import CheckpointStore
from tests.checkpoints import save_with
from tests.toys import Linear, make_points, make_trainer


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes the disk has left."""
    usage = shutil.disk_usage("/")

    def set_free(number):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=number) if path.is_dir() else None)

    return set_free


def test_a_shortage_is_told_with_what_to_change(tmp_path, free):
    free(1_500_000)
    told = find_shortage(12_340_000_000, tmp_path / "checkpoints")
    assert told is not None
    assert f"12.3 GB in {tmp_path / 'checkpoints'}" in told
    assert "only 1.5 MB are available" in told
    assert "max_checkpoints" in told


def test_what_the_checkpoints_of_the_folder_occupy_counts_as_room(tmp_path, free):
    save_with(CheckpointStore(tmp_path), 1, lambda files: (files / "a").write_bytes(bytes(5000)), {})
    (tmp_path / "foreign").write_bytes(bytes(5000))
    free(1000)
    assert find_shortage(6000, tmp_path) is None
    assert find_shortage(9000, tmp_path) is not None


@pytest.mark.parametrize(("kept", "needed"), [(None, 2), (1, 2), (3, 4)])
def test_a_run_needs_room_for_the_checkpoints_it_keeps_and_the_next_one_beside_them(kept, needed, free, caplog):
    module = Linear()
    size = estimate_size(module.model, torch.optim.SGD(module.model.parameters(), lr=0.1))
    for missing in (0, 1):
        free(needed * size - missing)
        settings = {"checkpoint_options": {"max_checkpoints": kept}, "checkpoint_every": "100 steps"}
        make_trainer({"optim": "SGD"}, f"out/{missing}", **settings).fit(module, make_points(2))
        assert ("checkpoints will need" in caplog.text) == bool(missing)
