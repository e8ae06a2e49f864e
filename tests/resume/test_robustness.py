"""What users do around checkpoints, and what must not happen then: silent repeats, lost checkpoints, raw errors."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from accmt import Callback, ExtendedAcceleratorModule, Trainer
from accmt.errors import CheckpointError, DataError, NoCheckpointError, SavingError
from accmt.saving.model_folder import read_status
from tests.checkpoints import names_in
from tests.raising import raises_at
from tests.resume.unbroken import HPS, Augmented, Fragile, assert_same, make, state_of, train
from tests.toys import make_points


class Asking(Callback):
    """Asks for a checkpoint in one hook."""

    def __init__(self, hook, path=None):
        setattr(self, hook, lambda: self.trainer.save_checkpoint(path))


class TestTheOrderOfAnEpoch:
    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({}, {"shuffle_train": False}),
            ({"shuffle_train": False}, {}),
            ({"sampler": list(range(22))}, {"sampler": list(reversed(range(22)))}),
        ],
        ids=str,
    )
    def test_another_one_is_refused_in_its_middle(self, before, after):
        train("out/m", stop=3, **before)
        with raises_at(DataError, "a resumed epoch", "order"):
            train("out/m", resume=True, **after)

    def test_a_generator_with_another_seed_is_refused(self):
        def loader(seed):
            return DataLoader(Augmented(), 4, shuffle=True, generator=torch.Generator().manual_seed(seed))

        train("out/m", stop=3, data=loader(1))
        with raises_at(DataError, "a resumed epoch", "order"):
            train("out/m", resume=True, data=loader(2))
        train("out/m", resume=True, data=loader(1))

    def test_other_batches_are_refused(self):
        train("out/m", stop=3, data=DataLoader(Augmented(), 4))
        with pytest.raises(DataError):
            train("out/m", resume=True, data=DataLoader(Augmented(), 5))

    def test_between_epochs_it_may_change(self):
        train("out/m", stop=6, checkpoint_every="epoch")
        trainer, _ = train("out/m", resume=True, shuffle_train=False)
        assert trainer.state.samples_seen == 66


@contextmanager
def held(folder):
    """Let another process hold a folder."""
    Path(folder).mkdir(parents=True)
    code = (
        "import sys; from pathlib import Path; from accmt.files import FolderLock;"
        f"lock = FolderLock.take(Path({folder!r})); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    holder = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert holder.stdout.readline() == "held\n"
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


class TestTheFolder:
    def test_two_runs_at_once_are_refused(self):
        refused = raises_at(CheckpointError, "out/checkpoint-m", "(process ")
        with held("out/checkpoint-m"), refused:
            train("out/m")
        train("out/m")
        assert names_in(Path("out/checkpoint-m")) == ["step-00000018"]

    @pytest.mark.parametrize("settings", [{}, {"checkpoint_every": None, "model_saving": "best_train_loss"}], ids=str)
    def test_a_run_within_a_callback_of_another_is_refused(self, settings):
        class Inner(Callback):
            def on_update_end(self):
                before = names_in(Path("out"))
                with raises_at((CheckpointError, SavingError), "folder ", "another run in this process"):
                    train("out/m", **settings)
                assert names_in(Path("out")) == before
                train("other/m", **settings)  # as the message advises

        train("out/m", stop=2, callbacks=[Inner()], **settings)
        train("out/m", **settings)

    def test_two_runs_that_save_to_one_folder_are_refused_without_checkpoints_too(self):
        refused = raises_at(SavingError, "out/m", "(process ")
        with held("out/m"), refused:
            train("out/m", checkpoint_every=None, model_saving="best_train_loss")
        train("out/m", checkpoint_every=None, model_saving="best_train_loss")
        assert not Path("out/m/.lock").exists()

    def test_a_run_that_saves_nothing_leaves_no_folder_behind(self):
        train("deep/out/m", checkpoint_every=None, model_saving="best_train_loss", model_saving_below=-1.0)
        assert not Path("deep/out/m").exists()

    def test_a_checkpoint_by_hand_does_not_delete_those_of_an_earlier_run(self):
        train("out/m")
        train("out/m", checkpoint_every=None, callbacks=[Asking("on_fit_end")])
        assert names_in(Path("out/checkpoint-m.previous")) == ["step-00000018"]
        assert names_in(Path("out/checkpoint-m")) == ["step-00000018"]

    def test_a_safe_checkpoint_is_not_taken_for_the_beginning_of_another_run(self):
        settings = {"checkpoint_every": None, "handlers": "any", "callbacks": [Asking("on_evaluation_end")]}
        train("out/m", stop=8, **settings)
        assert names_in(Path("out")) == ["checkpoint-m", "m"]

    @pytest.mark.parametrize("end", [0, 1])
    def test_a_run_that_ends_before_its_first_checkpoint_gives_the_earlier_run_its_place_back(self, end, caplog):
        train("out/m", stop=5, checkpoint_options={"max_checkpoints": 2})
        with caplog.at_level(logging.INFO):
            train("out/m", stop=end, verbose=True)
        assert "no checkpoint was written, so the earlier run's checkpoints were moved back to" in caplog.text
        assert names_in(Path("out")) == ["checkpoint-m"]
        assert names_in(Path("out/checkpoint-m")) == ["step-00000002", "step-00000004"]
        assert_same(state_of(*train("out/n")), state_of(*train("out/m", resume=True)))

    @pytest.mark.parametrize("rule", ["best_valid_loss", None])
    def test_a_run_that_saved_a_model_keeps_its_place_without_a_checkpoint(self, rule):
        train("out/m", stop=5)
        train("out/m", stop=8, checkpoint_every="100 epochs", model_saving=rule)  # evaluated after step 6
        saved, earlier = Path("out/m").exists(), Path("out/checkpoint-m.previous")
        assert (saved, earlier.exists()) == (rule is not None, rule is not None)
        assert names_in(earlier if saved else Path("out/checkpoint-m")) == ["step-00000004"]

    def test_places_that_cannot_be_given_back_are_named(self, caplog, monkeypatch):
        train("out/m", stop=5)
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            patched.setattr("accmt.run.checkpoints.move_back", Path.rename)  # onto a folder that is there
            train("out/m", stop=1)
        assert "could not move the checkpoints of an earlier run back from" in caplog.text

    def test_after_a_kill_before_the_first_checkpoint_the_earlier_run_is_not_taken_for_the_new_one(self, monkeypatch):
        train("out/m", stop=5)
        with monkeypatch.context() as killed:
            killed.setattr("accmt.run.checkpoints.Checkpoints._put_back", lambda *previous: None)
            train("out/m", stop=1)
        previous = Path("out/checkpoint-m.previous").resolve()
        for older in ("out/checkpoint-m.previous-2", "out/checkpoint-m.previous-9"):
            Path(older).mkdir()
            os.utime(older, (0, 0))
        with raises_at(NoCheckpointError, "Trainer(resume=True)", do=f'resume="{previous}"'):
            train("out/m", resume=True)
        assert not train("out/m", resume="auto")[0].run.is_resumed
        assert train("out/m", resume=str(previous))[0].run.is_resumed

    def test_a_run_that_goes_on_from_where_it_was_moved_has_its_model_still(self, monkeypatch):
        train("out/m", stop=7)
        with monkeypatch.context() as killed:
            killed.setattr("accmt.run.checkpoints.Checkpoints._put_back", lambda *previous: None)
            train("out/m", stop=1)
        run_id = read_status("out/m")["run_id"]
        trainer, _ = train("out/m", resume="out/checkpoint-m.previous")
        assert trainer.run.saver.run_id == read_status("out/m")["run_id"] == run_id
        assert not Path("out/m.previous").exists()

    def test_the_model_of_an_earlier_run_is_kept_by_one_that_begins_anew_and_goes_on(self, caplog):
        settings = {"evaluate_every_n_steps": 3, "checkpoint_every": "2 steps"}
        first = state_of(*train("out/m", **settings))["saved"]
        with caplog.at_level(logging.INFO):
            train("out/m", stop=1, seed=4, **settings)
            assert not Path("out/m.previous").exists()
            train("out/m", stop=3, seed=4, verbose=True, **settings)  # after its first model, and the checkpoint before
        assert "the model of an earlier run in out/m was moved to" in caplog.text
        second = state_of(*train("out/m", resume=True, **settings))["saved"]
        kept = load_file("out/m.previous/model.safetensors")
        assert all(torch.equal(kept[name], first[name]) for name in first)
        assert not torch.equal(second["0.weight"], first["0.weight"])

    def test_a_best_value_is_forgotten_where_another_run_saved_its_model_since(self, caplog):
        train("out/m", stop=5, evaluate_every_n_steps=3)
        train("out/m", stop=4, evaluate_every_n_steps=3, checkpoint_every="100 epochs")
        assert names_in(Path("out")) == ["checkpoint-m", "checkpoint-m.previous", "m", "m.previous"]
        trainer, _ = train("out/m", resume="out/checkpoint-m.previous", stop=5, evaluate_every_n_steps=3)
        assert "out/m does not contain the best model by best_valid_loss (" in caplog.text
        assert trainer.state.best == {}
        assert trainer.run.saver.selection.state_dict()["chosen"] == []

    def test_a_model_of_another_branch_from_one_checkpoint_is_that_of_another_run(self):
        settings = {"evaluate_every_n_steps": 3, "checkpoint_options": {"max_checkpoints": 9}}
        train("out/m", stop=5, **settings)
        for step in (2, 4):
            train("out/b", resume=f"out/checkpoint-m/step-0000000{step}", checkpoint_every=None, **settings)
        assert names_in(Path("out")) == ["b", "b.previous", "checkpoint-m", "m"]
        assert Path("out/b.previous/replaced_by.json").is_file()

    def test_a_model_that_cannot_be_kept_is_replaced(self, caplog, monkeypatch):
        def refuse(*paths):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        first = state_of(*train("out/m"))["saved"]
        monkeypatch.setattr("accmt.saving.model_folder.place_beside", refuse)
        monkeypatch.setattr("accmt.saving.model_folder.place_inside", refuse)
        second = state_of(*train("out/m", seed=4))["saved"]
        assert "the model of an earlier run in out/m could not be kept and is replaced: " in caplog.text
        assert not torch.equal(second["0.weight"], first["0.weight"])

    def test_of_earlier_runs_the_newest_are_kept(self, caplog):
        firsts = []
        for seed in range(6):
            trainer, module = train("out/m", seed=seed, checkpoint_options={"max_previous_runs": 2}, verbose=True)
            firsts.append(state_of(trainer, module)["saved"]["0.weight"])
            Path("out/m.previous").mkdir(exist_ok=True)
            Path("out/m.previous/notes.txt").write_text("mine")
        assert len(list(Path("out").glob("checkpoint-m.previous*"))) == 2
        kept = [load_file(path)["0.weight"] for path in sorted(Path("out").glob("m.previous*/*.safetensors"))]
        assert sum(any(torch.equal(one, first) for first in firsts[3:5]) for one in kept) == len(kept) == 2
        assert Path("out/m.previous/notes.txt").read_text() == "mine"
        assert "deleted the model of an earlier run" in caplog.text
        assert "deleted the checkpoints of an earlier run" in caplog.text

    def test_earlier_runs_are_overwritten_where_none_is_to_be_kept(self):
        first = state_of(*train("out/m"))["saved"]
        train("out/m", stop=1, checkpoint_options={"max_previous_runs": 0})  # before it has a result of its own
        assert names_in(Path("out")) == ["checkpoint-m", "m"]
        assert names_in(Path("out/checkpoint-m")) == ["step-00000018"]
        train("out/m", seed=4, checkpoint_options={"max_previous_runs": 0})
        assert names_in(Path("out")) == ["checkpoint-m", "m"]
        assert not torch.equal(load_file("out/m/model.safetensors")["0.weight"], first["0.weight"])

    def test_a_kept_folder_that_a_run_works_in_is_no_earlier_run(self):
        for _ in range(2):
            train("out/m", checkpoint_options={"max_previous_runs": None})
        train(
            "out/m.previous",
            checkpoint="out/checkpoint-m.previous",
            seed=4,
            checkpoint_options={"max_previous_runs": None},
        )
        saved = load_file("out/m.previous/model.safetensors")
        train("out/m", checkpoint_options={"max_previous_runs": 0})
        assert torch.equal(load_file("out/m.previous/model.safetensors")["0.weight"], saved["0.weight"])

    def test_a_folder_on_a_disk_of_its_own_keeps_the_earlier_run_inside(self, request):
        train("out/m", stop=5)
        request.getfixturevalue("folders_are_disks")
        train("out/m")
        assert names_in(Path("out/checkpoint-m")) == ["previous", "step-00000018"]
        assert names_in(Path("out/checkpoint-m/previous")) == ["step-00000004"]

    def test_a_program_that_changes_its_folder_keeps_its_checkpoints_together(self, tmp_path):
        class Leave(Callback):
            def on_update_end(self):
                Path("elsewhere").mkdir(exist_ok=True)
                if self.state.global_step == 3:
                    os.chdir("elsewhere")

        train("out/m", callbacks=[Leave()], checkpoint_options={"max_checkpoints": 99})
        assert len(names_in(tmp_path / "out/checkpoint-m")) == 9

    def test_a_file_that_cannot_be_read_now_is_not_damaged(self, monkeypatch):
        train("out/m", stop=5)

        def fail(path):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patched:
            patched.setattr("accmt.checkpoint.manifest.FileEntry.of", fail)
            with raises_at(CheckpointError, "step-00000004/state.json", os.strerror(errno.EMFILE)):
                train("out/m", resume="auto")
        assert names_in(Path("out/checkpoint-m")) == ["step-00000004"]


class TestOptimizerAndSchedule:
    def test_rates_of_numpy_can_be_stored(self):
        class Own(Fragile):
            def get_scheduler(self, optimizer, steps_per_epoch, epochs):
                return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + np.cos(step / 9)))

        whole = state_of(*train("out/a", module=Own()))
        train("out/b", module=Own(), stop=7)
        assert_same(whole, state_of(*train("out/b", module=Own(), resume=True)))

    def test_another_class_of_optimizer_is_refused(self):
        class Own(Fragile):
            kind = torch.optim.Adam

            def get_optimizer(self):
                return self.kind(self.model.parameters(), lr=0.01)

        class Other(Own):
            kind = torch.optim.AdamW

        train("out/m", module=Own(), stop=5)
        with raises_at(CheckpointError, "AdamW", "is Adam", do="reset_optimizer_on_resume"):
            train("out/m", module=Other(), resume=True)

    def test_another_schedule_is_refused_and_another_constant_said(self, caplog):
        class Own(Fragile):
            make = staticmethod(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5))

            def get_scheduler(self, optimizer, steps_per_epoch, epochs):
                return self.make(optimizer)

        class Slower(Own):
            make = staticmethod(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9))

        class Other(Own):
            make = staticmethod(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9))

        train("out/m", module=Own(), stop=5)
        with raises_at(CheckpointError, "scheduler", "CosineAnnealingLR", expected="StepLR"):
            train("out/m", module=Other(), resume=True)
        with caplog.at_level(logging.WARNING):
            train("out/m", module=Slower(), resume=True)
        assert "gamma of the scheduler StepLR: keeping the checkpoint's 0.5 instead of the new 0.9" in caplog.text


class TestAskingByHand:
    def test_in_the_final_evaluation_it_is_served(self):
        settings = {"evaluate_every_n_steps": 7, "checkpoint_every": None}
        train("out/m", callbacks=[Asking("on_evaluation_end", "kept")], **settings)
        assert names_in(Path("kept")) == ["step-00000007", "step-00000014", "step-00000018"]

    def test_after_a_failure_it_is_refused(self, caplog):
        trainer, _ = train("out/m", stop=3, grad_accumulation_steps=2)
        with raises_at(CheckpointError, "save_checkpoint", do="handlers=Handler.ALL"):
            trainer.save_checkpoint()
        train("out/n", stop=3, callbacks=[Asking("on_exception")])
        assert "an error hook raised CheckpointError" in caplog.text

    def test_gradients_of_an_unfinished_update_are_waited_for(self, caplog):
        class Manual(ExtendedAcceleratorModule):
            def __init__(self):
                torch.manual_seed(0)
                self.model = nn.Linear(3, 1)

            def training_step(self, batch):
                inputs, targets = batch
                self.backward(nn.functional.mse_loss(self.model(inputs), targets))
                if self.state.batch_iteration % 4 == 3:  # over the ends of epochs of 6 batches
                    self.step_optimizer()
                    self.zero_grad()

        def run(path, epochs, **settings):
            hps = {"epochs": epochs, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.01}}
            trainer = Trainer(hps, path, checkpoint_every="epoch", verbose=False, seed=1, **settings)
            module = Manual()
            trainer.fit(module, make_points(24))
            return module.model.weight.detach()

        whole = run("out/a", 4)
        with caplog.at_level(logging.WARNING):
            run("out/b", 3)
        assert "in the middle of a step" in caplog.text
        assert names_in(Path("out/checkpoint-b")) == ["step-00000003"]
        assert torch.equal(run("out/b", 4, resume=True), whole)

    def test_an_update_that_waits_for_a_whole_epoch_is_still_unfinished(self):
        class Rarely(ExtendedAcceleratorModule):
            def __init__(self):
                self.model = nn.Linear(3, 1)

            def training_step(self, batch):
                if self.state.batch_iteration == 5:  # the last batch of the first epoch
                    self.backward(self.model(batch[0]).mean())
                elif self.state.batch_iteration == 12:  # the first batch of the third
                    self.step_optimizer()
                    self.zero_grad()

        trainer = make(
            "out/m", {"scheduler": None}, checkpoint_every="epoch", checkpoint_options={"max_checkpoints": 9}
        )
        trainer.fit(Rarely(), make_points(24))
        assert names_in(trainer.checkpoint_path) == ["step-00000001"]


def test_a_trainer_with_a_constructor_of_its_own_can_be_checked():
    class Own(Trainer):
        def __init__(self, name):
            super().__init__(HPS, name, verbose=False)

    assert Own("out/m").check_resume(Fragile(), Augmented()) > 10


def test_a_million_samples_of_a_loader_of_ones_own_are_drawn_once_an_epoch_and_compared_as_one_block():
    from accmt.data.samplers import UserBatches

    class Counted(torch.utils.data.BatchSampler):
        drawn = 0

        def __iter__(self):
            Counted.drawn += 1
            return super().__iter__()

    batches = UserBatches(Counted(RandomSampler(range(1_000_000)), 8, drop_last=False), 1)
    assert batches.num_samples(0, range(batches.size(0))) == 1_000_000
    assert batches.digest(0) == batches.digest(0)
    assert Counted.drawn == 1
