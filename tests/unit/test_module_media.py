"""Images, tables and files that a module logs: in steps, hooks and callbacks, on the main process, while it trains."""

from pathlib import Path

import pytest
import torch

from accmt import read_history
from accmt.errors import ArgumentError, ModuleContractError
from accmt.tracking.values import Media
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


def media_of(trainer):
    lines = read_history(trainer.log_dir)
    return [Media.of_line(trainer.log_dir, line) for line in lines if "media" in line]


def places_of(trainer):
    return [(media.name, media.step) for media in media_of(trainer)]


class Logging(Linear):
    """Logs an image in training, a table in evaluation and files at the end."""

    def training_step(self, batch):
        if self.state.train_step == 1:
            self.log_images({"inputs": torch.zeros(2, 1, 4, 5)})
        return self.step(batch)

    def validation_step(self, batch):
        self.log_table("predictions", ["output"], self.model(batch[0]).tolist())
        return self.step(batch)

    def on_fit_end(self):
        Path("note.txt").write_text("a note")
        self.log_artifact("note.txt")
        Path("plots").mkdir(exist_ok=True)
        self.log_artifacts("plots", step=100)


def test_steps_and_hooks_log_images_tables_and_files_at_the_update_they_are_at():
    trainer = make_trainer()
    module = Logging()
    trainer.fit(module, make_points(8), make_points(2))
    assert places_of(trainer) == [("inputs", 1), ("predictions", 4), ("note.txt", 4), ("plots", 100)]
    images, table, file, _ = media_of(trainer)
    assert {name: image.size for name, image in images.images().items()} == {"inputs/0": (5, 4), "inputs/1": (5, 4)}
    outputs = module.model(make_points(2).tensors[0]).tolist()
    assert table.table() == (["output"], [[pytest.approx(output[0])] for output in outputs])
    assert file.path.read_text() == "a note"


def test_the_trial_evaluation_leaves_nothing():
    trainer = make_trainer(num_sanity_val_steps=-1)
    trainer.fit(Logging(), make_points(2), make_points(8))
    assert [place for place in places_of(trainer) if place[0] == "predictions"] == [("predictions", 1)] * 4


def test_an_evaluation_inside_fit_logs_and_one_alone_says_once_that_it_does_not(caplog):
    class Validating(Logging):
        def on_epoch_end(self):
            self.trainer.validate()

    trainer, module = make_trainer(evaluate_every_n_steps=None), Validating()
    trainer.fit(module, make_points(2), make_points(2))
    inside = places_of(trainer)
    assert inside.count(("predictions", 1)) == 2
    trainer.validate(module, make_points(4))
    trainer.validate(module, make_points(4))
    warnings = [message for message in caplog.messages if "log_table" in message]
    assert len(warnings) == 2  # one for each call of validate
    assert "got: a call outside training: trackers are closed" in warnings[0]
    assert places_of(trainer) == inside


def test_before_any_run_it_is_an_error():
    module = Linear()
    for call in (
        lambda: module.log_images({}),
        lambda: module.log_table("t", ["a"], []),
        lambda: module.log_artifact("x"),
        lambda: module.log_artifacts("x"),
    ):
        with raises_at(ModuleContractError, "log_", "no run"):
            call()


def test_other_processes_do_nothing(monkeypatch):
    class Unlookable:
        """Fails whoever looks at it."""

        def __getattribute__(self, name):
            raise AssertionError(name)

    class Careful(Linear):
        def training_step(self, batch):
            with monkeypatch.context() as patch:
                patch.setattr("accmt.loop.logging.is_main_process", lambda: False)
                self.log_images(Unlookable())
                self.log_table("t", Unlookable(), Unlookable())
                self.log_artifact(Unlookable())
                self.log_artifacts(Unlookable())
            return super().training_step(batch)

    trainer = make_trainer()
    trainer.fit(Careful(), make_points(2))
    assert places_of(trainer) == []


def test_a_mistake_ends_the_run_and_says_what_was_expected():
    class Wrong(Linear):
        def training_step(self, batch):
            self.log_images({"inputs": batch[0].long()})
            return super().training_step(batch)

    with raises_at(ArgumentError, "log_images({'inputs': ...})"):
        make_trainer().fit(Wrong(), make_points(2))
