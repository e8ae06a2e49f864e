"""Paths hold from where the Trainer was made, wherever the program goes afterwards."""

import os
from pathlib import Path

from accmt import Callback, Trainer
from tests.toys import HPS, Linear, make_points


def leave():
    Path("elsewhere").mkdir()
    os.chdir("elsewhere")


class Leaving(Callback):
    """Goes to another folder before the first batch."""

    def on_fit_start(self):
        leave()


class LeavingLate(Callback):
    """Goes to another folder after the first epoch."""

    def on_epoch_end(self):
        if self.state.epoch == 1:
            leave()


def files_in(folder):
    return sorted({path.relative_to(folder).parts[0] for path in folder.rglob("*") if path.is_file()})


def train(callbacks=None, **settings):
    settings = {"verbose": False, "seed": 0, "log_with": "tensorboard", "run_name": "run", **settings}
    trainer = Trainer(
        {**HPS, "epochs": 2}, "out/model", callbacks=callbacks, model_saving=["best_valid_loss", "last"], **settings
    )
    yield trainer
    trainer.fit(Linear(), make_points(), make_points())
    yield trainer


def test_a_program_that_goes_elsewhere_while_it_trains_has_everything_in_one_place(tmp_path):
    for kind in (Leaving, LeavingLate):
        home = tmp_path / kind.__name__
        home.mkdir()
        os.chdir(home)
        *_, trainer = train(kind())
        assert files_in(home) == ["logs", "out"]
        assert not list(home.rglob(".lock"))
        assert trainer.log_dir == home / "logs/model/run"
        assert (home / "out/model/last/model.safetensors").exists()
        assert trainer.checkpoint_path == home / "out/checkpoint-model"
        assert trainer.validate(Linear(), make_points(), ckpt_path="best")


def test_a_program_that_goes_elsewhere_before_it_trains_resumes_what_it_began(tmp_path):
    for settings in ({}, {"resume": True}, {"resume": "out/checkpoint-model"}):
        parts = train(profiler="simple", **settings)
        next(parts)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        trainer = next(parts)
        assert trainer.state.epoch == 2
        os.chdir(tmp_path)
    assert files_in(tmp_path) == ["logs", "out"]


def test_paths_are_as_they_were_told_where_the_program_stays():
    *_, trainer = train()
    assert trainer.log_dir == Path("logs/model/run")
    assert trainer.checkpoint_path == Path("out/checkpoint-model")
    assert trainer.settings.model_folder == Path("out/model")


def test_a_checkpoint_by_hand_goes_where_the_program_was_when_it_asked(tmp_path):
    class Asking(Callback):
        def on_before_optimizer_step(self):
            if self.state.global_step == 1:
                self.trainer.save_checkpoint("kept")
                leave()

    list(train(Asking()))
    assert "kept" in files_in(tmp_path)
