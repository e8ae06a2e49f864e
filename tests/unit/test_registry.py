"""What is found by name: add-ons of accmt, and what other packages add by entry points."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import GeneralTracker

from accmt.addons.trackers.spec import find_specs
from accmt.features.listed import all_features
from accmt.options import Settings
from accmt.registry import _BUILT_IN, ADDED_FEATURES, ONLY_WITH, find, is_built_in, names
from tests.toys import make_trainer

TRACKER = """
from accelerate.tracking import GeneralTracker

class Lines(GeneralTracker):
    name = "lines"
    requires_logging_directory = False
    tracker = None
    rows = []

    def store_init_configuration(self, values):
        pass

    def log(self, values, step=None, **kwargs):
        self.rows.append(values)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with a tracker, as far as Python can tell."""
    folder = tmp_path / "site"
    metadata = folder / "lines_tracker-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lines-tracker\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[accmt.trackers]\nlines = lines_tracker:Lines\n")
    (folder / "lines_tracker.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("group", list(_BUILT_IN))
def test_all_that_is_built_in_exists(group: str) -> None:
    for name, place in _BUILT_IN[group].items():
        assert find(group, name) is getattr(importlib.import_module(place.split(":")[0]), place.split(":")[1])


def test_a_package_adds_a_name(package: None) -> None:
    tracker = find("accmt.trackers", "lines")
    assert issubclass(tracker, GeneralTracker)
    assert names("accmt.trackers")[0] == "tensorboard"
    assert "lines" in names("accmt.trackers")
    assert not is_built_in("accmt.trackers", "lines")
    [spec] = find_specs("Lines")
    assert spec.name == "lines"


def features_of(**arguments: Any) -> set[str]:
    return {kind.name for kind in all_features(make_trainer(**arguments).settings)}


def test_a_run_imports_a_feature_of_an_add_on_only_if_an_argument_asks_for_it() -> None:
    every = {find(ADDED_FEATURES, name).name: name for name in _BUILT_IN[ADDED_FEATURES]}
    assert features_of().isdisjoint({feature for feature, name in every.items() if name in ONLY_WITH})
    for arguments, name in (
        ({"ledger": True}, "flight_recorder"),
        ({"checkpoint": "s3://bucket/run"}, "remote_checkpoints"),
        ({"resume": "s3://bucket/run"}, "remote_checkpoints"),
        ({"model_path": "s3://bucket/model"}, "remote_models"),
    ):
        assert find(ADDED_FEATURES, name).name in features_of(**arguments)
    settings = make_trainer().settings
    known = {*dir(settings.hps), *(name for group in Settings.GROUPS for name in dir(getattr(settings, group)))}
    assert [name for needed in ONLY_WITH.values() for name in needed if name not in known] == []
    assert ONLY_WITH.keys() <= _BUILT_IN[ADDED_FEATURES].keys()
