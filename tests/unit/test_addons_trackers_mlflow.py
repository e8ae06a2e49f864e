import math
import os
import threading

import mlflow
import pytest
import urllib3
from accelerate.state import PartialState
from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, _validate_metric_name, _validate_param_name

from accmt.addons.trackers.delivery_state import Resume, Row
from accmt.addons.trackers.mlflow import MLFlow, MLFlowRun, clean_mlflow_name
from accmt.tracking.history import RunPlace
from tests.toys import Linear, make_points, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One MLflow database for all tests of trackers: making one takes seconds."""
    folder = tmp_path_factory.getbasetemp() / "logs with space"
    folder.mkdir(exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


@pytest.fixture
def run(store):
    run = MLFlowRun(store, is_quiet=True, experiment_name="adapters", run_name="unit")
    run.start()
    yield run
    run.finish()


def read(store, run):
    return mlflow.MlflowClient(store).get_run(run.run_id)


@pytest.mark.parametrize(
    ("name", "cleaned"),
    [
        ("train_loss", "train_loss"),
        ("val/f1", "val/f1"),
        ("f1@0.5", "f1_at_0.5"),
        ("memory%", "memory_percent"),
        ("acc (top 5)", "acc _top 5_"),
        ("/leading", "leading"),
        ("a//b/", "a/b"),
        ("a/../../b", "b"),
        ("..", "_"),
        ("", "_"),
        ("größe", "größe"),
    ],
)
def test_names_are_cleaned_for_mlflow(name, cleaned):
    assert clean_mlflow_name(name) == cleaned
    _validate_metric_name(cleaned)
    _validate_param_name(cleaned)


def test_the_right_run_ends_where_the_user_opened_another_inside(store):
    run = MLFlowRun(store, is_quiet=True, experiment_name="adapters")
    run.start()
    with mlflow.start_run(nested=True) as inner:
        run.log({"loss": 1.0}, 1)
        run.finish("KILLED")
        assert read(store, run).info.status == "KILLED"
        assert mlflow.MlflowClient(store).get_run(inner.info.run_id).info.status == "RUNNING"
    assert read(store, run).data.metrics == {"loss": 1.0}
    assert mlflow.MlflowClient(store).get_run(inner.info.run_id).data.metrics == {}
    mlflow.end_run("KILLED")


def test_long_parameters_are_cut_not_dropped(store, run):
    run.store_init_configuration({"long": "x" * 10_000, "short": "y"})
    params = read(store, run).data.params
    assert len(params["long"]) == MAX_PARAM_VAL_LENGTH
    assert params["short"] == "y"


def test_more_parameters_than_one_request_takes_are_all_stored(store, run):
    run.store_init_configuration({f"p{index}": index for index in range(250)})
    assert len(read(store, run).data.params) == 250


def test_a_continued_run_keeps_its_id_and_its_parameters(store):
    first = MLFlowRun(store, is_quiet=True, experiment_name="adapters")
    first.start()
    first.store_init_configuration({"epochs": 1})
    first.finish("FAILED")
    resume = Resume(first.run_id, attempt=2)
    second = MLFlowRun(store, is_quiet=True, experiment_name="adapters", resume=resume)
    second.start()
    for _ in range(2):  # as after an outage
        second.store_init_configuration({"epochs": 2, "lr": 0.1})
    second.finish()
    third = MLFlowRun(store, is_quiet=True, experiment_name="adapters", resume=Resume(first.run_id, attempt=3))
    third.start()
    third.store_init_configuration({"epochs": 3, "lr": 0.1})
    third.finish()
    assert second.run_id == third.run_id == first.run_id
    changed = {"epochs.attempt_2": "2", "epochs.attempt_3": "3"}
    assert read(store, third).data.params == {"epochs": "1", "lr": "0.1", **changed}
    assert read(store, third).data.tags["accmt.attempt"] == "3"
    assert read(store, third).info.status == "FINISHED"


def test_a_run_that_was_deleted_is_begun_anew_with_a_warning(store, caplog):
    first = MLFlowRun(store, is_quiet=True, experiment_name="adapters")
    first.start()
    first.finish()
    mlflow.MlflowClient(store).delete_run(first.run_id)
    for gone in (first.run_id, "0" * 32):
        second = MLFlowRun(store, is_quiet=True, experiment_name="adapters", resume=Resume(gone, attempt=2))
        second.start()
        second.finish()
        assert second.run_id not in (gone, None)
    assert len([message for message in caplog.messages if "was deleted" in message]) == 2


def test_a_preempted_run_is_killed_to_mlflow_and_has_the_true_word_in_a_tag(store):
    run = MLFlowRun(store, is_quiet=True, experiment_name="adapters")
    run.start()
    run.finish("PREEMPTED")
    assert read(store, run).info.status == "KILLED"
    assert read(store, run).data.tags["accmt.status"] == "PREEMPTED"


def test_rows_that_are_delivered_twice_are_in_mlflow_once(store, run):
    rows = [Row(step, 1000.0 + step, {f"m{index}": step for index in range(60)}) for step in range(20)]
    run.log_rows(rows)
    run.log_rows(rows[5:])
    points = mlflow.MlflowClient(store).get_metric_history(run.run_id, "m59")
    assert [(point.step, point.value, point.timestamp) for point in points] == [
        (step, float(step), 1_000_000 + 1000 * step) for step in range(20)
    ]


def test_the_users_own_calls_go_to_the_run_from_the_thread_it_is_attached_to(store):
    run = MLFlowRun(store, is_quiet=True, experiment_name="adapters")
    thread = threading.Thread(target=run.start)
    thread.start()
    thread.join()
    assert mlflow.active_run() is None
    run.attach()
    mlflow.log_metric("own", 1.0)
    thread = threading.Thread(target=run.finish, args=["FAILED"])
    thread.start()
    thread.join()
    run.detach("FAILED")
    assert mlflow.active_run() is None
    assert read(store, run).info.status == "FAILED"
    assert read(store, run).data.metrics == {"own": 1.0}


def test_nan_stays_nan_and_inf_the_largest_float(store, run):
    run.log({"nan": math.nan, "inf": math.inf}, 1)
    metrics = read(store, run).data.metrics
    assert math.isnan(metrics["nan"])
    assert metrics["inf"] > 1e308


def test_the_environment_is_as_before_when_the_run_is_over(store):
    before = dict(os.environ)
    run = MLFlowRun(store, is_quiet=True, experiment_name="adapters")
    run.start()
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "0"
    assert "MLFLOW_TRACKING_URI" not in os.environ
    run.finish()
    assert dict(os.environ) == before
    assert mlflow.get_tracking_uri() == store


def test_a_dead_server_is_noticed_at_once_and_leaves_no_environment(monkeypatch):
    tries, before = [], dict(os.environ)
    connect = urllib3.util.connection.create_connection
    note = lambda *args, **kwargs: tries.append(args) or connect(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr("urllib3.util.connection.create_connection", note)
    with pytest.raises(mlflow.exceptions.MlflowException, match=r"127\.0\.0\.1"):
        MLFlowRun("http://127.0.0.1:9", is_quiet=True, experiment_name="adapters").start()
    assert len(tries) == 1, "it is not tried again"
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["feature%2Fx", "what?", "a#b c", "100%"])
def test_the_database_of_a_folder_whose_name_has_a_meaning_in_urls_is_in_it(tmp_path, name):
    from sqlalchemy import make_url

    folder = tmp_path / name
    assert make_url(MLFlow().tracking_uri(RunPlace(str(folder), "t", "r"))).database == f"{folder}/mlflow.db"
    assert make_url(MLFlow().dashboard_command(RunPlace(str(folder), "t", "r"))[-1]).database == f"{folder}/mlflow.db"


def test_the_environments_tracking_uri_wins_over_the_default_folder_only(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment")
    assert MLFlow().tracking_uri(RunPlace("logs", "t", "r")) == "http://from-environment"
    assert MLFlow().tracking_uri(RunPlace(str(tmp_path), "t", "r")).startswith("sqlite:///")
    assert MLFlow().tracking_uri(RunPlace("http://given", "t", "r")) == "http://given"


def test_a_fork_is_a_child_of_its_parent(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = {"logging_dir": store, "log_with": "mlflow", "checkpoint_every": "step", "run_name": "run"}
    arguments["checkpoint_options"] = {"max_checkpoints": 9}
    parent = make_trainer(**arguments)
    parent.fit(Linear(), make_points())
    fork = make_trainer(**arguments, fork="logs/model/run@3", mlflow={"tags": {"team": "news"}})
    fork.fit(Linear(), make_points())
    found = mlflow.MlflowClient(store).get_run(fork.run.tracking.run_ids["mlflow"])
    assert found.data.tags["mlflow.parentRunId"] == parent.run.tracking.run_ids["mlflow"]
    assert found.data.tags["team"] == "news"
    assert found.data.params["fork.parent"] == "run"
    assert found.info.run_name == "run-at-3"
