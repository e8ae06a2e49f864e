"""A model that cannot be written ends no run, and is no secret at its end."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from accmt.errors import SavingError
from accmt.saving.model_folder import read_status
from tests.checkpoints import names_in
from tests.toys import Numbers, Scripted, logged, make_trainer


@pytest.fixture
def disk(monkeypatch):
    """A disk for models that is full while `disk` holds something."""
    full = []
    from accmt import huggingface

    save = huggingface.save_model

    def save_if_there_is_room(*args, **kwargs):
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(huggingface, "save_model", save_if_there_is_room)
    return full


class Filling(Scripted):
    """Fills the disk for some evaluations."""

    def __init__(self, losses, disk, full):
        super().__init__(losses)
        self.disk, self.full = disk, full

    def on_evaluation_start(self):
        self.disk[:] = [True] if self.state.evaluations_done in self.full else []


def train(module, **settings):
    settings = {"model_saving": "best_valid_loss", "checkpoint_every": "epoch", **settings}
    trainer = make_trainer({"epochs": len(module.val_losses)}, **settings)
    try:
        trainer.fit(module, Numbers(4), Numbers(2))
    except SavingError as error:
        return trainer, error
    return trainer, None


def test_training_goes_on_and_the_next_best_is_saved(disk, caplog):
    trainer, error = train(Filling([3.0, 2.0, 1.0], disk, {1}))
    assert error is None
    assert caplog.text.count("could not save the model") == 1
    assert trainer.state.best["best_valid_loss"] == 1.0
    assert names_in(Path("out/checkpoint-model")) == ["step-00000006"]


def test_what_is_not_saved_at_the_end_is_an_error_and_nothing_else_is_lost(disk, caplog):
    trainer, error = train(Filling([3.0, 2.0, 2.5], disk, {1, 2}))
    assert "the model of step 4, 6 could not be written" in str(error)
    assert "No space left" in str(error)
    assert trainer.state.best["best_valid_loss"] == 3.0  # which the folder still holds
    assert (Path("out/model/model.safetensors")).exists()
    assert names_in(Path("out/checkpoint-model")) == ["step-00000006"]
    assert len(logged(trainer, "val_loss")) == 3


def test_a_full_disk_is_told_with_each_place_once_and_without_the_frames_of_the_library(monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    trainer, error = train(Scripted([3.0]), checkpoint_every=None)
    warning = next(message for message in caplog.messages if "could not save" in message)
    assert warning.count("out/model") == 1
    assert "No space left on device" in warning
    assert str(error).count("out/model") == 1
    assert str(error).count("got:") == 1
    assert "the model of step 2 could not be written: I/O error: No space left on device (os error 28)" in str(error)
    assert error.__suppress_context__


def test_the_last_model_too(disk):
    disk.append(True)
    trainer, error = train(Scripted([3.0]), model_saving="last")
    assert "last" in str(error)
    assert trainer.state.epoch == 1
    assert names_in(Path("out/checkpoint-model")) == ["step-00000002"]


def start_again(losses, disk, *, full):
    """Start a run that has finished again: another evaluation of its last step gives the last of the losses."""
    module = Scripted(losses)
    disk[:] = [True] if full else []
    trainer = make_trainer({"epochs": 3}, model_saving="best_valid_loss", checkpoint_every="epoch", resume="auto")
    try:
        trainer.fit(module, Numbers(4), Numbers(2))
    except SavingError as error:
        return trainer, module, error
    return trainer, module, None


def test_a_finished_run_that_starts_again_saves_what_it_could_not(disk):
    train(Filling([3.0, 2.0, 2.5], disk, {1, 2}))
    _, _, error = start_again([3.0, 2.0, 2.5, 2.5], disk, full=True)
    assert "the model of step 4, 6" in str(error)
    assert "No space left" in str(error)
    trainer, module, error = start_again([3.0, 2.0, 2.5, 2.5], disk, full=False)
    assert (error, module.seen, trainer.state.best["best_valid_loss"]) == (None, [], 2.5)
    assert read_status(Path("out/model"))["best"] == {"best_valid_loss": 2.5}
    _, module, error = start_again([3.0, 2.0, 2.5, 2.5], disk, full=False)
    assert (error, module.validated) == (None, [])  # nothing is left to do


def test_what_a_finished_run_no_longer_has_is_an_error_again(disk):
    train(Filling([3.0, 2.0, 3.5], disk, {1}))
    _, _, error = start_again([3.0, 2.0, 3.5, 3.5], disk, full=False)
    assert "the model of step 4 could not be written" in str(error)
    assert "accmt get" in str(error)
