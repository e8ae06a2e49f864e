import math

import mlflow
import pytest
import torch
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker
from torch.utils.tensorboard import SummaryWriter

from accmt import MLFlow, TensorBoard
from accmt.addons.trackers.spec import resolve_trackers
from accmt.errors import (
    ArgumentError,
    SavingError,
    TrackerError,
)
from accmt.tracking import Tracking, read_history
from tests.raising import raises_at

pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")

CONFIG = {"optim": {"type": "AdamW", "betas": [0.9, 0.999]}, "epochs": 2, "note": None}


class Recorder(GeneralTracker):
    """Writes down what it is handed; raises in the methods named in `failing`."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, failing=(), error=ConnectionError):
        super().__init__()
        self.failing = failing
        self.error = error
        self.calls = []

    @property
    def tracker(self):
        return self.calls

    def record(self, method, *arguments):
        if method in self.failing:
            raise self.error(f"{method} refused")
        self.calls.append((method, *arguments))

    def start(self):
        self.record("start")

    def store_init_configuration(self, values):
        self.record("config", values)

    def log(self, values, step=None, **kwargs):
        self.record("log", values, step)

    def finish(self):
        self.record("finish")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


@pytest.fixture(scope="module")
def shared_logs(tmp_path_factory):
    """One folder, and so one MLflow database, for all tests of trackers: making one takes seconds."""
    folder = tmp_path_factory.getbasetemp() / "logs with space"
    folder.mkdir(exist_ok=True)
    return folder


def make(log_with, logging_dir, *, run_name="run", kwargs=None, is_main_process=True, offline="auto"):
    return Tracking(
        resolve_trackers(log_with),
        track_name="track",
        run_name=run_name,
        logging_dir=logging_dir,
        tracker_kwargs=kwargs or {},
        is_main_process=is_main_process,
        verbose=False,
        offline=offline,
    )


def mlflow_run(folder, tracking):
    return mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").get_run(tracking.run_ids["mlflow"])


def test_history_is_written_without_any_tracker(tmp_path):
    tracking = make(None, tmp_path)
    tracking.start(CONFIG)
    tracking.log({"loss": torch.tensor(2.0), "skipped": None}, 1)
    tracking.log({"loss": math.nan}, 2)
    tracking.finish("FINISHED")
    config, first, second, end = read_history(tmp_path / "track" / "run")
    assert config["config"] == CONFIG
    assert (first["step"], first["values"]) == (1, {"loss": 2.0})
    assert math.isnan(second["values"]["loss"])
    assert end["status"] == "FINISHED"


def test_every_tracker_gets_every_row_as_plain_floats(tmp_path):
    first, second = Recorder(), Recorder()
    tracking = make([first, second], tmp_path)
    tracking.start(CONFIG)
    assert tracking.loggers == [first, second]
    tracking.log({"train_loss": torch.tensor(2.0)}, 3)
    tracking.log({"val_loss": 1}, 6)
    tracking.finish("FINISHED")
    flat = {"optim.type": "AdamW", "optim.betas": "[0.9, 0.999]", "epochs": 2, "note": "None"}
    expected = [
        ("start",),
        ("config", flat),
        ("log", {"train_loss": 2.0}, 3),
        ("log", {"val_loss": 1.0}, 6),
        ("finish",),
    ]
    assert first.calls == second.calls == expected
    assert type(first.calls[3][1]["val_loss"]) is float
    assert tracking.loggers == []


def test_mlflow_keeps_rows_and_configuration_in_the_logging_dir(shared_logs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracking = make(MLFlow, shared_logs, run_name="first", kwargs={"tags": {"team": "news"}})
    tracking.start({**CONFIG, "added": {"by": "user"}, "a@b": 1})
    for step in (1, 2):
        tracking.log({"train_loss": 4.0 / step, "f1@0.5": step}, step)
    tracking.finish("FINISHED")
    run = mlflow_run(shared_logs, tracking)
    client = mlflow.MlflowClient(f"sqlite:///{shared_logs}/mlflow.db")
    assert mlflow.get_tracking_uri() == f"sqlite:///{shared_logs}/mlflow.db"
    assert client.get_experiment(run.info.experiment_id).name == "track"
    assert run.info.run_name == "first"
    assert run.data.tags["team"] == "news"
    assert run.data.params["added.by"] == "user"
    assert run.data.params["a_at_b"] == "1"
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [(point.step, point.value) for point in history] == [(1, 4.0), (2, 2.0)]
    assert run.data.metrics["f1_at_0.5"] == 2.0
    assert run.info.artifact_uri.startswith((shared_logs / "mlartifacts").as_uri())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("status", ["FINISHED", "FAILED", "KILLED"])
def test_runs_end_with_their_true_status_everywhere(shared_logs, status):
    tracking = make(MLFlow, shared_logs, run_name=status)
    tracking.start({})
    run_id = tracking.run_ids["mlflow"]
    tracking.finish(status)
    tracking.finish("FINISHED")
    assert mlflow.MlflowClient(f"sqlite:///{shared_logs}/mlflow.db").get_run(run_id).info.status == status
    assert read_history(tracking.run_folder)[-1]["status"] == status


def test_nothing_happens_off_the_main_process(tmp_path):
    recorder = Recorder()
    tracking = make([TensorBoard, recorder], tmp_path / "logs", is_main_process=False)
    tracking.start(CONFIG)
    tracking.log({"loss": 1.0}, 1)
    tracking.get_tracker("tensorboard").log({"loss": 1.0}, step=1)
    tracking.finish("FINISHED")
    assert (tracking.loggers, tracking.run_ids, recorder.calls) == ([], {}, [])
    assert list(tmp_path.iterdir()) == []
    assert tracking.run_folder == tmp_path / "logs" / "track" / "run"


def test_a_refused_configuration_and_a_failing_end_are_warnings(tmp_path, caplog):
    refusing, failing = Recorder(failing=("config",), error=ValueError), Recorder(failing=("finish",), error=ValueError)
    failing.name = "failing"
    tracking = make([refusing, failing], tmp_path)
    tracking.start(CONFIG)
    tracking.log({"loss": 1.0}, 1)
    tracking.finish("FAILED")
    assert "the configuration was rejected: ValueError: config refused" in caplog.text
    assert "finish refused" in caplog.text
    assert refusing.calls == [("start",), ("log", {"loss": 1.0}, 1), ("finish",)]


@pytest.mark.parametrize("offline", ["auto", True, False])
def test_a_tracker_that_does_not_start_is_an_error_and_ends_the_others(tmp_path, offline):
    good, bad = Recorder(), Recorder(failing=("start",), error=ValueError)
    tracking = make([good, bad], tmp_path, offline=offline)
    with raises_at(TrackerError, "the tracker recorder", "start refused"):
        tracking.start(CONFIG)
    assert good.calls == [("start",), ("finish",)]
    assert read_history(tracking.run_folder)[-1]["status"] == "FAILED"


def test_a_server_that_is_down_at_the_start_costs_one_warning(caplog):
    tracking = make([MLFlow, Recorder], "127.0.0.1:9")
    tracking.start({})
    assert "the tracker mlflow" in caplog.text
    assert "did not start within" not in caplog.text, "the start is not waited for"
    first, second = tracking.loggers
    first.log({"loss": 1.0}, step=1)  # a stand-in: a user's own calls must not end the run
    assert type(tracking.get_tracker("mlflow", unwrap=True)) is type(first) is GeneralTracker
    assert isinstance(second, Recorder)
    tracking.log({"loss": 1.0}, 1)
    tracking.finish("FINISHED", flush_s=0.5)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "1 rows not delivered, and the run was not closed" in warnings[1]
    assert f"do: accmt sync {tracking.run_folder.absolute()}" in warnings[1]
    assert second.calls[-1] == ("finish",)


def test_offline_leaves_servers_alone_and_says_how_to_deliver(caplog, tmp_path):
    caplog.set_level("INFO", logger="accmt")
    recorder = Recorder()
    tracking = make([MLFlow, recorder], "127.0.0.1:9", offline=True)
    tracking.start({})
    tracking.log({"loss": 1.0}, 1)
    tracking.finish("FINISHED")
    assert caplog.messages == [f"offline: to deliver the rows to mlflow, run `accmt sync {tracking.run_folder}`"]
    assert [call[0] for call in recorder.calls] == ["start", "config", "log", "finish"]


@pytest.mark.parametrize("log_with", [None, TensorBoard, Recorder])
def test_a_url_without_a_tracker_that_can_use_it_is_an_error(log_with):
    with raises_at(ArgumentError, "Trainer(logging_dir=...)"):
        make(log_with, "http://localhost:5000")


def test_trackers_are_found_by_name_and_unwrapped(tmp_path):
    recorder = Recorder()
    tracking = make([TensorBoard, recorder], tmp_path)
    tracking.start({})
    assert tracking.get_tracker("recorder") is recorder
    assert tracking.get_tracker("recorder", unwrap=True) is recorder.calls
    assert isinstance(tracking.get_tracker("tensorboard", unwrap=True), SummaryWriter)
    with raises_at(ArgumentError, "get_tracker('wandb')"):
        tracking.get_tracker("wandb")
    tracking.finish("FINISHED")


@pytest.mark.parametrize("status", ["FAILED", "KILLED", None])
def test_a_run_that_begins_anew_where_one_of_its_name_did_not_come_to_its_end_has_one_curve(tmp_path, status):
    for step, ending in ((1, status), (2, "FINISHED")):
        tracking = make(None, tmp_path)
        tracking.start({})
        tracking.log({"loss": 1.0}, step)
        if ending is not None:
            tracking.finish(ending)
        elif tracking._history is not None:
            tracking._history.close()  # as when it is killed
            tracking._unlock()
    every = read_history(tracking.run_folder, include_superseded=True)
    assert [row["step"] for row in read_history(tracking.run_folder) if "step" in row] == [2]
    assert [row["step"] for row in every if "step" in row] == [1, 2]


def steps_of(folder):
    return [row["step"] for row in read_history(folder) if "step" in row]


def test_a_new_run_under_the_name_of_one_that_came_to_its_end_gets_another_name(tmp_path, caplog):
    names = []
    caplog.set_level("INFO", "accmt")
    for step in (1, 2, 3):
        tracking = make(None, tmp_path)
        names.append(tracking.start({"model_path": "out/m"}))
        tracking.log({"loss": 1.0}, step)
        tracking.finish("FINISHED")
        assert steps_of(tracking.run_folder) == [step]
        assert tracking.state_dict()["run_name"] == tracking.run_name == names[-1]
    assert names == ["run", "run-2", "run-3"]
    assert "belongs to another run: this run is named 'run-3'" in caplog.text


def test_a_new_run_of_another_model_leaves_the_rows_of_one_that_failed(tmp_path):
    first, second = make(None, tmp_path), make(None, tmp_path)
    first.start({"model_path": "out/a"})
    first.log({"loss": 1.0}, 1)
    first.finish("FAILED")
    assert second.start({"model_path": "out/b"}) == "run-2"
    second.finish("FINISHED")
    assert steps_of(first.run_folder) == [1]


def test_two_runs_of_one_name_at_once_have_a_folder_each_and_a_resumed_one_is_refused(tmp_path):
    first, second, resumed = (make(None, tmp_path) for _ in range(3))
    first.start({})
    assert second.start({}) == "run-2"
    resumed.load_state_dict(first.state_dict())
    with raises_at(SavingError, "run folder ", "another run"):
        resumed.start({})
    for tracking in (first, second):
        tracking.log({"loss": 1.0}, 1)
        tracking.finish("FINISHED")
        assert steps_of(tracking.run_folder) == [1]
        assert not (tracking.run_folder / ".lock").exists()
    assert resumed.start({}) == "run"
    resumed.finish("FINISHED")


def test_a_run_that_is_resumed_before_its_first_new_row_knows_the_step_of_the_last(tmp_path):
    """Its own checkpoint, and the rewind of the next resume, have the step of the row before both."""
    first = make(None, tmp_path)
    first.start({})
    for step in (1, 2, 3):
        first.log({"loss": 1.0}, step)
    state = first.state_dict()
    first.finish("FAILED")
    for _ in range(2):
        again = make(None, tmp_path)
        again.load_state_dict(state)
        assert again.state_dict()["step"] == 3
        again.start({})
        state = again.state_dict()
        again.finish("FAILED")
    rewinds = [row["rewind"] for row in read_history(again.run_folder, include_superseded=True) if "rewind" in row]
    assert [rewind["step"] for rewind in rewinds] == [3, 3]


def test_the_first_tracker_with_a_dashboard_gives_the_command(tmp_path):
    assert make(None, tmp_path).dashboard_command() == []
    assert make([Recorder(), TensorBoard, MLFlow], tmp_path).dashboard_command()[0] == "tensorboard"
    assert make([MLFlow, TensorBoard], tmp_path).dashboard_command()[:2] == ["mlflow", "ui"]
