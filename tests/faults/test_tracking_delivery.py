"""Trackers that raise, sleep, go away, refuse, and come back: training goes on as before, and nothing is lost."""

import os
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import mlflow
import pytest
from accelerate.state import PartialState

from accmt.errors import ArgumentError
from accmt.tracking import MLFlow, sync_run
from accmt.tracking.history import HISTORY_FILE, History
from tests.faults.tracking import Faulty, log_steps, make, points_of, steps_of, wait_until, warnings_of


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


def test_a_tracker_that_always_raises_ends_with_one_warning_and_what_is_left(tmp_path, caplog):
    def fault(call, values):
        raise RuntimeError("always")

    tracker = Faulty(fault)
    tracking = make(tracker, tmp_path)
    tracking.start({})
    log_steps(tracking, 1, 50)
    wait_until(lambda: warnings_of(caplog))
    began = time.monotonic()
    tracking.finish("FINISHED", flush_s=1.0)
    assert time.monotonic() - began < 3
    during, after = warnings_of(caplog)
    assert "RuntimeError: always" in during
    assert "50 rows left (RuntimeError: always)" in after
    assert f"{tmp_path}/track/run/history.jsonl has them" in after
    assert tracker.is_finished
    assert steps_of(tmp_path / "track" / "run") == list(range(1, 51))


def test_a_slow_tracker_holds_up_neither_training_nor_other_trackers_nor_the_end(tmp_path, caplog):
    slow, quick = Faulty(lambda call, values: time.sleep(0.5), name="slow"), Faulty(name="quick")
    tracking = make([slow, quick], tmp_path)
    tracking.start({})
    began = time.monotonic()
    log_steps(tracking, 1, 100)
    assert time.monotonic() - began < 0.4
    wait_until(lambda: len(quick.steps) == 100)
    tracking.finish("FINISHED", flush_s=2.0)
    assert time.monotonic() - began < 7
    assert quick.steps == list(range(1, 101))
    assert 0 < len(slow.steps) < 20
    assert slow.steps == list(range(1, len(slow.steps) + 1))
    (warning,) = warnings_of(caplog)
    assert f"the tracker slow\n  got: {100 - len(slow.steps)} rows left" in warning
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
    assert len([message for message in caplog.messages if "takes rows again" in message]) == 1


def test_a_row_refused_for_its_content_is_passed_over_and_said(tmp_path, caplog):
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
    assert "the row of step 4 was refused: ValueError: name too long" in said
    assert "2 rows were refused" in said
    assert "left" not in said


def test_the_step_time_stays_the_same_with_any_tracker(tmp_path):
    def raising(call, values):
        raise ConnectionError("down")

    def median_cost(*trackers, name):
        tracking = make(list(trackers), tmp_path, run_name=name)
        tracking.start({})
        costs = []
        for step in range(1500):
            began = time.perf_counter()
            tracking.log({"loss": 1.0, "lr": 0.1, "norm": 2.0}, step)
            costs.append(time.perf_counter() - began)
            time.sleep(0.001)
        tracking.finish("FINISHED", flush_s=0.2)
        return statistics.median(costs)

    plain = median_cost(name="plain")
    faulty = median_cost(
        Faulty(raising, "raising"), Faulty(lambda call, values: time.sleep(0.3), "sleeping"), name="faulty"
    )
    assert plain < 200e-6
    assert faulty < plain + 50e-6
    time.sleep(0.4)  # the call that sleeps ends by itself


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
    wait_until(lambda: tracking._deliveries[0].account.delivered == 1)
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
    assert "3 rows that were never written" in warnings_of(caplog)[-1]


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
        wait_until(lambda: tracking._deliveries[0].account.delivered > 50)
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
    assert len([message for message in caplog.messages if "takes rows again" in message]) == 2
    assert (synced.num_delivered, synced.num_left, synced.problem) == (20, 0, None)
    assert (again.num_delivered, again.num_left, again.problem) == (0, 0, None)


def test_a_folder_of_a_run_that_is_going_on_or_of_no_run_is_not_synced(tmp_path):
    with pytest.raises(ArgumentError, match=r"history\.jsonl and delivery\.json"):
        sync_run(tmp_path)
    tracking = make(None, tmp_path)
    tracking.start({})
    with pytest.raises(ArgumentError, match="going on"):
        sync_run(tracking.run_folder)
    tracking.finish("FINISHED")
    assert sync_run(tracking.run_folder) == []
