import sys

import pytest
from accelerate.tracking import (
    AimTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    GeneralTracker,
    MLflowTracker,
    SwanLabTracker,
    TrackioTracker,
    WandBTracker,
)

from accmt import Aim, ClearML, CometML, DVCLive, MLFlow, SwanLab, TensorBoard, Trackio, WandB
from accmt.addons.trackers.common import ServiceSpec
from accmt.addons.trackers.spec import RunStart, UserTracker, kwargs_of_each, resolve_trackers
from accmt.errors import MissingPackageError, TrackerError, UnknownArgumentError
from accmt.tracking.history import RunPlace
from tests.raising import raises_at


class Own(GeneralTracker):
    name = "own"
    requires_logging_directory = False
    tracker = None

    def __init__(self, experiment_name, logging_dir, colour="red"):
        super().__init__()
        self.arguments = (experiment_name, logging_dir, colour)


class Bare(GeneralTracker):
    requires_logging_directory = False
    tracker = None
    name = property(lambda self: "bare")


def kinds(log_with):
    return [type(spec) for spec in resolve_trackers(log_with)]


@pytest.mark.parametrize(
    ("log_with", "expected"),
    [
        (TensorBoard, [TensorBoard]),
        (MLFlow(), [MLFlow]),
        ("tensorboard", [TensorBoard]),
        (["mlflow", TensorBoard()], [MLFlow, TensorBoard]),
        (MLflowTracker, [MLFlow]),
        (Own, [UserTracker]),
        (Own("x", "y"), [UserTracker]),
    ],
)
def test_trackers_are_found_by_class_instance_name_and_list(log_with, expected):
    assert kinds(log_with) == expected


def test_a_folder_with_the_name_of_a_package_is_not_the_package(monkeypatch, tmp_path):
    (tmp_path / "wandb").mkdir()  # what its runs leave in the current folder
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with raises_at(MissingPackageError, "Trainer(log_with=WandB)", do="pip install wandb"):
        resolve_trackers("wandb")


@pytest.mark.parametrize(
    ("spec", "accelerates"),
    [
        (WandB, WandBTracker),
        (CometML, CometMLTracker),
        (Aim, AimTracker),
        (ClearML, ClearMLTracker),
        (DVCLive, DVCLiveTracker),
        (Trackio, TrackioTracker),
        (SwanLab, SwanLabTracker),
    ],
)
def test_a_tracker_without_its_package_names_that_one(monkeypatch, spec, accelerates):
    monkeypatch.setitem(sys.modules, spec.package.replace("-", "_"), None)
    for log_with in (spec, spec(), spec.name, [spec], accelerates):
        with raises_at(MissingPackageError, f"Trainer(log_with={spec.__name__})", do=f"pip install {spec.package}"):
            resolve_trackers(log_with)


def test_a_users_instance_is_used_as_it_is():
    tracker = Own("x", "y")
    assert resolve_trackers(tracker)[0].build(RunStart(RunPlace("logs", "t", "r"), {})) is tracker


def test_a_users_class_gets_the_names_its_constructor_asks_for():
    (spec,) = resolve_trackers(Own)
    tracker = spec.build(RunStart(RunPlace("logs", "track", "run"), {"colour": "blue"}))
    assert tracker.arguments == ("track", "logs/track/run", "blue")


def test_a_users_tracker_is_known_by_its_name_or_its_class():
    assert resolve_trackers(Own)[0].name == "own"
    assert resolve_trackers(Bare())[0].name == "bare"
    assert resolve_trackers(Bare)[0].name == "Bare"


BOTH = [TensorBoard(), MLFlow()]


def test_a_keyword_goes_to_every_tracker_that_takes_it():
    assert kwargs_of_each(BOTH, {"tags": {"a": "b"}, "flush_secs": 5}) == [{"flush_secs": 5}, {"tags": {"a": "b"}}]


def test_a_dict_under_a_trackers_name_goes_to_that_one_only():
    given = {"mlflow": {"description": "x"}, "tensorboard": {"purge_step": 3}}
    assert kwargs_of_each(BOTH, given) == [{"purge_step": 3}, {"description": "x"}]


def test_the_nearer_the_tracker_the_stronger_the_keyword():
    given = {"description": "for all", "nested_run": True}
    assert kwargs_of_each([MLFlow(description="of the instance")], given) == [
        {"description": "of the instance", "nested_run": True}
    ]
    given["mlflow"] = {"description": "of the dict"}
    assert kwargs_of_each([MLFlow(description="of the instance")], given)[0]["description"] == "of the dict"


def test_a_keyword_that_no_tracker_takes_is_an_error_with_the_nearest():
    with raises_at(UnknownArgumentError, "Trainer(...)"):
        kwargs_of_each([MLFlow()], {"descripton": "x"})
    with raises_at(UnknownArgumentError, "Trainer(mlflow={...})"):
        kwargs_of_each([MLFlow()], {"mlflow": {"tagz": {}}})


def test_keywords_of_a_tracker_that_is_not_used_are_an_error():
    with raises_at(UnknownArgumentError, "Trainer(...)"):
        kwargs_of_each([TensorBoard()], {"mlflow": {"description": "x"}})


class Keyless(ServiceSpec):
    name = "keyless"
    key_advice = "set THE_KEY"

    def has_key(self, kwargs):
        return "key" in kwargs

    def is_offline_wanted(self, kwargs):
        return False

    def upload_command(self, place):
        return f"upload {place.run_folder}"


PLACE = RunPlace("logs", "track", "run")


def test_a_missing_key_is_one_line_that_says_how_to_upload_later(caplog):
    caplog.set_level("INFO", logger="accmt")
    Keyless().require_access(PLACE, {}, is_needed=False)
    (line,) = caplog.messages
    assert line.endswith("has no API key (set THE_KEY) and writes files; upload them with `upload logs/track/run`")


def test_a_missing_key_is_an_error_where_the_service_must_be_reached():
    with raises_at(TrackerError, "the tracker keyless", "API key", do="THE_KEY"):
        Keyless().require_access(PLACE, {}, is_needed=True)
