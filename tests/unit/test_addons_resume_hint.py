"""The last line of a run that ends before its time: what it is continued from, and how."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from pathlib import Path

import pytest

from accmt import Callback, Handler
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import Preempted
from tests.toys import Linear, make_points, make_trainer

ON_IT_GOES = "resume: run the same program{} to continue from out/checkpoint-model/step-0000000{}"
WITH_TRUE = " with Trainer(resume=True)"


class BrokenError(Exception):
    pass


class EndAt(Callback):
    """Ends a run in the batch after `update`, by an error or by signals."""

    def __init__(self, update, *ends):
        self.update, self.ends = update, ends

    def on_before_training_step(self):
        for end in self.ends if self.state.global_step == self.update else ():
            if isinstance(end, signal.Signals):
                os.kill(os.getpid(), end)
            else:
                raise end


@pytest.fixture
def ended(caplog):
    """Trains until the run ends with an error; returns the error and the last line that was said."""

    def end(update=3, *ends, error=BrokenError, **settings):
        caplog.clear()
        ending = EndAt(update, *(ends or (BrokenError(),)))
        settings = {"checkpoint_every": "2 steps", "verbose": True, "callbacks": [ending], **settings}
        with pytest.raises(error) as caught, caplog.at_level(logging.INFO, logger="accmt"):
            make_trainer({"epochs": 2}, **settings).fit(Linear(), make_points())
        return caught.value, caplog.messages[-1]

    return end


def shown(error: BaseException) -> list[str]:
    """Return what Python prints where nobody catches the error."""
    return "".join(traceback.format_exception(error)).splitlines()


def test_ctrl_c_ends_with_a_line_on_how_to_go_on_below_a_traceback_of_two_frames(ended, capfd):
    error, said = ended(3, signal.SIGINT, error=KeyboardInterrupt)
    assert said == ON_IT_GOES.format(WITH_TRUE, 4)
    assert shown(error)[-2:] == ["KeyboardInterrupt: the run stops at step 4", said]
    frames = traceback.extract_tb(error.__traceback__)
    assert [Path(frame.filename).name for frame in frames] == [Path(__file__).name, "trainer.py"]
    state = make_trainer({"epochs": 2}, checkpoint_every="2 steps", resume=True).fit(Linear(), make_points())
    assert state.global_step == 8


def test_a_second_ctrl_c_keeps_the_frames_that_say_where_it_came(ended, monkeypatch, capfd):
    monkeypatch.setattr("accmt.failures.interruption._SAME_CTRL_C_S", -1.0)
    error, said = ended(3, signal.SIGINT, signal.SIGINT, error=KeyboardInterrupt)
    assert said == ON_IT_GOES.format(WITH_TRUE, 2)
    assert any(frame.name == "on_before_training_step" for frame in traceback.extract_tb(error.__traceback__))


@pytest.mark.parametrize("resume", [False, "auto"])
def test_what_python_shows_no_traceback_of_is_said_last(ended, resume):
    _, said = ended(3, signal.SIGTERM, error=Preempted, resume=resume)
    assert said == ON_IT_GOES.format("" if resume else WITH_TRUE, 4)


def test_an_error_names_the_checkpoint_that_was_there_before_it(ended):
    error, said = ended(3)
    assert said == shown(error)[-1] == ON_IT_GOES.format(WITH_TRUE, 2)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "on_before_training_step"
    error, said = ended(5, handlers=Handler.ANY, resume=True)
    assert said == shown(error)[-1] == ON_IT_GOES.format("", 5)
    error, said = ended(5, resume=True)
    assert said == ON_IT_GOES.format("", 5), "that which it began with, where it wrote none"
    error, said = ended(5, resume="out/checkpoint-model/step-00000005", model_path="out/other")
    assert said == ON_IT_GOES.format("", 5).replace("out/", f"{Path.cwd()}/out/")


def test_a_program_that_chose_a_checkpoint_would_choose_it_again(ended, caplog):
    ended(3)
    trainer = make_trainer({"epochs": 2}, "out/other", checkpoint_every="step", callbacks=[EndAt(4, BrokenError())])
    trainer.load_checkpoint("out/checkpoint-model")
    with pytest.raises(BrokenError) as caught:
        trainer.fit(Linear(), make_points())
    way = "resume: run the same program with Trainer(resume=True) and no load_checkpoint to continue from "
    assert shown(caught.value)[-1] == f"{way}out/checkpoint-other/step-00000004"


def test_a_checkpoint_that_could_not_be_written_is_not_named(ended, monkeypatch):
    publish = CheckpointStore._publish

    def publish_the_first(store, staging, *rest, **options):
        if staging.step > 2:
            raise OSError(28, "No space left on device")
        return publish(store, staging, *rest, **options)

    monkeypatch.setattr(CheckpointStore, "_publish", publish_the_first)
    assert ended(5)[1] == ON_IT_GOES.format(WITH_TRUE, 2)


def test_where_nothing_was_saved_it_says_so(ended):
    for settings, why in (
        ({"checkpoint_every": None}, "checkpoints are off (checkpoint_every=None)"),
        ({"checkpoint_every": "epoch"}, "no checkpoint was written"),
    ):
        error, said = ended(3, **settings)
        assert said == shown(error)[-1] == f"resume: {why}, so the same program starts from the beginning"


def test_a_run_that_fails_at_its_first_batch_is_not_told_what_it_lost(ended):
    error, said = ended(0)
    assert "run summary" in said
    assert not hasattr(error, "__notes__")


def test_what_a_checkpointer_keeps_is_named_by_its_class(ended):
    class Shelf:
        def save(self, write, step, *, force):
            Path(f"shelf/{step}").mkdir(parents=True)
            write(Path(f"shelf/{step}"))

        def load(self):
            return None

    kept = "resume: run the same program with Trainer(resume=True) to continue from the state of Shelf"
    assert ended(3, checkpointer=Shelf())[1] == kept
    assert "so the same program starts from the beginning" in ended(1, checkpointer=Shelf())[1]


def test_an_emergency_checkpoint_of_one_process_is_not_passed_to_a_checkpointer_that_needs_all(caplog):
    class Shelf:
        saved: list[int] = []

        def save(self, write, step, *, force):
            self.saved.append(step)

        def load(self):
            return None

    class SaveAlone(Callback):
        def on_update_end(self):
            if self.state.global_step == 2:
                self.trainer.run.checkpoints.save_snapshot(self.trainer.run, is_alone=True)

    arguments = {"checkpointer": Shelf(), "checkpoint_every": "100 steps", "verbose": True}
    with caplog.at_level(logging.INFO, logger="accmt"):
        make_trainer({"epochs": 1}, callbacks=SaveAlone(), **arguments).fit(Linear(), make_points())
        assert "Shelf needs all processes, of which some have exited" in caplog.text
        folders = list(Path("out/checkpoint-model").glob("step-*"))
        assert folders
        make_trainer({"epochs": 2}, resume=str(folders[0]), **arguments).fit(Linear(), make_points())
    assert f"continuing from {folders[0]}" in caplog.text


def test_training_that_ends_early_says_it_too_and_a_run_at_its_end_does_not(caplog):
    class Stop(Callback):
        def on_update_end(self):
            self.trainer.should_stop = self.state.global_step == 3

    def last_line(**settings):
        caplog.clear()
        make_trainer(checkpoint_every="2 steps", verbose=True, **settings).fit(Linear(), make_points())
        return caplog.messages[-1]

    assert last_line(callbacks=[Stop()]) == ON_IT_GOES.format(WITH_TRUE, 3)
    stopped = ON_IT_GOES.format(f"{WITH_TRUE} and a longer max_time", 1)
    assert last_line(max_time={"microseconds": 1}) == stopped
    for settings in ({}, {"callbacks": [Stop()], "overfit_batches": 3}):
        assert "run summary" in last_line(**settings)
