"""Runs that are killed and resumed: one run in each tracker, each step once, and a true ending."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from accelerate.state import PartialState

from accmt import MLFlow, TensorBoard
from accmt.addons.sync import sync_run
from accmt.addons.trackers.delivery_state import DELIVERY_FILE
from accmt.tracking import read_history
from accmt.tracking.history import History
from tests.faults.tracking import (
    Faulty,
    accounts_of,
    kill,
    log_steps,
    make,
    points_of,
    steps_of,
    tensorboard_points,
    wait_until,
    warnings_of,
)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    PartialState(cpu=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One folder for the runs of all tests of this folder: making an MLflow database takes seconds."""
    folder = tmp_path_factory.getbasetemp() / "faulty trackers"
    folder.mkdir(exist_ok=True)
    return folder


KILLED_AT, CHECKPOINT_AT, END = 17, 10, 30
SECOND = 100.0  # added to the values of the second attempt


def run_first_attempt(store, name, log_with, *, waits=True):
    tracking = make(log_with, store, run_name=name)
    tracking.start({"lr": 0.1, "epochs": 3})
    log_steps(tracking, 0, CHECKPOINT_AT)
    state = json.loads(json.dumps(tracking.state_dict()))
    log_steps(tracking, CHECKPOINT_AT + 1, KILLED_AT)
    if waits:
        wait_until(lambda: all(own.delivered == KILLED_AT + 2 for own in accounts_of(tracking.run_folder)))
    kill(tracking)
    return state


def run_second_attempt(store, name, log_with, state, status="FINISHED"):
    tracking = make(log_with, store, run_name=name)
    tracking.load_state_dict(state)
    tracking.start({"lr": 0.2, "epochs": 3})
    log_steps(tracking, CHECKPOINT_AT + 1, END, value=lambda step: SECOND + step)
    tracking.finish(status)
    return tracking


@pytest.mark.parametrize("waits", [True, False])
def test_a_resumed_run_is_one_run_with_each_step_once(store, waits, caplog):
    name = f"resumed-{waits}"
    state = run_first_attempt(store, name, [TensorBoard, MLFlow], waits=waits)
    tracking = run_second_attempt(store, name, [TensorBoard, MLFlow], state)
    before = [(step, float(step)) for step in range(CHECKPOINT_AT + 1)]
    after = [(step, SECOND + step) for step in range(CHECKPOINT_AT + 1, END + 1)]
    rows = [(row["step"], row["values"]["loss"]) for row in read_history(tracking.run_folder) if "values" in row]
    assert rows == before + after
    assert len(read_history(tracking.run_folder, include_superseded=True)) == len(read_history(tracking.run_folder)) + 7
    assert tensorboard_points(tracking.run_folder) == before + after
    client = mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")
    run_id = tracking.run_ids["mlflow"]
    assert run_id == state["run_ids"]["mlflow"]
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.tags["accmt.attempt"] == "2"
    assert run.data.params == {"lr": "0.1", "lr.attempt_2": "0.2", "epochs": "3"}
    points = points_of(client, run_id)
    assert [step for step, _ in points] == list(range(END + 1))
    if waits:
        assert points == before + [(step, float(step)) for step in range(11, 18)] + after[7:]
    assert warnings_of(caplog) == []


def test_a_run_resumed_twice_from_one_checkpoint_is_still_one_curve(store):
    state = run_first_attempt(store, "twice", [TensorBoard, MLFlow])
    second = make([TensorBoard, MLFlow], store, run_name="twice")
    second.load_state_dict(state)
    second.start({"lr": 0.1})
    log_steps(second, CHECKPOINT_AT + 1, 20)
    kill(second)
    tracking = run_second_attempt(store, "twice", [TensorBoard, MLFlow], state, "PREEMPTED")
    before = [(step, float(step)) for step in range(CHECKPOINT_AT + 1)]
    after = [(step, SECOND + step) for step in range(CHECKPOINT_AT + 1, END + 1)]
    assert tensorboard_points(tracking.run_folder) == before + after
    client = mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")
    run = client.get_run(tracking.run_ids["mlflow"])
    assert [step for step, _ in points_of(client, run.info.run_id)] == list(range(END + 1))
    assert (run.data.tags["accmt.attempt"], run.info.status) == ("3", "KILLED")
    assert run.data.tags["accmt.status"] == "PREEMPTED"
    assert steps_of(tracking.run_folder) == list(range(END + 1))


def test_a_resumed_run_whose_delivery_file_is_gone_is_still_one_curve(store):
    state = run_first_attempt(store, "gone", [TensorBoard, MLFlow])
    (store / "track" / "gone" / "delivery.json").unlink()
    tracking = run_second_attempt(store, "gone", [TensorBoard, MLFlow], state)
    assert [step for step, _ in tensorboard_points(tracking.run_folder)] == list(range(END + 1))
    client = mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")
    assert [step for step, _ in points_of(client, tracking.run_ids["mlflow"])] == list(range(END + 1))


def test_rows_that_a_killed_tracker_had_in_memory_are_delivered_again(store):
    """TensorBoard has them in its memory for two minutes; `delivery.json` says which it had written for good."""
    first = make([TensorBoard], store, run_name="in memory")
    first.start({"lr": 0.1})
    log_steps(first, 1, 3)
    wait_until(lambda: all(own.delivered == 4 for own in accounts_of(first.run_folder)))
    first._deliveries._running[0].tracker.writer.flush()
    state = json.loads(json.dumps(first.state_dict()))
    kill(first)
    history = History(first.run_folder)
    for step in range(4, 11):
        history.add_values({"loss": float(step)}, step)
    history.close()
    path = first.run_folder / DELIVERY_FILE
    delivery_file = json.loads(path.read_text())
    [account] = delivery_file["trackers"].values()
    account |= {"delivered": 11, "handed": 11, "settled": 4}
    path.write_text(json.dumps(delivery_file))
    second = make([TensorBoard], store, run_name="in memory")
    second.load_state_dict({**state, "line": 11, "step": 10})
    second.start({"lr": 0.1})
    log_steps(second, 11, 12)
    second.finish("FINISHED")
    assert tensorboard_points(second.run_folder) == [(step, float(step)) for step in range(1, 13)]


def test_a_users_own_tracker_gets_the_rows_after_the_checkpoint_again(store):
    state = run_first_attempt(store, "own", Faulty())
    tracker = Faulty()
    run_second_attempt(store, "own", tracker, state)
    assert tracker.steps == list(range(CHECKPOINT_AT + 1, END + 1))


def test_the_state_of_another_run_is_left_alone(store):
    state = run_first_attempt(store, "one", None)
    tracking = make(None, store, run_name="other")
    tracking.load_state_dict(state)
    tracking.start({})
    tracking.finish("FINISHED")
    assert ["rewind" in row for row in read_history(tracking.run_folder)] == [False, False]


KILLED_SCRIPT = """
import os, signal, sys, time
from accelerate.state import PartialState
from accmt.addons.trackers.spec import resolve_trackers
from accmt.tracking import Tracking
from accmt import MLFlow, TensorBoard
PartialState(cpu=True)
tracking = Tracking(resolve_trackers([TensorBoard, MLFlow]), track_name="track", run_name="killed",
                    logging_dir=sys.argv[1], tracker_kwargs={}, is_main_process=True, verbose=False)
tracking.start({"lr": 0.1})
for step in range(400):
    tracking.log({"loss": float(step)}, step)
    time.sleep(0.005)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_is_completed_and_ended_by_sync(store):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", KILLED_SCRIPT, str(store)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    folder = Path(store, "track", "killed")
    results = {result.tracker: result for result in sync_run(folder)}
    assert {name: (result.num_left, result.problem) for name, result in results.items()} == {
        "tensorboard": (0, None),
        "mlflow": (0, None),
    }
    expected = [(step, float(step)) for step in range(400)]
    assert tensorboard_points(folder) == expected
    client = mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")
    experiment = client.get_experiment_by_name("track").experiment_id
    (run,) = client.search_runs([experiment], "run_name = 'killed'")
    assert points_of(client, run.info.run_id) == expected
    assert run.info.status == "KILLED"
    assert read_history(folder)[-1]["status"] == "KILLED"


def test_a_new_run_in_the_folder_of_one_that_was_not_delivered_says_what_is_lost(store, caplog):
    state = run_first_attempt(store, "again", Faulty(lambda call, values: 1 / 0), waits=False)
    assert state["run_ids"] == {}
    tracker = Faulty()
    tracking = make(tracker, store, run_name="again")
    tracking.start({})
    log_steps(tracking, 0, 3)
    tracking.finish("FINISHED")
    assert tracker.steps == [0, 1, 2, 3]
    assert "18 rows of an earlier run" in "".join(warnings_of(caplog))
