"""What a batch weighs, and what happens where nothing does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accmt import AcceleratorModule, Callback
from accmt.errors import DataError, ModuleContractError
from tests.raising import raises_at
from tests.toys import Linear, Numbers, logged, make_points, make_trainer


class Weighted(AcceleratorModule):
    """The mean of the numbers in a batch times one parameter, weighing what the function says."""

    def __init__(self, weigh):
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        self.weigh = weigh

    def training_step(self, batch):
        return {"loss": self.model.weight.sum() * batch.mean(), "weight": self.weigh(batch)}


@pytest.mark.parametrize("kind", [float, torch.tensor], ids=["float", "tensor"])
def test_a_window_is_the_mean_weighted_by_what_the_step_says(kind):
    module = Weighted(lambda batch: kind(float(batch[0])))
    make_trainer(
        {"batch_size": 1, "optim": {"type": "SGD", "lr": 1.0}}, grad_accumulation_steps=2, shuffle_train=False
    ).fit(module, Numbers([1, 3]))
    assert module.model.weight.item() == pytest.approx(-(1 * 1 + 3 * 3) / 4)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_that_weighs_nothing_is_skipped_and_counted(accumulation: int):
    module = Weighted(lambda batch: float(batch[0] > 2))
    trainer = make_trainer(
        {"batch_size": 1, "scheduler": {"type": "StepLR", "step_size": 1}},
        grad_accumulation_steps=accumulation,
        shuffle_train=False,
    )
    state = trainer.fit(module, Numbers([1, 2, 3, 4]))
    assert (state.global_step, state.skipped_steps, state.samples_seen) == (2 // accumulation, 2 // accumulation, 4)
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.1**state.global_step)
    assert logged(trainer, "skipped_steps")[-1][1] == state.skipped_steps


def test_the_module_may_say_how_many_samples_a_batch_has():
    class Halves(Linear):
        def get_batch_size(self, batch):
            return 10 * len(batch[0])

    state = make_trainer(grad_accumulation_steps=3).fit(Halves(), make_points(8))
    assert state.samples_seen == 80


def test_a_batch_that_shows_no_samples_is_an_error_until_the_module_counts_them():
    class Opaque(Linear):
        def training_step(self, batch):
            return self.step(batch.points)

    class Points:
        def __init__(self, points):
            self.points = points

    class Batches(IterableDataset):
        def __iter__(self):
            return map(Points, DataLoader(make_points(8), batch_size=2))

    class Counted(Opaque):
        def get_batch_size(self, batch):
            return len(batch.points[0])

    with raises_at(DataError, "the number of samples in a batch", do="get_batch_size"):
        make_trainer().fit(Opaque(), DataLoader(Batches(), batch_size=None))
    assert make_trainer().fit(Counted(), DataLoader(Batches(), batch_size=None)).samples_seen == 8


def test_accumulation_may_change_with_the_epoch():
    steps = []

    class Look(Linear):
        def on_epoch_end(self):
            steps.append(self.state.global_step)

    trainer = make_trainer({"epochs": 4}, grad_accumulation_steps={1: 2, 3: 4})
    trainer.fit(Look(), make_points(10))
    assert steps == [5, 8, 11, 13]
    assert trainer.estimated_stepping_batches == 13


class _Queue:
    """Stands for a device: what is queued there, in which order, and when the host waited for it."""

    def __init__(self, monkeypatch, *, weights_are_there: bool):
        self.calls = calls = []
        if not weights_are_there:
            return

        class Event:
            def __init__(self, device):
                self.device = device

            def record(self):
                calls.append("copy")

            def synchronize(self):
                calls.append("wait")

        monkeypatch.setattr(torch, "Event", Event)
        monkeypatch.setattr("accmt.loop.step_outputs.read_weight", lambda step, weight: torch.tensor(weight))


def train_weighted(queue, weigh=lambda batch: float(batch[0])):
    class Look(Callback):
        def on_before_backward(self):
            queue.calls.append("backward")

        def on_before_optimizer_step(self):
            queue.calls.append("step")

    module = Weighted(weigh)
    hps = {"batch_size": 1, "optim": {"type": "SGD", "lr": 1.0}}
    trainer = make_trainer(hps, grad_accumulation_steps=2, shuffle_train=False, callbacks=Look())
    trainer.fit(module, Numbers([1, 3, 2, 5]))
    return module.model.weight.item(), trainer.state


def test_a_weight_on_a_device_is_waited_for_behind_the_forward_pass_and_not_behind_the_backward_pass(monkeypatch):
    on_host = train_weighted(_Queue(monkeypatch, weights_are_there=False))
    queue = _Queue(monkeypatch, weights_are_there=True)
    assert train_weighted(queue) == on_host
    assert queue.calls == ["copy", "backward", "copy", "backward", "wait", "wait", "step"] * 2


def test_a_window_whose_weights_on_a_device_are_0_is_skipped(monkeypatch):
    queue = _Queue(monkeypatch, weights_are_there=True)
    _, state = train_weighted(queue, lambda batch: float(batch[0] in (2, 5)))
    assert (state.global_step, state.skipped_steps) == (1, 1)


@pytest.mark.parametrize("weight", [float("nan"), -1.0, float("inf")])
def test_a_weight_on_a_device_that_cannot_be_one_is_refused_before_the_step(monkeypatch, weight: float):
    queue = _Queue(monkeypatch, weights_are_there=True)
    with raises_at(ModuleContractError, "training_step"):
        train_weighted(queue, lambda batch: weight if batch[0] == 3 else 1.0)
    assert "step" not in queue.calls
