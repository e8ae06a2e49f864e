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
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
)

from accmt.errors import ArgumentError, MissingPackageError
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.specs import (
    Aim,
    ClearML,
    CometML,
    DVCLive,
    GivenTracker,
    MLFlow,
    SwanLab,
    TensorBoard,
    Trackio,
    WandB,
    resolve_trackers,
)


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


@pytest.mark.feature("A16", "L37")
@pytest.mark.parametrize("log_with", [None, False, []])
def test_nothing_asked_for_is_no_tracker(log_with):
    assert resolve_trackers(log_with) == []


@pytest.mark.feature("L37")
def test_true_means_tensorboard():
    assert kinds(True) == [TensorBoard]


@pytest.mark.feature("A16", "A17", "A19")
@pytest.mark.parametrize(
    ("log_with", "expected"),
    [
        (TensorBoard, [TensorBoard]),
        (MLFlow(), [MLFlow]),
        ("tensorboard", [TensorBoard]),
        ("mlflow", [MLFlow]),
        (["mlflow", TensorBoard()], [MLFlow, TensorBoard]),
        ((TensorBoard, MLFlow), [TensorBoard, MLFlow]),
        (TensorBoardTracker, [TensorBoard]),
        (MLflowTracker, [MLFlow]),
        (Own, [GivenTracker]),
        (Own("x", "y"), [GivenTracker]),
        ([TensorBoard, Own], [TensorBoard, GivenTracker]),
    ],
)
def test_trackers_are_found_by_class_instance_name_and_list(log_with, expected):
    assert kinds(log_with) == expected


def test_arguments_of_an_instance_are_kept():
    assert resolve_trackers(MLFlow(tags={"team": "news"}))[0].init_kwargs == {"tags": {"team": "news"}}


@pytest.mark.parametrize(("wrong", "nearest"), [("mlfow", "mlflow"), ("tensorbord", "tensorboard"), ("wanbd", "wandb")])
def test_an_unknown_name_is_an_error_with_the_nearest(wrong, nearest):
    with pytest.raises(ArgumentError, match=f"'{wrong}'[\\s\\S]*log_with='{nearest}'"):
        resolve_trackers(wrong)


@pytest.mark.parametrize("wrong", [3, object, {"mlflow": {}}])
def test_what_is_no_tracker_is_an_error(wrong):
    with pytest.raises(ArgumentError, match="expected: TensorBoard, MLFlow"):
        resolve_trackers(wrong)


def test_a_tracker_named_twice_is_an_error():
    with pytest.raises(ArgumentError, match="'mlflow' 2 times"):
        resolve_trackers([MLFlow, "mlflow"])


@pytest.mark.feature("A16")
@pytest.mark.parametrize(("spec", "package"), [(MLFlow, "mlflow"), (TensorBoard, "tensorboard")])
def test_a_missing_package_is_an_error_that_names_it(monkeypatch, spec, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"do: pip install {package}$"):
        resolve_trackers(spec)


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
        with pytest.raises(
            MissingPackageError, match=f"log_with={spec.__name__}[\\s\\S]*do: pip install {spec.package}$"
        ):
            resolve_trackers(log_with)


def test_a_missing_package_is_an_import_error():
    assert issubclass(MissingPackageError, ImportError)


def test_a_users_instance_is_used_as_it_is():
    tracker = Own("x", "y")
    assert resolve_trackers(tracker)[0].build(RunPlace("logs", "t", "r"), {}, is_quiet=True) is tracker


def test_a_users_class_gets_the_names_its_constructor_asks_for():
    (spec,) = resolve_trackers(Own)
    tracker = spec.build(RunPlace("logs", "track", "run"), {"colour": "blue"}, is_quiet=True)
    assert tracker.arguments == ("track", "logs/track/run", "blue")


def test_a_users_tracker_is_known_by_its_name_or_its_class():
    assert resolve_trackers(Own)[0].name == "own"
    assert resolve_trackers(Bare())[0].name == "bare"
    assert resolve_trackers(Bare)[0].name == "Bare"


@pytest.mark.feature("A15")
def test_mlflow_keeps_a_folders_runs_in_one_database(tmp_path):
    uri = MLFlow().tracking_uri(RunPlace(str(tmp_path), "t", "r"))
    assert uri == f"sqlite:///{tmp_path}/mlflow.db"


@pytest.mark.feature("A15")
def test_mlflow_takes_a_url_as_tracking_uri():
    assert MLFlow().tracking_uri(RunPlace("localhost:5000", "t", "r")) == "http://localhost:5000"


def test_the_environments_tracking_uri_wins_over_the_default_folder_only(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment")
    assert MLFlow().tracking_uri(RunPlace("logs", "t", "r")) == "http://from-environment"
    assert MLFlow().tracking_uri(RunPlace(str(tmp_path), "t", "r")).startswith("sqlite:///")
    assert MLFlow().tracking_uri(RunPlace("http://given", "t", "r")) == "http://given"


def test_dashboards_are_started_on_the_folder_of_all_runs(tmp_path):
    place = RunPlace(str(tmp_path), "t", "r")
    assert TensorBoard().dashboard_command(place) == ["tensorboard", "--logdir", str(tmp_path)]
    expected = ["mlflow", "ui", "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db"]
    assert MLFlow().dashboard_command(place) == expected
    assert MLFlow().dashboard_command(RunPlace("logs", "t", "r"))[-1] == "sqlite:///logs/mlflow.db"
    assert MLFlow().dashboard_command(RunPlace("http://host", "t", "r")) == []
