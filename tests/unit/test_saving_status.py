import json
import math

import pytest

from accmt.saving.status import read_status, write_status


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_status_comes_back_with_its_version(tmp_path):
    status = {"epoch": 2, "global_step": 120, "best": {"loss": 0.1 + 0.2}, "additional_metrics": {}, "digest": "ab"}
    write_status(tmp_path, status)
    assert read_status(tmp_path) == {"version": 1, **status}


def test_status_is_strict_json_with_infinite_best_values(tmp_path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    write_status(tmp_path, {"best_loss": math.inf})
    json.loads((tmp_path / "status.json").read_text(), parse_constant=refuse)
    assert read_status(tmp_path)["best_loss"] == math.inf


def test_status_that_json_cannot_hold_leaves_the_old_one(tmp_path):
    write_status(tmp_path, {"epoch": 1})
    with pytest.raises(TypeError, match="object"):
        write_status(tmp_path, {"epoch": object()})
    assert read_status(tmp_path)["epoch"] == 1
    assert names_in(tmp_path) == ["status.json"]


def test_folder_without_status_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_status(tmp_path)
