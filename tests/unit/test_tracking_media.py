"""Images, tables and files: complete in the run folder first, then in the trackers, through outages and kills."""

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import mlflow
import numpy as np
import pytest
from accelerate.state import PartialState
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from accmt import MLFlow, TensorBoard
from accmt.addons.sync import sync_run
from accmt.errors import ArgumentError, DataError
from accmt.tracking import read_history
from accmt.tracking.values import Media
from tests.faults.tracking import Faulty, kill, log_steps, make, tensorboard_points, wait_until, warnings_of
from tests.raising import raises_at

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*noload.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*'str' dtypes are:DeprecationWarning"),  # MLflow, when it looks at a table
]

PIXELS = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
COLUMNS, ROWS = ["text", "p"], [["a", 0.5], ["b", None]]


class Keeping(Faulty):
    """A user's own tracker with a place for everything; `refuse(kind)` may raise."""

    def __init__(self, refuse=lambda kind: None):
        super().__init__()
        self.refuse = refuse
        self.kept = []

    def keep(self, kind, *what):
        self.refuse(kind)
        self.kept.append((kind, *what))

    def log_images(self, values, step):
        self.keep("images", {name: [image.size for image in images] for name, images in values.items()}, step)

    def log_table(self, name, columns, data, step):
        self.keep("table", name, columns, data, step)

    def log_artifact(self, path):
        self.keep("file", Path(path).name, Path(path).read_text())

    def log_artifacts(self, path, artifact_path):
        self.keep("files", artifact_path, sorted(file.name for file in Path(path).iterdir()))


EVERYTHING = [
    ("images", {"val/samples": [(5, 4), (5, 4)]}, 3),
    ("table", "predictions", COLUMNS, ROWS, 3),
    ("file", "note.txt", "a note"),
    ("files", "plots", ["curve.txt"]),
]


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("accmt.messages._said", set())
    PartialState(cpu=True)


@pytest.fixture(autouse=True)
def _until_threads_end(_no_leaks):
    yield
    wait_until(lambda: not any(thread.name.startswith("accmt-") for thread in threading.enumerate()))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One MLflow database for the tests of this file: making one takes seconds."""
    return tmp_path_factory.mktemp("media")


def start(log_with, folder, run_name="run", **options):
    tracking = make(log_with, folder, run_name=run_name, **options)
    tracking.start({"lr": 0.1})
    return tracking


def log_everything(tracking, step=3):
    Path("note.txt").write_text("a note")
    Path("plots").mkdir(exist_ok=True)
    Path("plots/curve.txt").write_text("a curve")
    tracking.media.log_images({"val/samples": PIXELS}, step)
    tracking.media.log_table("predictions", COLUMNS, ROWS, step)
    tracking.media.log_artifact("note.txt", step)
    tracking.media.log_artifacts("plots", step)


def media_of(folder):
    return [Media.of_line(folder, line) for line in read_history(folder) if "media" in line]


def image_steps(folder, tag="val/samples/0"):
    return [event.step for event in EventAccumulator(str(folder), size_guidance={"images": 0}).Reload().Images(tag)]


class Store:
    """What MLflow has of a run."""

    def __init__(self, folder, tracking):
        self.client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
        self.run_id = tracking.run_ids["mlflow"]

    def files(self, folder):
        return sorted(file.path for file in self.client.list_artifacts(self.run_id, folder))

    def images(self):
        return [path.split("+timestamp")[0] for path in self.files("images") if path.endswith(".png")]

    def read(self, path, folder):
        return Path(self.client.download_artifacts(self.run_id, path, str(folder)))


def test_everything_is_in_the_run_folder_before_a_call_returns(tmp_path):
    tracking = start(None, tmp_path)
    log_everything(tracking)
    Path("note.txt").unlink()
    Path("plots/curve.txt").write_text("changed afterwards")
    images, table, file, files = media_of(tracking.run_folder)
    assert {name: np.asarray(image).tolist() for name, image in images.images().items()} == {
        "val/samples/0": PIXELS[0].tolist(),
        "val/samples/1": PIXELS[1].tolist(),
    }
    assert table.table() == (COLUMNS, ROWS)
    assert file.path.read_text() == "a note"
    assert (files.path / "curve.txt").read_text() == "a curve"
    assert {one.step for one in (images, table, file, files)} == {3}
    assert images.folder == tracking.run_folder / "media" / "val_samples" / "00000003"
    tracking.finish("FINISHED")
    assert tracking.media is None


def test_what_has_the_same_name_and_step_has_a_folder_of_its_own(tmp_path):
    tracking = start(None, tmp_path)
    for number in range(3):
        tracking.media.log_table("a b/c", ["n"], [[number]], 7)
    tracking.finish("FINISHED")
    assert [one.table()[1] for one in media_of(tracking.run_folder)] == [[[0]], [[1]], [[2]]]
    folders = [one.folder.relative_to(tracking.run_folder) for one in media_of(tracking.run_folder)]
    assert folders == [Path(f"media/a b_c/0000000{name}") for name in ("7", "7-2", "7-3")]


def test_trackers_get_what_they_have_a_place_for_and_say_once_what_they_have_none_for(store, tmp_path, caplog):
    own = Keeping()
    tracking = start([TensorBoard, MLFlow, own], store, "all")
    log_everything(tracking)
    log_everything(tracking, 5)
    log_steps(tracking, 3, 6)
    tracking.finish("FINISHED")

    assert image_steps(tracking.run_folder) == image_steps(tracking.run_folder, "val/samples/1") == [3, 5]
    events = EventAccumulator(str(tracking.run_folder)).Reload()
    image = tmp_path / "image.png"
    image.write_bytes(events.Images("val/samples/1")[0].encoded_image_string)
    np.testing.assert_array_equal(np.asarray(Image.open(image)), PIXELS[1])
    assert [step for step, _ in tensorboard_points(tracking.run_folder)] == [3, 4, 5, 6]

    there = Store(store, tracking)
    assert there.images() == [f"images/val~samples~{n}+step+{step}" for n in (0, 1) for step in (3, 5)]
    first = next(path for path in there.files("images") if path.endswith(".png"))
    np.testing.assert_array_equal(np.asarray(Image.open(there.read(first, tmp_path))), PIXELS[0])
    experiment = there.client.get_experiment_by_name("track").experiment_id
    table = there.client.load_table(experiment, "tables/predictions/00000003.json", [there.run_id])
    assert table["text"].tolist() == ["a", "b"]
    assert (table["p"][0], bool(table["p"].isna()[1])) == (0.5, True)
    assert there.read("note.txt", tmp_path).read_text() == "a note"
    assert there.read("plots/curve.txt", tmp_path).read_text() == "a curve"

    assert own.kept[:4] == EVERYTHING
    assert own.steps == [3, 4, 5, 6]

    table_warning, file_warning = warnings_of(caplog)
    assert "the tracker tensorboard\n  got: a table, which it does not support" in table_warning
    assert "the tracker tensorboard\n  got: files, which it does not support" in file_warning
    assert f"the files are in {tracking.run_folder}/media" in table_warning


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError])
def test_an_outage_delays_and_loses_nothing(tmp_path, error, caplog):
    failures = iter(range(8 if error is ConnectionError else 4))

    def refuse(kind):
        if next(failures, None) is not None:
            raise error("down")

    own = Keeping(refuse)
    tracking = start(own, tmp_path)
    log_everything(tracking)
    log_steps(tracking, 4, 9)
    tracking.finish("FINISHED")
    assert own.kept == EVERYTHING
    assert own.steps == [4, 5, 6, 7, 8, 9]
    assert "refused" not in caplog.text


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_a_tracker_refuses_for_good_is_skipped_and_said(tmp_path, is_alone, caplog):
    def refuse(kind):
        if kind in ("images", "file"):
            raise TypeError("not like that")

    own = Keeping(refuse)
    tracking = start(own, tmp_path)
    log_everything(tracking)
    if not is_alone:
        log_steps(tracking, 4, 6)
    tracking.finish("FINISHED")
    assert [kind for kind, *_ in own.kept] == ["table", "files"]
    assert own.steps == ([] if is_alone else [4, 5, 6])
    warnings = "\n".join(warnings_of(caplog))
    assert "'val/samples' (images) at step 3 was rejected: TypeError: not like that" in warnings
    assert "2 rejected rows" in warnings
    assert "left" not in warnings


def test_a_file_that_is_damaged_holds_up_nothing(tmp_path, caplog):
    own = Keeping(lambda kind: None)
    own.fault = lambda call, values: wait_until(lambda: is_damaged.is_set())
    is_damaged = threading.Event()
    tracking = start(own, tmp_path)
    log_steps(tracking, 1, 1)  # holds the thread until the file is damaged
    log_everything(tracking)
    log_steps(tracking, 4, 6)
    images, table, *_ = media_of(tracking.run_folder)
    (images.folder / "0.png").write_bytes(b"")
    (table.folder / "table.json").unlink()
    with raises_at(DataError, "table.json"):
        table.table()
    is_damaged.set()
    tracking.finish("FINISHED")
    assert [kind for kind, *_ in own.kept] == ["file", "files"]
    assert own.steps == [1, 4, 5, 6]
    assert "DataError" in "\n".join(warnings_of(caplog))


def test_sync_delivers_what_a_server_that_was_down_has_not_got(store):
    tracking = start(MLFlow, "127.0.0.1:9", "late", offline=True)
    log_everything(tracking)
    tracking.finish("FINISHED")
    delivery_file = tracking.run_folder / "delivery.json"
    content = json.loads(delivery_file.read_text())
    content["trackers"]["mlflow"]["server"] = f"sqlite:///{store}/mlflow.db"  # the server is there now
    delivery_file.write_text(json.dumps(content))
    (synced,) = sync_run(tracking.run_folder)
    assert (synced.num_delivered, synced.num_left, synced.problem) == (4, 0, None)
    run_id = json.loads(delivery_file.read_text())["trackers"]["mlflow"]["run_id"]
    paths = [file.path for file in mlflow.MlflowClient(f"sqlite:///{store}/mlflow.db").list_artifacts(run_id)]
    assert sorted(paths) == ["images", "note.txt", "plots", "tables"]


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from accelerate.state import PartialState
from tests.faults.tracking import make
PartialState(cpu=True)
tracking = make(["tensorboard"], sys.argv[1], run_name="killed")
tracking.start({})
for step in range(20):
    tracking.log({"loss": float(step)}, step)
    tracking.media.log_images({"samples": np.full((4, 5, 3), step, np.uint8)}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_sync_delivers_what_a_kill_left(tmp_path):
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, capture_output=True, check=False)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    folder = tmp_path / "track" / "killed"
    (synced,) = sync_run(folder)
    assert (synced.num_left, synced.problem) == (0, None)
    assert sorted(set(image_steps(folder, "samples"))) == list(range(20))
    assert not list(folder.glob("media/**/.tmp-*"))


def test_a_resumed_run_has_each_image_and_table_once(store, tmp_path):
    first = start([TensorBoard, MLFlow], store, "resumed")
    for step in (1, 2, 3):
        first.media.log_images({"val/samples": PIXELS}, step)
        first.media.log_table("predictions", ["attempt"], [[1]], step)
        if step == 1:
            state = first.state_dict()
    wait_until(lambda: all(one.account.delivered == 7 for one in first._deliveries._running))
    state["run_ids"] = first.run_ids
    kill(first)
    second = make([TensorBoard, MLFlow], store, run_name="resumed")
    second.load_state_dict(state)
    second.start({"lr": 0.1})
    for step in (2, 3, 4):
        second.media.log_images({"val/samples": PIXELS}, step)
        second.media.log_table("predictions", ["attempt"], [[2]], step)
        Path("note.txt").write_text(f"of step {step}, attempt 2")
        second.media.log_artifact("note.txt", step)
    second.finish("FINISHED")
    assert image_steps(second.run_folder) == [1, 2, 3, 4]
    there = Store(store, second)
    assert there.images() == [f"images/val~samples~{n}+step+{step}" for n in (0, 1) for step in (1, 2, 3, 4)]
    tables = [there.read(path, tmp_path) for path in there.files("tables/predictions")]
    assert [json.loads(path.read_text())["data"] for path in tables] == [
        [[1]],
        [[1]],
        [[1]],
        [[2]],
    ]  # MLflow keeps what the killed attempt logged
    assert there.read("note.txt", tmp_path).read_text() == "of step 4, attempt 2"
    counted = [(one.kind, one.step) for one in media_of(second.run_folder) if one.kind == "images"]
    assert counted == [("images", step) for step in (1, 2, 3, 4)]


def test_without_room_on_the_disk_there_is_one_warning_and_training_goes_on(tmp_path, caplog):
    own = Keeping()
    tracking = start(own, tmp_path)
    (tracking.run_folder / "media").write_text("a file, where the folder should be")
    log_everything(tracking)
    tracking.log({"loss": 1.0}, 4)
    tracking.finish("FINISHED")
    (warning,) = warnings_of(caplog)
    assert "logging 'val/samples' at step 3" in warning
    assert "training continues, and this is not logged" in warning
    assert (own.kept, own.steps) == ([], [4])


@pytest.mark.parametrize(
    ("call", "where", "got"),
    [
        (lambda log: log.log_images(PIXELS, 1), "log_images", "ndarray"),
        (lambda log: log.log_images({"samples": "x"}, 1), "log_images({'samples'", "str"),
        (lambda log: log.log_images({" ": PIXELS}, 1), "log_images", "the name ' '"),
        (lambda log: log.log_images({"samples": PIXELS}, -1), "log_images", "step=-1"),
        (lambda log: log.log_table("t", ["a"], [[1]], 1.0), "log_table", "step=1.0"),
        (lambda log: log.log_table(3, ["a"], [[1]], 1), "log_table", "the name 3"),
        (lambda log: log.log_table("t", ["a", "b"], [[1, 2], [1]], 1), "('t', ...)", "1 cells in row 1 for 2 columns"),
        (lambda log: log.log_table("t", ["a", "a"], [[1, 2]], 1), "log_table('t', ...)", "columns=['a', 'a']"),
        (lambda log: log.log_table("t", "ab", [[1, 2]], 1), "log_table('t', ...)", "2 cells in row 0 for 1 columns"),
        (lambda log: log.log_table("t", [], [], 1), "log_table('t', ...)", "columns=[]"),
        (lambda log: log.log_artifact("missing.txt", 1), "log_artifact('missing.txt')", "no such file"),
        (lambda log: log.log_artifact(".", 1), "log_artifact('.')", "a folder"),
        (lambda log: log.log_artifacts("missing", 1), "log_artifacts('missing')", "no such folder"),
        (lambda log: log.log_artifacts(__file__, 1), f"log_artifacts('{__file__}')", "a file"),
        (lambda log: log.log_artifacts(".", 1), "log_artifacts('.')", "contains the run folder"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(tmp_path, call, where, got):
    tracking = start(None, tmp_path)
    try:
        with raises_at(ArgumentError, where, got):
            call(tracking.media)
        assert not (tracking.run_folder / "media").exists()
    finally:
        tracking.finish("FAILED")
