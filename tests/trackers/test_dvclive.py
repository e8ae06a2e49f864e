"""DVCLive, whose package comes with all of DVC: these tests run where it is installed."""

import json
import math
import os

import pytest

os.environ["ITERATIVE_DO_NOT_TRACK"] = "true"  # no usage reports


from accmt import DVCLive
from accmt.addons.trackers.spec import resolve_trackers
from accmt.tracking import Tracking
from tests.trackers.contract import log_media


@pytest.fixture(autouse=True)
def _no_leaks(tmp_path, monkeypatch):
    """Stand in for the guard of all tests: DVCLive leaves a thread behind at each end of a run."""
    monkeypatch.chdir(tmp_path)


def make(tmp_path, **kwargs):
    return Tracking(
        resolve_trackers("dvclive"),
        track_name="track",
        run_name="run",
        logging_dir=tmp_path,
        tracker_kwargs=kwargs,
        is_main_process=True,
        verbose=False,
    )


def table(tmp_path, name):
    lines = (tmp_path / "track" / "run" / "dvclive" / "plots" / "metrics" / f"{name}.tsv").read_text().splitlines()
    return [tuple(map(float, line.split("\t"))) for line in lines[1:]]


def test_rows_and_configuration_lie_in_the_run_folder_with_their_own_steps(tmp_path):
    tracking = make(tmp_path)
    tracking.start({"optim": {"lr": 0.1}, "betas": [0.9, 0.99], "note": None})
    for step in (10, 20, 30):
        tracking.log({"train/loss": 1.0 / step, "../f1@0.5 %": 0.5}, step)
    tracking.finish("FINISHED")
    assert table(tmp_path, "train/loss") == [(step, 1.0 / step) for step in (10, 20, 30)]
    assert table(tmp_path, "f1@0.5 %") == [(step, 0.5) for step in (10, 20, 30)]
    folder = tmp_path / "track" / "run" / "dvclive"
    assert json.loads((folder / "metrics.json").read_text())["step"] == 30
    assert "optim.lr: 0.1" in (folder / "params.yaml").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.json", "params.yaml", "plots"]


def test_a_resumed_run_has_each_step_once(tmp_path):
    first = make(tmp_path)
    first.start({"lr": 0.1})
    for step in range(18):
        first.log({"loss": float(step)}, step)
        if step == 10:
            state = first.state_dict()
    first.finish("FAILED")
    second = make(tmp_path)
    second.load_state_dict(state)
    second.start({"lr": 0.2})
    for step in range(11, 25):
        second.log({"loss": 100.0 + step}, step)
    second.finish("FINISHED")
    expected = [(step, float(step)) for step in range(11)] + [(step, 100.0 + step) for step in range(11, 25)]
    assert table(tmp_path, "loss") == expected


def test_values_that_are_no_finite_numbers_are_kept(tmp_path):
    tracking = make(tmp_path)
    tracking.start({})
    tracking.log({"loss": math.nan}, 1)
    tracking.log({"loss": math.inf}, 2)
    tracking.finish("FINISHED")
    (_, first), (_, second) = table(tmp_path, "loss")
    assert math.isnan(first)
    assert second == math.inf


def test_keywords_are_those_of_live(tmp_path):
    assert {"save_dvc_exp", "report"} <= DVCLive().accepted_names()
    assert not {"dir", "resume"} & DVCLive().accepted_names()


def test_images_have_a_file_for_each_step_and_there_is_no_place_for_the_rest(tmp_path, caplog):
    tracking = make(tmp_path)
    tracking.start({})
    log_media(tracking, tmp_path)
    tracking.log({"loss": 1.0}, 3)
    tracking.finish("FINISHED")
    folder = tmp_path / "track" / "run" / "dvclive" / "plots" / "images"
    paths = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.png"))
    assert paths == ["one/3.png", "val/samples/0/3.png", "val/samples/1/3.png"]
    assert "a table, which it does not support" in caplog.text
    assert "files, which it does not support" in caplog.text
    assert "refused" not in caplog.text
