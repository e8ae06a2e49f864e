"""Each tracker runs in an environment of its own, without keys, and with all its files in the folder of the test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.trackers.contract")

KEYS = ("WANDB_API_KEY", "COMET_API_KEY", "CLEARML_API_ACCESS_KEY", "SWANLAB_API_KEY")
MODES = ("WANDB_MODE", "COMET_START_ONLINE", "CLEARML_OFFLINE_MODE", "SWANLAB_MODE", "TRACKIO_SPACE_ID")
LEFT_BY_CLEARML = ("TRAINS_OFFLINE_MODE", "CLEARML_PROC_MASTER_ID", "TRAINS_PROC_MASTER_ID")


@pytest.fixture(autouse=True)
def _no_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the guard of all tests: these packages leave threads and variables of their own behind."""
    monkeypatch.chdir(tmp_path)
    for name in (*KEYS, *MODES, *LEFT_BY_CLEARML):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set what is read when a package is imported."""
    folder = tmp_path_factory.getbasetemp()
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    os.environ["CLEARML_CACHE_DIR"] = str(folder / "clearml")
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"
    os.environ["ITERATIVE_DO_NOT_TRACK"] = "true"
    os.environ["__AIM_TELEMETRY_DISABLED__"] = "1"
