"""An interrupted run that continues is, bit for bit, the run that was not interrupted."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from accmt import Callback
from accmt.errors import CheckpointCorruptError, CheckpointError, DataError, HyperParameterError, NoCheckpointError
from tests.checkpoints import flip, names_in
from tests.raising import raises_at
from tests.resume.unbroken import Augmented, Fragile, assert_same, make, state_of, train
from tests.toys import Linear, Recorder, make_points, make_trainer


@pytest.fixture
def unbroken():
    return state_of(*train("out/unbroken"))


@pytest.mark.parametrize("stop", [2, 5, 6, 17])
def test_the_continued_run_ends_with_the_same_bits(unbroken, stop):
    train("out/b", stop=stop)
    assert_same(unbroken, state_of(*train("out/b", resume=True)))


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_every": "epoch"},
        {"checkpoint_every": "eval", "evaluate_every_n_steps": 4},
        {"checkpoint_every": "1 step", "grad_accumulation_steps": 3},
        {"checkpoint_every": "1 step", "log_every": -1},
        {"checkpoint_every": "3 steps", "checkpoint_options": {"async_checkpointing": False}},
        {"checkpoint_every": "3 steps", "dataloader_num_workers": 2},
        {"checkpoint_every": "1 step", "clip_grad": 0.1, "grad_accumulation_steps": {0: 1, 1: 2}},
        {"checkpoint_every": "2 steps", "limit_batches": {"train": 4}},
        {"checkpoint_every": "2 steps", "data_options": {"drop_last": True}},
        {"checkpoint_every": "2 steps", "hps": {"max_micro_batch_size": 2}},
        {
            "checkpoint_every": "2 steps",
            "hps": {"scheduler": {"type": "StepLR", "step_size": 1}, "step_scheduler_per_epoch": True},
        },
        {"checkpoint_every": "2 steps", "hps": {"scheduler": {"type": "ReduceLROnPlateau", "patience": 0}}},
        {"checkpoint_every": "2 steps", "hps": {"scheduler": {"type": "MultiStepLR", "milestones": [3, 9]}}},
        {"checkpoint_every": "2 steps", "hps": {"scheduler": {"type": "CosineWithWarmup", "num_warmup_steps": 3}}},
        {"checkpoint_every": "2 steps", "hps": {"epochs": None, "max_steps": 10}},
        {"checkpoint_every": "2 steps", "model_saving": "best_train_loss", "evaluate_every_n_steps": 3},
    ],
    ids=str,
)
def test_whatever_the_settings(settings):
    whole = state_of(*train("out/a", **settings))
    last = whole["counters"]["global_step"]
    train("out/b", stop=last // 3, **settings)
    train("out/b", stop=last - 1, resume="auto", **settings)
    assert_same(whole, state_of(*train("out/b", resume=True, **settings)))


class Noisy(Callback):
    """Changes weights by random numbers of all three generators, where a run is between two batches."""

    def on_epoch_start(self) -> None:
        if self.state.train_step == 0:  # it is called again where a run resumes within an epoch
            self._add_noise()

    def on_update_end(self) -> None:
        self._add_noise()

    def on_evaluation_end(self) -> None:
        self._add_noise()

    def _add_noise(self) -> None:
        noise = float(torch.randn(()) + np.random.normal() + random.random())  # noqa: NPY002 - as users do
        with torch.no_grad():
            self.module.unwrapped_model[0].weight += 0.01 * noise


@pytest.mark.parametrize("stop", [3, 6, 11])
def test_what_hooks_draw_is_drawn_again(stop):
    """At 6 a run ends that has finished an epoch: the next one begins with what a hook draws."""
    whole = state_of(*train("out/a", callbacks=[Noisy()]))
    train("out/b", stop=stop, callbacks=[Noisy()])
    assert_same(whole, state_of(*train("out/b", resume=True, callbacks=[Noisy()])))


@pytest.mark.usefixtures("without_fingerprints")
def test_what_was_trained_on_is_not_read_again():
    train("out/b", stop=11)  # 22 samples in batches of 4: update 10 is 4 micro-batches into the second epoch
    data = Augmented()
    train("out/b", resume=True, data=data)
    assert len(data.fetched) == (22 - 16) + 22


@pytest.mark.parametrize(
    ("every", "settings", "steps"),
    [
        ("2 epochs", {}, [12, 18]),  # and the end
        ("5 steps", {}, [5, 10, 15, 18]),
        ("3 evals", {"evaluate_every_n_steps": 3}, [9, 18]),
        ("eval", {}, [6, 12, 18]),
        ("epoch", {}, [6, 12, 18]),
    ],
)
def test_checkpoints_come_as_often_as_told(every, settings, steps):
    trainer, _ = train("out/m", checkpoint_every=every, checkpoint_options={"max_checkpoints": 100}, **settings)
    assert names_in(trainer.checkpoint_path) == [f"step-{step:08d}" for step in steps]


def test_the_folder_lies_beside_the_model():
    trainer, _ = train("out/m")
    assert trainer.checkpoint_path == Path("out/checkpoint-m")
    assert names_in(trainer.checkpoint_path) == ["step-00000018"]
    assert make("m").checkpoint_path == Path("checkpoint-m")
    assert make("out/m", checkpoint="ck").checkpoint_path == Path("ck")


def test_the_newest_are_kept():
    trainer, _ = train("out/m", checkpoint_options={"max_checkpoints": 2}, checkpoint_every="4 steps")
    assert names_in(trainer.checkpoint_path) == ["step-00000016", "step-00000018"]


class TestWhereARunBegins:
    def test_true_wants_a_checkpoint(self):
        with raises_at(NoCheckpointError, "Trainer(resume=True)", "out/checkpoint-m"):
            train("out/m", resume=True)
        with pytest.raises(FileNotFoundError):
            train("out/m", resume="no/such/folder")

    @pytest.mark.parametrize("resume", [None, "auto"])
    def test_auto_takes_one_if_there_is_one(self, resume):
        first, _ = train("out/m", resume=resume, stop=5)
        assert first.state.global_step == 5
        seen = Recorder()
        second, _ = train("out/m", resume=resume, callbacks=[seen])
        assert seen.calls[:2] == ["on_resume", "on_fit_start"]
        assert second.state.global_step == 18

    def test_a_path_is_a_checkpoint_or_a_folder_of_them(self):
        train("out/m", checkpoint_options={"max_checkpoints": 10}, stop=9)
        for path in (
            "out/checkpoint-m/step-00000004/manifest.json",
            "out/checkpoint-m/step-00000004",
            "out/checkpoint-m",
        ):
            recorder = Recorder()
            trainer, _ = train("out/n", resume=path, callbacks=[recorder])
            assert trainer.state.global_step == 18
            assert recorder.names("on_update_end") == ["on_update_end"] * (14 if "step" in path else 10)
        assert names_in(Path("out/checkpoint-m")) == [f"step-0000000{step}" for step in (2, 4, 6, 8)]

    def test_a_damaged_one_is_named_and_the_one_before_is_used(self, caplog, unbroken):
        train("out/b", checkpoint_options={"max_checkpoints": 3}, stop=9)
        flip(next(Path("out/checkpoint-b/step-00000008").glob("*.safetensors")), 200)
        with raises_at(CheckpointCorruptError, "step-00000008", ".safetensors"):
            train("out/other", resume="out/checkpoint-b/step-00000008")
        with caplog.at_level(logging.WARNING):
            trainer, module = train("out/b", checkpoint_options={"max_checkpoints": 3}, resume=True)
        assert "step-00000008 is damaged" in caplog.text
        assert_same(unbroken, state_of(trainer, module))

    def test_a_run_that_is_complete_returns_at_once(self):
        train("out/m")
        recorder = Recorder()
        data = Augmented()
        trainer, module = train("out/m", resume=True, callbacks=[recorder], data=data)
        assert trainer.state.finished
        assert (recorder.calls, data.fetched) == ([], [])
        assert torch.equal(module.model[0].weight, train("out/other")[1].model[0].weight)

    def test_more_epochs_go_on(self):
        train("out/m")
        trainer, _ = train("out/m", resume=True, hps={"epochs": 4})
        assert (trainer.state.epoch, trainer.state.global_step) == (4, 24)


class TestWhatItHolds:
    def test_module_callbacks_and_trainer_may_add_to_it(self):
        class Counting(Fragile):
            steps = 0

            def step(self, batch):
                self.steps += self.state.stage == "train"
                return super().step(batch)

            def state_dict(self):
                return {"steps": self.steps, "a tensor": torch.arange(3)}

            def load_state_dict(self, state):
                assert torch.equal(state["a tensor"], torch.arange(3))
                self.steps = state["steps"]

        class Sum(Callback):
            total = 0

            def on_update_end(self):
                self.total += 1

            def state_dict(self):
                return {"total": self.total}

            def load_state_dict(self, state):
                self.total = state["total"]

        first = [Sum(), Sum()]
        train("out/m", module=Counting(), callbacks=first, stop=5)
        assert first[0].total == 5
        second = [Sum(), Sum()]
        _, module = train("out/m", module=Counting(), callbacks=second, resume=True)
        assert (module.steps, second[0].total, second[1].total) == (18, 18, 18)

    def test_a_trainer_of_ones_own_adds_its_state(self):
        from accmt import Trainer

        class Own(Trainer):
            k = 1

            def get_state(self):
                return super().get_state() | {"k": self.k}

            def update_state(self, state):
                self.k = state["k"]

        settings = {"checkpoint_every": "epoch", "verbose": False}
        hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
        first = Own(hps, "out/m", **settings)
        first.k = 7
        first.fit(Linear(), make_points())
        second = Own(hps, "out/m", resume=True, **settings)
        second.fit(Linear(), make_points())
        assert second.k == 7

    def test_optimizer_and_schedule_can_begin_anew(self):
        train("out/m", stop=7)
        trainer, _ = train(
            "out/m",
            resume=True,
            checkpoint_options={"reset_optimizer_on_resume": True},
            hps={"optim": {"type": "SGD", "lr": 1e-3}},
        )
        assert trainer.state.global_step == 18
        assert type(trainer.run.stepper.optimizer).__name__ == "SGD"
        assert trainer.run.scheduler.last_epoch == 12
        assert trainer.run.stepper.optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)


class TestSavingByHand:
    def test_a_callback_may_ask_for_one(self):
        class At3(Callback):
            def on_update_end(self):
                if self.state.global_step == 3:
                    self.trainer.save_checkpoint()
                    self.trainer.save_checkpoint("pinned")

        trainer, _ = train(
            "out/m", callbacks=[At3()], checkpoint_every="100 epochs", checkpoint_options={"max_checkpoints": 5}
        )
        assert names_in(trainer.checkpoint_path) == ["step-00000003", "step-00000018"]
        assert names_in(Path("pinned")) == ["step-00000003"]
        whole = state_of(trainer, trainer.run.module)
        resumed = train("out/n", resume="pinned", checkpoint_every=None)
        assert_same(whole, state_of(*resumed), but=("rows",))

    def test_one_elsewhere_does_not_take_the_place_of_a_regular_one(self):
        class At3(Callback):
            def on_update_end(self):
                if self.state.global_step == 3:
                    self.trainer.save_checkpoint("pinned")

        trainer, _ = train(
            "out/m", callbacks=[At3()], checkpoint_every="3 steps", checkpoint_options={"max_checkpoints": 9}
        )
        assert names_in(trainer.checkpoint_path) == [f"step-{step:08}" for step in range(3, 19, 3)]
        assert names_in(Path("pinned")) == ["step-00000003"]

    def test_after_a_run_it_is_written_at_once(self):
        trainer, _ = train("out/m", checkpoint_every=None)
        trainer.save_checkpoint("later")
        assert names_in(Path("later")) == ["step-00000018"]
        Path("blocked").write_text("a file")
        with pytest.raises(CheckpointError, match="later"):
            trainer.save_checkpoint("blocked/later")

    @pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
    def test_after_a_run_that_was_broken_off_it_is_refused(self, kind):
        class Broken(Fragile):
            def training_step(self, batch):
                if self.state.global_step == 3:
                    raise kind
                return self.step(batch)

        trainer = make("out/m")
        with pytest.raises(kind):
            trainer.fit(Broken(), Augmented(), Augmented(9))
        with raises_at(CheckpointError, "save_checkpoint"):
            trainer.save_checkpoint("later")
        assert not Path("later").exists()

    def test_the_next_run_continues_from_a_chosen_one(self, unbroken):
        train("out/b", stop=7, checkpoint_options={"max_checkpoints": 9})
        trainer = make("out/b", checkpoint_options={"max_checkpoints": 9})
        assert trainer.load_checkpoint("out/checkpoint-b/step-00000002").step == 2
        module = Fragile()
        trainer.fit(module, Augmented(), Augmented(9))
        assert_same(unbroken, state_of(trainer, module))

    def test_nothing_to_load_is_no_checkpoint(self):
        assert make("out/m").load_checkpoint() is None

    def test_hooks_hear_of_each(self):
        class Hearing(Callback):
            def __init__(self):
                self.folders = []

            def on_save_checkpoint(self, folder):
                self.folders.append(folder.name)

        hearing = Hearing()
        train("out/m", callbacks=[hearing], checkpoint_every="9 steps")
        assert hearing.folders == ["step-00000009", "step-00000018", "step-00000018"]


def test_a_checkpointer_of_ones_own_stores_in_memory(tmp_path):
    class InMemory:
        def __init__(self):
            self.saved = []

        def save(self, write, step, *, force):
            folder = tmp_path / f"staging-{len(self.saved)}"
            folder.mkdir()
            write(folder)
            self.saved.append((step, force, {path.name: path.read_bytes() for path in folder.iterdir()}))

        def load(self):
            if not self.saved:
                return None
            folder = tmp_path / "loaded"
            folder.mkdir(exist_ok=True)
            for name, content in self.saved[-1][2].items():
                (folder / name).write_bytes(content)
            return folder

    memory = InMemory()
    train("out/b", checkpointer=memory, checkpoint_every="epoch", stop=13)
    assert [step for step, _, _ in memory.saved] == [6, 12]
    whole = state_of(*train("out/a", checkpoint_every="epoch"))
    assert_same(whole, state_of(*train("out/b", checkpointer=memory, checkpoint_every="epoch", resume=True)))
    assert not Path("out/checkpoint-b").exists()


class TestWhatHasChanged:
    def test_a_new_rate_is_applied_and_said(self, caplog):
        train("out/m", stop=7)
        with caplog.at_level(logging.INFO):
            trainer, _ = train("out/m", resume=True, hps={"optim": {"type": "AdamW", "lr": 0.02}}, verbose=True)
        assert "optim.lr: 0.01 -> 0.02 (applied)" in caplog.text
        assert trainer.run.scheduler.base_lrs == [0.02]

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"step_scheduler_per_epoch": False}, {"epochs": 4}),
            ({}, {"epochs": 4}),
            ({}, {"epochs": 4, "batch_size": 8}),
            ({}, {"epochs": 3, "batch_size": 8}),  # as many steps as before
            ({}, {"batch_size": 8}),
            ({}, {"batch_size": 2}),
            ({"epochs": 9, "max_steps": 12}, {"max_steps": 24}),
            ({"epochs": None, "max_steps": 12}, {"max_steps": 24}),
        ],
        ids=str,
    )
    def test_rates_are_those_of_a_run_that_was_as_long_from_its_start(self, before, after):

        class Rates(Callback):
            def __init__(self):
                self.of_epochs = {}

            def on_epoch_start(self):
                self.of_epochs[self.state.epoch] = self.trainer.run.stepper.optimizer.param_groups[0]["lr"]

        whole, resumed, data = Rates(), Rates(), Augmented(24)
        before = {"epochs": 2, "step_scheduler_per_epoch": True, **before}
        after = {**before, **after}
        train("out/a", hps=after, data=data, callbacks=[whole], checkpoint_every="epoch")
        train("out/b", hps=before, data=data, stop=7, checkpoint_every="epoch")
        train("out/b", hps=after, data=data, resume=True, callbacks=[resumed], checkpoint_every="epoch")
        assert list(resumed.of_epochs) == list(whole.of_epochs)[1:]
        assert resumed.of_epochs == {epoch: pytest.approx(whole.of_epochs[epoch]) for epoch in resumed.of_epochs}

    @pytest.mark.parametrize("size", [2, 8])
    def test_a_batch_size_that_a_loader_decides_is_said_to_have_no_effect(self, caplog, size):
        loader = torch.utils.data.DataLoader(make_points(16), 2)
        make_trainer({"epochs": 1}, checkpoint_every="epoch").fit(Linear(), loader)
        with caplog.at_level(logging.WARNING):
            hps = {"epochs": 2, "batch_size": size}
            make_trainer(hps, checkpoint_every="epoch", resume=True).fit(Linear(), loader)
        said = "the new batch_size=8 of the hyper-parameters has no effect: the DataLoader has batch_size=2"
        assert (said in caplog.text) == (size == 8)

    def test_another_optimizer_is_refused(self):
        train("out/m", stop=7)
        with raises_at(HyperParameterError, "continuing from out/checkpoint-m/step-00000006"):
            train("out/m", resume=True, hps={"optim": {"type": "SGD", "lr": 0.01}})

    def test_the_seed_stays_and_that_is_said(self, caplog, unbroken):
        train("out/b", stop=7)
        with caplog.at_level(logging.WARNING):
            resumed = train("out/b", resume=True, seed=99)
        assert "seed=99 is ignored" in caplog.text
        assert_same(unbroken, state_of(*resumed))

    def test_without_a_seed_the_drawn_one_is_kept(self):
        settings = {"seed": None, "checkpoint_every": "4 steps", "checkpoint_options": {"max_checkpoints": 9}}
        whole, module = train("out/a", **settings)
        resumed = train("out/b", resume="out/checkpoint-a/step-00000008", **settings)
        assert_same(state_of(whole, module), state_of(*resumed), but=("rows",))

    def test_other_data_in_the_middle_of_an_epoch_are_refused(self):
        train("out/m", stop=3)
        with pytest.raises(DataError):
            train("out/m", resume=True, data=Augmented(23))

    def test_another_model_is_refused(self):
        class Wider(Fragile):
            def __init__(self):
                super().__init__()
                self.model[3] = nn.Linear(8, 2)

        train("out/m", stop=3)
        with raises_at(CheckpointError, "the model", "3.weight"):
            train("out/m", resume=True, module=Wider())


class TestAFullDisk:
    def test_training_goes_on_with_one_warning_and_the_old_checkpoint_stays(self, caplog, monkeypatch):
        import accmt.checkpoint.store as store

        trainer, _ = train("out/m", stop=5, checkpoint_every="4 steps")
        real, calls = store.write_manifest, []

        def full(*args):
            calls.append(args)
            if len(calls) < 3:
                raise OSError(28, "No space left on device")
            real(*args)

        monkeypatch.setattr(store, "write_manifest", full)
        with caplog.at_level(logging.WARNING):
            trainer, _ = train("out/m", resume=True, checkpoint_every="4 steps")
        assert trainer.state.finished
        assert caplog.text.count("No space left on device") == 1
        assert "Training continues" in caplog.text
        assert names_in(trainer.checkpoint_path) == ["step-00000018"]

    def test_a_disk_too_small_is_said_before_training(self, caplog, monkeypatch):
        import shutil

        usage = shutil.disk_usage(".")
        monkeypatch.setattr("accmt.files.shutil.disk_usage", lambda _: usage._replace(free=200))
        with caplog.at_level(logging.WARNING):
            train("out/m", checkpoint_options={"max_checkpoints": 3})
        assert "lower `max_checkpoints`" in caplog.text
        assert "the model needs 300 B in out/m" in caplog.text
        caplog.clear()
        train("out/m", failures={"preflight": False})
        assert caplog.text == ""


def test_counters_and_results_survive_for_callbacks():
    class Looking(Callback):
        seen = None

        def on_resume(self):
            self.seen = (self.state.global_step, dict(self.state.metrics), dict(self.state.best))

    train("out/m", stop=8)
    looking = Looking()
    train("out/m", resume=True, callbacks=[looking])
    step, metrics, best = looking.seen
    assert (step, set(metrics), set(best)) == (8, {"val_loss"}, {"best_valid_loss"})
