"""Loaders that are made anew between epochs: who is asked when, what the run makes of it, and that nothing is left."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

from accmt import Callback
from accmt.errors import ArgumentError, DataError
from tests.raising import raises_at
from tests.resume.unbroken import Augmented, Fragile, assert_same, state_of, train
from tests.toys import InterruptAt, InterruptionError, Linear, Numbers, Scripted, Stream, make_points, make_trainer

EVERY_TWO = {"reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 0}


class Growing(Scripted):
    """Has two more numbers for training, and one for validation, each time it is asked; notes the epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[str, int]] = []

    def get_train_dataloader(self) -> Any:
        self.asked.append(("train", self.state.epoch))
        return Numbers(2 + self.state.epoch)

    def get_validation_dataloader(self) -> Any:
        self.asked.append(("validation", self.trainer.current_epoch))
        return Numbers([100 + self.state.epoch])


def test_the_module_is_asked_anew_every_so_many_epochs():
    module = Growing()
    trainer = make_trainer({"epochs": 4}, **EVERY_TWO)
    state = trainer.fit(module)
    assert module.asked == [("train", 0), ("validation", 0), ("train", 2), ("validation", 2)]
    assert [len(batch) for batch in module.seen] == [2, 2, 2, 2, 2, 2]
    assert sorted(sum(module.seen[2:4], [])) == [0, 1, 2, 3]
    assert module.validated == [[100], [100], [102], [102]]
    assert (state.global_step, state.samples_seen) == (6, 12)
    assert len(trainer.train_dataloader.dataset) == 4


def test_hooks_of_an_epoch_see_its_loaders_and_its_length():
    class Looking(Callback):
        seen: list[tuple[int, Any, int]] = []  # noqa: RUF012 - one run

        def on_epoch_start(self):
            trainer = self.trainer
            lengths = len(trainer.train_dataloader.dataset), trainer.estimated_global_steps_per_epoch
            self.seen.append((trainer.current_epoch, *lengths))

    class Halves(Growing):
        def get_train_dataloader(self):
            return Numbers(4 if self.state.epoch == 0 else 8)

    module = Halves()
    make_trainer(
        {"epochs": 2}, callbacks=Looking(), reload_dataloaders_every_n_epochs=1, evaluate_every_n_steps=0.5
    ).fit(module)
    assert Looking.seen == [(0, 4, 2), (1, 8, 4)]
    assert [values[0] for values in module.validated if values[0] >= 100] == [100, 100, 100, 101, 101]


def test_a_sampler_that_is_a_function_is_called_with_the_new_data():
    lengths = []

    def make_sampler(dataset: Any) -> Any:
        lengths.append(len(dataset))
        return SequentialSampler(dataset)

    make_trainer({"epochs": 3}, sampler=make_sampler, reload_dataloaders_every_n_epochs=1).fit(Growing())
    assert lengths == [2, 3, 4]


class Varying(Fragile):
    """Trains on other data of another length in each epoch."""

    def get_train_dataloader(self, dataset: Any) -> Any:
        points = Augmented(14 + 8 * self.state.epoch)
        points.points = points.points + 0.1 * self.state.epoch
        return points

    def get_validation_dataloader(self) -> Any:
        return Augmented(5 + self.state.epoch)


@pytest.mark.parametrize(("every", "stop"), [(1, 9), (2, 5), (2, 17)])
def test_a_run_interrupted_inside_any_epoch_goes_on_bit_for_bit(tmp_path, every, stop):
    settings: dict[str, Any] = {"hps": {"epochs": 4}, "reload_dataloaders_every_n_epochs": every}
    settings["checkpoint_every"] = "1 steps"
    unbroken = state_of(*train(str(tmp_path / "unbroken"), module=Varying(), **settings))
    train(str(tmp_path / "broken"), module=Varying(), stop=stop, **settings)
    again = train(str(tmp_path / "broken"), module=Varying(), resume=True, **settings)
    assert_same(unbroken, state_of(*again))
    assert again[0].run.is_resumed


def test_a_run_interrupted_between_epochs_asks_once_for_the_next(tmp_path):
    settings: dict[str, Any] = {"checkpoint_every": "epoch", "model_path": str(tmp_path / "model"), **EVERY_TWO}
    make_trainer({"epochs": 2}, **settings).fit(Growing())
    module = Growing()
    make_trainer({"epochs": 4}, resume=True, **settings).fit(module)
    assert module.asked == [("train", 2), ("validation", 2)]


def test_the_schedule_is_the_one_planned_with_the_first_loaders_and_stays_at_its_end():
    schedule = {"type": "OneCycleLR", "max_lr": 0.1}  # which raises when it is stepped beyond its length
    rates: list[float] = []

    class Rates(Callback):
        def on_update_end(self):
            rates.append(self.module.optimizer.param_groups[0]["lr"])

    class Doubling(Linear):
        def get_train_dataloader(self):
            return make_points(4 if self.state.epoch == 0 else 8)

    trainer = make_trainer({"epochs": 2, "scheduler": schedule}, callbacks=Rates(), reload_dataloaders_every_n_epochs=1)
    assert trainer.fit(Doubling()).global_step == 6
    assert trainer.estimated_stepping_batches == 4
    assert len(set(rates[:4])) == 4
    assert set(rates[3:]) == {rates[3]}


def test_a_resume_keeps_the_planned_length_if_loaders_differ_in_batch_size(tmp_path):
    class Smaller(Linear):
        def get_train_dataloader(self):
            return torch.utils.data.DataLoader(make_points(8), 2 if self.state.epoch else 4)

    settings: dict[str, Any] = {"reload_dataloaders_every_n_epochs": 1, "checkpoint_every": "1 steps"}
    settings |= {"hps": {"epochs": 3}, "model_path": str(tmp_path / "model")}
    with pytest.raises(InterruptionError):
        make_trainer(**settings, callbacks=InterruptAt(3)).fit(Smaller())
    again = make_trainer(**settings, resume=True)
    assert again.fit(Smaller()).global_step == 10
    assert again.estimated_stepping_batches == 6  # as planned with the first loader


@pytest.mark.parametrize("has_state", [True, False])
def test_a_sampler_that_depends_on_training_resumes_from_its_state_or_is_named_at_the_first_checkpoint(
    tmp_path, has_state, caplog
):
    class Ranked(TensorDataset):
        def __init__(self) -> None:
            super().__init__(*make_points(8).tensors)
            self.scores = torch.zeros(8)

    class ByScore(torch.utils.data.Sampler):
        def __init__(self, points: Ranked) -> None:
            self.points = points

        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Any:
            return iter(self.points.scores.argsort(stable=True).tolist())

    class WithState(ByScore):
        def state_dict(self) -> dict[str, Any]:
            return {"scores": self.points.scores.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.points.scores = state["scores"]

    class Scoring(Callback):
        def on_update_end(self) -> None:
            if self.state.global_step == self.stop:
                raise KeyError
            self.points.scores = torch.sin(torch.arange(8.0) * self.state.global_step)

    def run(name: str, stop: int, **settings: Any) -> Any:
        points, scoring = Ranked(), Scoring()
        scoring.points, scoring.stop = points, stop
        sampler = (WithState if has_state else ByScore)(points)
        settings |= {"sampler": sampler, "callbacks": scoring, "checkpoint_every": "1 steps"}
        trainer = make_trainer({"epochs": 3, "batch_size": 2}, str(tmp_path / name), **settings)
        trainer.fit(module := Linear(), points)
        return module.model.weight

    unbroken = run("unbroken", 0)
    with pytest.raises(KeyError):
        run("broken", 7)
    assert "if their order does, in the sampler, without set_epoch" in caplog.text
    if has_state:
        assert torch.equal(run("broken", 0, resume=True), unbroken)
    else:
        with raises_at(DataError, "of a resumed epoch", "state_dict"):
            run("broken", 0, resume=True)


def test_nothing_grows_with_the_epochs():
    alive: list[weakref.ref[Any]] = []
    counts = []

    class Counting(Callback):
        def on_after_training_step(self):
            gc.collect()
            loaders = sum(loader() is not None for loader in alive)
            counts.append((len(multiprocessing.active_children()), threading.active_count(), loaders))

    class Own(Linear):
        def get_train_dataloader(self):
            loader = DataLoader(make_points(2), batch_size=2, num_workers=1, persistent_workers=True)
            alive.append(weakref.ref(loader.dataset))
            return loader

    trainer = make_trainer({"epochs": 6}, callbacks=Counting(), reload_dataloaders_every_n_epochs=1)
    trainer.fit(Own())
    assert len(alive) == len(counts) == 6
    assert set(counts) == {(1, counts[0][1], 1)}
    assert multiprocessing.active_children() == []
    assert trainer.run.accelerator._dataloaders == []


def test_validation_sets_keep_their_names():
    class Renaming(Linear):
        def get_validation_dataloader(self):
            return {f"set{self.state.epoch}": make_points(2)}

    trainer = make_trainer({"epochs": 2}, reload_dataloaders_every_n_epochs=1)
    with raises_at(DataError, "the reloaded validation data", "['set1']", expected="['set0']"):
        trainer.fit(Renaming(), make_points(2))


def test_new_data_have_to_go_with_the_settings_too():
    class Turning(Linear):
        def get_train_dataloader(self):
            return Stream(make_points(4)) if self.state.epoch else make_points(4)

    trainer = make_trainer({"epochs": 2}, reload_dataloaders_every_n_epochs=1, evaluate_every_n_steps=0.5)
    with raises_at(ArgumentError, "Trainer(evaluate_every_n_steps=...)"):
        trainer.fit(Turning(), None, make_points(2))


def test_a_changed_number_of_epochs_is_planned_anew_at_resume(tmp_path):
    class Alike(Linear):
        def get_train_dataloader(self):
            return make_points(4)

    settings: dict[str, Any] = {"checkpoint_every": "epoch", "model_path": str(tmp_path / "model")}
    settings["reload_dataloaders_every_n_epochs"] = 1
    make_trainer({"epochs": 1}, **settings).fit(Alike())
    again = make_trainer({"epochs": 3}, resume=True, **settings)
    again.fit(Alike())
    assert again.estimated_stepping_batches == 6
