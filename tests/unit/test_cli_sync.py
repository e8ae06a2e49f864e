"""`accmt sync`: rows that a tracker has not got, of runs that were killed, held back, still running, or are no runs."""

from __future__ import annotations

import threading

import mlflow
import pytest
from accelerate.state import PartialState

from accmt import MLFlow, TensorBoard
from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.addons.trackers.spec import resolve_trackers
from accmt.cli.main import main
from accmt.tracking import Tracking
from tests.faults.tracking import Faulty, kill, points_of, tensorboard_points, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    PartialState(cpu=True)


@pytest.fixture(autouse=True)
def _until_threads_end(_no_leaks):
    """Let threads that are in the middle of a refused call come back from it."""
    yield
    wait_until(lambda: not any(thread.name.startswith("accmt-") for thread in threading.enumerate()))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One MLflow database for the tests of this file: making one takes seconds."""
    return tmp_path_factory.mktemp("sync")


def start(log_with, logging_dir, run_name="run", *, offline="auto"):
    tracking = Tracking(
        resolve_trackers(log_with),
        track_name="track",
        run_name=run_name,
        logging_dir=logging_dir,
        tracker_kwargs={},
        is_main_process=True,
        verbose=False,
        offline=offline,
    )
    tracking.start({"lr": 0.1})
    for step in (1, 2, 3):
        tracking.log({"loss": float(step)}, step)
    return tracking


def sync(capsys, folder, *arguments):
    capsys.readouterr()
    exit_code = main(["sync", str(folder), *arguments])
    return exit_code, capsys.readouterr()


def test_a_killed_run_gets_its_rows_and_its_true_status(store, capsys):
    tracking = start([TensorBoard, MLFlow], store, "killed")
    kill(tracking)
    left = {key: account.delivered for key, account in DeliveryFile.read(tracking.run_folder).accounts.items()}
    assert set(left.values()) == {0}
    exit_code, printed = sync(capsys, tracking.run_folder)
    assert exit_code == 0
    assert printed.out.splitlines() == [
        "tensorboard: 3 rows delivered, 0 left",
        "mlflow: 3 rows delivered, 0 left",
    ]
    points = [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert tensorboard_points(tracking.run_folder) == points
    client = mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db")
    run_id = DeliveryFile.read(tracking.run_folder).accounts["mlflow"].run_id
    assert points_of(client, run_id) == points
    assert client.get_run(run_id).info.status == "KILLED"


def test_a_run_that_is_complete_is_left_alone(store, capsys):
    tracking = start(TensorBoard, store, "complete")
    tracking.finish("FINISHED")
    before = {path: path.read_bytes() for path in tracking.run_folder.iterdir()}
    exit_code, printed = sync(capsys, tracking.run_folder)
    assert (exit_code, printed.out) == (0, "tensorboard: 0 rows delivered, 0 left\n")
    assert {path: path.read_bytes() for path in tracking.run_folder.iterdir()} == before


def test_a_server_that_is_still_down_is_told_and_is_no_success(capsys):
    tracking = start(MLFlow, "127.0.0.1:9", offline=True)
    tracking.finish("FINISHED")
    exit_code, printed = sync(capsys, tracking.run_folder, "--timeout", "20")
    assert exit_code == 1
    assert printed.out.startswith("mlflow: 0 rows delivered, 3 left (")


def test_a_users_own_tracker_is_told(store, capsys):
    def refuse(call, values):
        raise ConnectionError

    tracking = start(Faulty(refuse), store, "own")
    tracking.finish("FINISHED", flush_s=0.2)
    exit_code, printed = sync(capsys, tracking.run_folder)
    assert exit_code == 1
    expected = "faulty: 0 rows delivered, 3 left (a custom tracker, which only a run can start)\n"
    assert printed.out == expected


def test_a_run_that_is_going_on_delivers_by_itself(store, capsys):
    tracking = start(TensorBoard, store, "going")
    exit_code, printed = sync(capsys, tracking.run_folder)
    tracking.finish("FINISHED")
    assert (exit_code, printed.out) == (2, "")
    assert "which is still running" in printed.err
