"""Trackers that raise, sleep, go away, refuse, and come back: training goes on as before, and nothing is lost."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import mlflow
import pytest
from accelerate.state import PartialState
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE

from accmt import MLFlow
from accmt.addons.sync import sync_run
from accmt.errors import ArgumentError
from accmt.tracking.history import HISTORY_FILE, History
from tests.faults.tracking import Faulty, log_steps, make, points_of, steps_of, wait_until, warnings_of
from tests.raising import raises_at


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


@contextmanager
def waits_of(tracking):
    """Note how long each tracker is waited for; what has its time in it may be waited for in several parts."""
    waits = []
    for delivery in tracking._deliveries._running:
        parts = []
        delivery.join = lambda timeout_s, join=delivery.join, parts=parts: parts.append(timeout_s) or join(timeout_s)
        waits.append(parts)
    longest = []
    yield longest
    longest += [max(parts) for parts in waits]


def test_a_tracker_that_always_raises_ends_with_one_warning_and_what_is_left(tmp_path, caplog):
    def fault(call, values):
        raise RuntimeError("always")

    tracker = Faulty(fault)
    tracking = make(tracker, tmp_path)
    tracking.start({})
    log_steps(tracking, 1, 50)
    wait_until(lambda: warnings_of(caplog))
    with waits_of(tracking) as waits:
        tracking.finish("FINISHED", flush_s=1.0)
    assert max(waits) <= 1.0, "the end of the run waits no longer than it was told to"
    during, after = warnings_of(caplog)
    assert "RuntimeError: always" in during
    assert "50 rows not delivered (RuntimeError: always)" in after
    assert f"{tmp_path}/track/run/history.jsonl has them" in after
    assert tracker.is_finished
    assert steps_of(tmp_path / "track" / "run") == list(range(1, 51))


def test_a_slow_tracker_holds_up_neither_training_nor_other_trackers_nor_the_end(tmp_path, caplog):
    gate = threading.Event()
    slow, quick = Faulty(lambda call, values: call < 4 or gate.wait(), name="slow"), Faulty(name="quick")
    tracking = make([slow, quick], tmp_path)
    tracking.start({})
    log_steps(tracking, 1, 100)  # does not return where training, or another tracker, waits for the gate
    wait_until(lambda: len(quick.steps) == 100 and slow.num_calls == 4)
    with waits_of(tracking) as waits:
        tracking.finish("FINISHED", flush_s=0.5)
    assert max(waits) <= 0.5
    assert quick.steps == list(range(1, 101))
    assert slow.steps == [1, 2, 3]
    gate.set()
    (warning,) = warnings_of(caplog)
    assert "the tracker slow\n  got: 97 rows not delivered" in warning
    wait_until(lambda: "accmt-slow" not in {thread.name for thread in threading.enumerate()})
    assert slow.is_finished


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, ValueError])
def test_rows_logged_while_a_tracker_is_down_reach_it_in_order(tmp_path, caplog, error):
    caplog.set_level("INFO", logger="accmt")

    def fault(call, values):
        if 10 <= call <= 25:
            raise error("down")

    tracker = Faulty(fault)
    tracking = make(tracker, tmp_path)
    tracking.start({})
    log_steps(tracking, 1, 300)
    tracking.finish("FINISHED")
    assert sorted(tracker.steps) == list(range(1, 301))
    if error is ConnectionError:
        assert tracker.steps == list(range(1, 301))
    assert len(warnings_of(caplog)) == 1
    assert len([message for message in caplog.messages if "accepts rows again" in message]) == 1


def test_a_row_refused_for_its_content_is_skipped_and_said(tmp_path, caplog):
    def fault(call, values):
        if "a long name" in values:
            raise ValueError("name too long")

    tracker = Faulty(fault)
    tracking = make(tracker, tmp_path)
    tracking.start({})
    for step in range(1, 11):
        tracking.log({"a long name" if step in (4, 7) else "loss": 1.0}, step)
    tracking.finish("FINISHED")
    assert tracker.steps == [1, 2, 3, 5, 6, 8, 9, 10]
    said = "\n".join(warnings_of(caplog))
    assert "the row at step 4 was rejected: ValueError: name too long" in said
    assert "2 rejected rows" in said
    assert "left" not in said


@pytest.mark.parametrize("refused", [1, 5, 8])
def test_of_a_batch_with_one_row_that_is_refused_all_others_arrive(store, monkeypatch, caplog, refused):
    """MLflow gets many rows in one call, and refuses the call: that says nothing about its first row."""
    sizes, log_batch = [], mlflow.MlflowClient.log_batch

    def refuse(self, run_id, metrics=(), **kwargs):
        sizes.append(len(metrics))
        if refused in [metric.step for metric in metrics]:
            raise mlflow.exceptions.MlflowException("no", error_code=INVALID_PARAMETER_VALUE)
        return log_batch(self, run_id, metrics=metrics, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refuse)
    tracking = make(MLFlow, store, run_name=f"refuses {refused}")
    tracking.start({})
    log_steps(tracking, 1, 8)
    run_id = tracking.run_ids["mlflow"]
    tracking.finish("FINISHED")
    points = points_of(mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db"), run_id)
    assert [step for step, _ in points] == [step for step in range(1, 9) if step != refused]
    assert max(sizes) > 1, "there was a batch"
    (warning,) = warnings_of(caplog)
    assert f"the row at step {refused} was rejected" in warning


def test_the_training_thread_calls_no_tracker_and_waits_for_none(tmp_path, monkeypatch):
    """A row costs it a line of the history, and that there are rows, once for each tracker."""
    training, callers, waits = threading.current_thread(), set(), []

    def note(call, values):
        callers.add(threading.current_thread())
        raise ConnectionError("down")

    def cost_of(*trackers, name):
        tracking = make(list(trackers), tmp_path, run_name=name)
        tracking.start({})
        lines = tracking._history.num_lines
        with monkeypatch.context() as patch:
            wait, acquire = threading.Condition.wait, time.sleep
            patch.setattr(
                threading.Condition, "wait", lambda *args: waits.append(threading.current_thread()) or wait(*args)
            )
            patch.setattr(time, "sleep", lambda s: waits.append(threading.current_thread()) or acquire(s))
            for step in range(200):
                tracking.log({"loss": 1.0, "lr": 0.1, "norm": 2.0}, step)
        logged = tracking._history.num_lines - lines
        wait_until(lambda: not trackers or callers)
        tracking.finish("FINISHED", flush_s=0.2)
        return logged

    assert cost_of(name="plain") == cost_of(Faulty(note, "one"), Faulty(note, "two"), name="faulty") == 200
    assert callers
    assert training not in callers
    assert training not in waits


@contextmanager
def full_disk(size):
    """Let no file grow beyond `size` bytes, as on a full disk: a part of a line may still fit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_one_warning_and_no_row(tmp_path, caplog):
    tracker = Faulty()
    tracking = make(tracker, tmp_path)
    tracking.start({"text": "x" * 20_000})
    wait_until(lambda: tracking._deliveries._running[0].account.delivered == 1)
    path = tracking.run_folder / HISTORY_FILE
    with full_disk(path.stat().st_size + 100):
        log_steps(tracking, 1, 50)
        wait_until(lambda: len(tracker.steps) == 50)
        assert len(steps_of(tracking.run_folder)) < 3
    log_steps(tracking, 51, 60)
    assert steps_of(tracking.run_folder) == list(range(1, 61))
    tracking.finish("FINISHED")
    assert tracker.steps == list(range(1, 61))
    (warning,) = warnings_of(caplog)
    assert "10,000 rows are kept in memory" in warning


def test_memory_is_bounded_on_a_disk_that_stays_full(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("accmt.tracking.history.MAX_UNWRITTEN", 5)
    history = History(tmp_path)
    history.add_config({"text": "x" * 20_000})
    with full_disk(history.path.stat().st_size):
        for step in range(8):
            history.add_values({"loss": 1.0}, step)
        assert history.num_lines == 6
    history.close()
    assert steps_of(tmp_path) == [0, 1, 2, 3, 4]
    assert "3 rows could not be written" in warnings_of(caplog)[-1]


@contextmanager
def server(folder, port):
    """A real MLflow server on a store in `folder`; it is killed at the end."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder)]
    with (folder / "server.log").open("w") as log:
        # Without its queue of jobs the server is one process instead of many, each of which imports all of MLflow.
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment, start_new_session=True)
    try:
        wait_until(lambda: is_listening(port), 60)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def is_listening(port):
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0


def free_port():
    with socket.socket() as connection:
        connection.bind(("127.0.0.1", 0))
        return connection.getsockname()[1]


@pytest.mark.slow
def test_a_real_server_that_comes_late_is_killed_and_started_again_gets_every_row_in_order(store, caplog):
    caplog.set_level("INFO", logger="accmt")
    port = free_port()
    late = f"127.0.0.1:{port}"
    never = make(MLFlow, late, run_name="never")
    never.start({"lr": 0.1})
    log_steps(never, 1, 20)
    never.finish("FAILED", flush_s=0.5)
    (nothing,) = sync_run(never.run_folder, timeout_s=1)
    assert (nothing.num_delivered, nothing.num_left) == (0, 20)
    assert "127.0.0.1" in nothing.problem

    caplog.clear()
    tracking = make(MLFlow, late)
    tracking.start({"lr": 0.1})
    log_steps(tracking, 1, 50)
    with server(store, port):
        wait_until(lambda: tracking._deliveries._running[0].account.delivered > 50)
        log_steps(tracking, 51, 100, pause_s=0.01)
    log_steps(tracking, 101, 300, pause_s=0.01)
    wait_until(lambda: len(warnings_of(caplog)) == 2)
    with server(store, port):
        log_steps(tracking, 301, 400)
        tracking.finish("FINISHED")
        (synced,) = sync_run(never.run_folder)
        (again,) = sync_run(never.run_folder)
        client = mlflow.MlflowClient(f"http://{late}")
        experiment = client.get_experiment_by_name("track").experiment_id
        runs = [run for run in client.search_runs([experiment]) if run.info.run_name in ("run", "never")]
        points = {run.info.run_name: points_of(client, run.info.run_id) for run in runs}
    assert points["run"] == [(step, float(step)) for step in range(1, 401)]
    assert points["never"] == points["run"][:20]
    assert {run.info.run_name: run.info.status for run in runs} == {"run": "FINISHED", "never": "FAILED"}
    assert [run.data.params for run in runs] == [{"lr": "0.1"}] * 2
    assert len([message for message in caplog.messages if "accepts rows again" in message]) == 2
    assert (synced.num_delivered, synced.num_left, synced.problem) == (20, 0, None)
    assert (again.num_delivered, again.num_left, again.problem) == (0, 0, None)


def test_a_folder_of_a_run_that_is_going_on_or_of_no_run_is_not_synced(tmp_path):
    with raises_at(ArgumentError, "accmt sync", str(tmp_path), expected="history.jsonl"):
        sync_run(tmp_path)
    tracking = make(None, tmp_path)
    tracking.start({})
    with raises_at(ArgumentError, "accmt sync", str(tracking.run_folder), "running"):
        sync_run(tracking.run_folder)
    tracking.finish("FINISHED")
    assert sync_run(tracking.run_folder) == []
