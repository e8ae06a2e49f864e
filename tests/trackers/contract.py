"""What a run promises in every tracker; a class for each reads back what its tracker kept."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from accelerate.state import PartialState

from accmt.addons.sync import sync_run
from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.errors import TrackerError
from accmt.tracking import Tracking, read_history
from tests.toys import Linear, make_points, make_trainer
from tests.trackers.killed import CHECKPOINT_AT, KILLED_AT, make
from tests.trackers.unreachable import FLUSH_S as FLUSH_OF_UNREACHABLE_S

END = 25
SECOND = 100.0  # added to the values of the second attempt
FLUSH_S = 120.0  # on a busy machine
KINDS = {"images": "images", "table": "a table", "artifact": "files"}
STATUSES = ("FINISHED", "FAILED", "KILLED", "PREEMPTED")

Points = list[tuple[int, float]]

MEDIA = {
    "images": {"val/samples": 2, "one": 1},
    "table": [["a", 0.5], ["b", None]],
    "artifact": {"note.txt", "plots"},
}
"""How many images there are of each name, the rows of the table, and the names of files and folders."""


def log_media(tracking: Tracking, folder: Path) -> None:
    """Log what `MEDIA` tells of, at step 3."""
    log, pixels = tracking.media, np.zeros((2, 4, 5, 3), np.uint8)
    log.log_images({"val/samples": pixels, "one": pixels[0, :, :, 0]}, 3)
    log.log_table("predictions", ["text", "p"], [["a", 0.5], ["b", None]], 3)
    (folder / "note.txt").write_text("a note")
    (folder / "plots").mkdir()
    (folder / "plots" / "curve.txt").write_text("a curve")
    log.log_artifact(folder / "note.txt", 3)
    log.log_artifacts(folder / "plots", 3)


def run_on_a_terminal(module: str, *arguments: str, timeout_s: float) -> tuple[int, str]:
    """Run a module on a terminal, on which it may ask questions and gets no answer.

    Returns:
        The exit status, and what it wrote.
    """
    # wandb's own process serves the children of a process too, and would outlive the kill.
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    ours, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=its,
        stdout=its,
        stderr=its,
    )
    os.close(its)
    written: list[bytes] = []
    reader = threading.Thread(target=_read_to_the_end, args=(ours, written), daemon=True)
    reader.start()
    try:
        status = process.wait(timeout_s)
    finally:
        process.kill()
        reader.join(1.0)  # processes that it left behind may hold the terminal
    return status, b"".join(written)[-20_000:].decode(errors="replace")


def _read_to_the_end(terminal: int, written: list[bytes]) -> None:
    try:
        while part := os.read(terminal, 4096):
            written.append(part)
    except OSError:  # how Linux says that nobody has the other side any more
        pass


class TrackerContract:
    """Tests that hold for each tracker.

    Attributes:
        kind: The class that `log_with` takes.
        replaces: Whether points of the second attempt take the place of those of a killed one.
        statuses: What the tracker shows for each ending.
        has_key_of_its_own: Whether it has a service that wants a key.
        keeps_nan: Whether it has a point for a value that is no number.
        kinds: What it has a place for besides numbers.
        switch: A variable and its value, or a keyword and its value, by which a user has it leave its service alone.
        leaves: Variables that it may leave behind in the environment.
    """

    # The packages' own; warnings are errors otherwise.
    pytestmark: Any = [
        pytest.mark.filterwarnings("ignore::ResourceWarning"),
        pytest.mark.filterwarnings("ignore::DeprecationWarning"),
        pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
    ]
    kind: ClassVar[type]
    replaces: ClassVar[bool] = False
    statuses: ClassVar[Mapping[str, Any]] = dict(zip(STATUSES, STATUSES, strict=True))
    has_key_of_its_own: ClassVar[bool] = True
    keeps_nan: ClassVar[bool] = True
    kinds: ClassVar[tuple[str, ...]] = tuple(KINDS)
    switch: ClassVar[Mapping[str, Any]] = {}
    leaves: ClassVar[frozenset[str]] = frozenset()

    def points(self, tracking: Tracking, name: str = "loss") -> Points:
        """Return the points of a curve of the whole run, by step."""
        raise NotImplementedError

    def config(self, tracking: Tracking) -> Mapping[str, Any]:
        """Return the configuration of the run, or of its last attempt."""
        raise NotImplementedError

    def status(self, tracking: Tracking) -> Any:
        """Return how the run ended."""
        raise NotImplementedError

    def media(self, tracking: Tracking, kind: str) -> Any:
        """Return what the tracker has of a kind: shapes of images by name, rows of a table, names of artifacts."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _one_process(self) -> None:
        PartialState(cpu=True)

    def test_a_fit_logs_every_update_and_the_hyper_parameters(self, tmp_path):
        trainer = make_trainer(
            model_path=str(tmp_path / "model"),
            log_with=self.kind,
            logging_dir=tmp_path,
            tracker_options={"flush_s": FLUSH_S},
        )
        trainer.fit(Linear(), make_points(8), make_points(4))
        tracking = trainer.run.tracking
        rows = [(row["step"], row["values"]) for row in read_history(tracking.run_folder) if "values" in row]
        for name in ("train_loss", "val_loss"):
            expected = [(step, values[name]) for step, values in rows if name in values]
            assert expected
            assert self.points(tracking, name) == [(step, pytest.approx(value)) for step, value in expected]
        flat = " ".join(f"{name}={value}" for name, value in self.config(tracking).items())
        assert "optim.lr=0.1" in flat
        assert "batch_size=2" in flat
        assert self.status(tracking) == self.statuses["FINISHED"]

    def test_rows_of_any_order_name_and_value_are_kept(self, tmp_path):
        tracking = make(self.kind, tmp_path)
        tracking.start({})
        tracking.log({"late": 2.0}, 20)
        tracking.log({"late": 1.0, "f1@0.5 (top %)": 0.5, "val/nan": math.nan}, 10)
        tracking.finish("FINISHED", flush_s=FLUSH_S)
        assert self.points(tracking, "late") == [(10, 1.0), (20, 2.0)]
        assert self.points(tracking, "f1@0.5 (top %)") == [(10, 0.5)]
        not_a_number = self.points(tracking, "val/nan")
        assert len(not_a_number) == self.keeps_nan
        assert all(math.isnan(value) for _, value in not_a_number)

    def test_images_tables_and_artifacts_are_kept_where_there_is_a_place_for_them(self, tmp_path, caplog):
        tracking = make(self.kind, tmp_path)
        tracking.start({})
        log_media(tracking, tmp_path)
        tracking.log({"loss": 1.0}, 3)
        tracking.finish("FINISHED", flush_s=FLUSH_S)
        assert "refused" not in caplog.text
        for kind, plural in KINDS.items():
            assert (f"{plural}, which it does not support" in caplog.text) == (kind not in self.kinds)
        assert {kind: self.media(tracking, kind) for kind in self.kinds} == {kind: MEDIA[kind] for kind in self.kinds}
        assert self.points(tracking) == [(3, 1.0)]

    @pytest.mark.parametrize("status", STATUSES)
    def test_the_run_ends_with_its_true_status(self, tmp_path, status):
        tracking = make(self.kind, tmp_path, run_name=status)
        tracking.start({})
        tracking.log({"loss": 1.0}, 1)
        tracking.finish(status, flush_s=FLUSH_S)
        assert self.status(tracking) == self.statuses[status]

    def test_a_run_that_failed_and_was_resumed_is_one_with_each_step_once(self, tmp_path):
        first = make(self.kind, tmp_path)
        first.start({"lr": 0.1})
        for step in range(KILLED_AT + 1):
            first.log({"loss": float(step)}, step)
            if step == CHECKPOINT_AT:
                state = first.state_dict()
        first.finish("FAILED", flush_s=FLUSH_S)
        state["run_ids"] = first.run_ids
        second = self.go_on(tmp_path, state)
        self.require_each_step_once(second, kept_to=CHECKPOINT_AT if self.replaces else KILLED_AT)

    def test_a_run_that_was_killed_and_resumed_lacks_nothing(self, tmp_path):
        state = self.run_until_killed(tmp_path)
        second = self.go_on(tmp_path, state)
        # What a killed attempt logged after the checkpoint is there, or replaced: at most once each, and none missing.
        points = self.points(second)
        assert sorted({step for step, _ in points}) == list(range(END + 1))
        assert {value % SECOND for step, value in points if step > CHECKPOINT_AT} == set(
            map(float, range(CHECKPOINT_AT + 1, END + 1))
        )
        assert len(points) <= END + 1 + self.doubled_by_a_kill()

    def test_a_run_that_was_killed_is_completed_and_closed_by_sync(self, tmp_path):
        self.run_until_killed(tmp_path)
        tracking = make(self.kind, tmp_path)
        (synced,) = sync_run(tracking.run_folder)
        assert (synced.num_left, synced.problem) == (0, None)
        assert sorted({step for step, _ in self.points(tracking)}) == list(range(KILLED_AT + 1))
        assert self.status(tracking) == self.statuses["KILLED"]

    def test_without_a_key_one_line_says_how_to_upload(self, tmp_path, caplog):
        if not self.has_key_of_its_own:
            return
        caplog.set_level("INFO", logger="accmt")
        tracking = make(self.kind, tmp_path)
        tracking.start({})
        tracking.finish("FINISHED", flush_s=FLUSH_S)
        (line,) = [message for message in caplog.messages if "has no API key" in message]
        assert f"the tracker {self.kind.name} has no API key" in line
        command = line.partition("upload them with `")[2].rstrip("`")
        left = command.split(maxsplit=2)[-1]
        pattern = Path(self.left_for_upload(tracking, left))
        assert list(pattern.parent.glob(pattern.name))

    def test_its_own_switch_is_obeyed_and_no_key_is_missed(self, tmp_path, caplog, monkeypatch):
        self.require_a_service()
        caplog.set_level("INFO", logger="accmt")
        variables = {name: value for name, value in self.switch.items() if name.isupper()}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        keywords = {name: value for name, value in self.switch.items() if name not in variables}
        tracking = make(self.kind(**keywords), tmp_path)
        tracking.start({})
        tracking.log({"loss": 1.0}, 1)
        tracking.finish("FINISHED", flush_s=FLUSH_S)
        assert self.points(tracking) == [(1, 1.0)]
        assert "has no API key" not in caplog.text

    def test_with_a_key_and_no_network_nothing_is_held_up_for_long_nor_lost(self, tmp_path):
        self.require_a_service()
        status, written = run_on_a_terminal("tests.trackers.unreachable", self.kind.name, str(tmp_path), timeout_s=90)
        assert status == 0, written
        to_start, to_log, to_finish = json.loads((tmp_path / "seconds.json").read_text())
        assert to_start < 40  # ten of them for the server; imports take the rest, on a busy machine
        assert to_log < 1
        assert to_finish < FLUSH_OF_UNREACHABLE_S + 2
        (folder,) = tmp_path.glob("*/run")
        assert [row["step"] for row in read_history(folder) if "step" in row] == list(range(5))
        in_one_line = "".join(written.split())  # some trackers break the lines of others
        assert "5rowsnotdelivered,andtherunwasnotclosed" in in_one_line
        assert f"accmtsync{folder}" in in_one_line

    def test_the_environment_is_as_before(self, tmp_path):
        before = dict(os.environ)
        tracking = make(self.kind, tmp_path)
        tracking.start({})
        tracking.finish("FINISHED", flush_s=FLUSH_S)
        changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
        assert changed - {"PYTEST_CURRENT_TEST"} <= self.leaves

    def test_without_a_key_a_run_that_must_be_online_does_not_start(self, tmp_path):
        self.require_a_service()
        with pytest.raises(TrackerError, match=f"the tracker {self.kind.name}\\s+got: no API key"):
            make(self.kind, tmp_path, offline=False).start({})

    def doubled_by_a_kill(self) -> int:
        """Return how many rows the tracker may have twice after a kill: nobody knows whether it had them."""
        return 0

    def require_a_service(self) -> None:
        if not self.has_key_of_its_own:
            pytest.skip("it has no service that wants a key")

    def left_for_upload(self, tracking: Tracking, named: str) -> str:
        """Return the pattern of the files that the upload takes; `named` is what the command says."""
        return named

    def run_id(self, tracking: Tracking) -> str:
        """Return the id by which the tracker knows the run."""
        run_id = DeliveryFile.read(tracking.run_folder).accounts[self.kind.name].run_id
        assert run_id
        return run_id

    def run_until_killed(self, folder: Path) -> dict[str, Any]:
        status, written = run_on_a_terminal("tests.trackers.killed", self.kind.name, str(folder), timeout_s=120)
        assert status == -signal.SIGKILL, written
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        return state

    def go_on(self, folder: Path, state: dict[str, Any]) -> Tracking:
        second = make(self.kind, folder)
        second.load_state_dict(state)
        second.start({"lr": 0.2})
        for step in range(CHECKPOINT_AT + 1, END + 1):
            second.log({"loss": SECOND + step}, step)
        second.finish("FINISHED", flush_s=FLUSH_S)
        return second

    def require_each_step_once(self, tracking: Tracking, kept_to: int) -> None:
        before = [(step, float(step)) for step in range(kept_to + 1)]
        after = [(step, SECOND + step) for step in range(kept_to + 1, END + 1)]
        assert self.points(tracking) == before + after
        assert "0.2" in str(dict(self.config(tracking))["lr"])
        assert self.status(tracking) == self.statuses["FINISHED"]
