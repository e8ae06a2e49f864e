"""Attributes of modules and callbacks that training changes are in the checkpoint."""

from __future__ import annotations

import copy
import logging
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accmt import AcceleratorModule, Callback
from tests.resume.unbroken import make
from tests.toys import make_points

STEPS = 12
WRITES = {
    "counted": lambda mean, weight: mean.lerp_(weight, 0.5),
    "through data": lambda mean, weight: mean.data.lerp_(weight.data, 0.5),
    "by new data": lambda mean, weight: setattr(mean, "data", mean.data * 0.5 + weight.data * 0.5),
}


class Stop(Exception):  # noqa: N818 - what interrupts a run
    pass


class Collecting(AcceleratorModule):
    """Keeps in attributes what self-supervised and other programs keep there, and lets the loss depend on all of it."""

    def __init__(self, write: str = "counted", fails_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.target = copy.deepcopy(self.model).requires_grad_(False)
        self.weights, self.means = list(self.model.parameters()), list(self.target.parameters())
        self.queue, self.place = torch.zeros(8, 1), 0
        self.center: Any = None
        self.counts, self.last = {"batches": 0}, deque([0.0], maxlen=3)
        self.mean, self.seen = np.zeros(3), set()
        self.losses: list[Tensor] = []
        self.write, self.fails_at = write, fails_at

    def training_step(self, batch: Any) -> Tensor:
        inputs, targets = batch
        outputs = self.model(inputs)
        with torch.no_grad():
            goal = self.target(inputs)
            self.queue[self.place : self.place + len(goal)] = goal
            self.place = (self.place + len(goal)) % len(self.queue)
            self.center = goal.mean(0) if self.center is None else 0.5 * self.center + 0.5 * goal.mean(0)
        self.counts["batches"] += 1
        self.mean += inputs.mean(0).numpy()
        self.seen.add(round(float(targets[0]), 3))
        rest = self.center + self.queue.mean() + sum(self.last) / 9 + (self.counts["batches"] + self.mean.sum()) / 99
        loss = nn.functional.mse_loss(outputs, targets + goal + rest + len(self.seen) / 99)
        self.losses.append(loss.detach())
        self.last.append(float(loss.detach()))
        return loss

    def on_update_end(self) -> None:
        for mean, weight in zip(self.means, self.weights, strict=True):
            WRITES[self.write](mean, weight.detach())

    def on_after_backward(self) -> None:
        if self.state.global_step == self.fails_at:
            raise Stop


class Patient(Callback):
    """Stops after the third step whose loss is not the lowest so far, as an early stopping of one's own."""

    def __init__(self) -> None:
        self.lowest, self.bad = float("inf"), 0

    def on_after_training_step(self, outputs: Any) -> None:
        loss = float(outputs.detach())
        self.bad += loss >= self.lowest
        self.lowest = min(self.lowest, loss)
        self.trainer.should_stop = self.bad == 3


def train(folder: str, module: AcceleratorModule, *, resume: bool = False, **settings: Any) -> AcceleratorModule:
    hps = {"epochs": 2, "batch_size": 4, "scheduler": None}
    settings = {"checkpoint_every": "5 steps", "model_saving": None, "resume": resume, **settings}
    make(folder, hps, **settings).fit(module, make_points(2 * STEPS))
    return module


def attributes_of(module: AcceleratorModule) -> dict[str, Any]:
    found = {"model": module.model.state_dict(), "target": module.target.state_dict()}
    found |= {name: getattr(module, name) for name in ("queue", "place", "center", "counts", "mean", "losses")}
    return {**found, "last": list(module.last), "seen": sorted(module.seen)}  # which assert_close does not know


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("handlers", [None, "any"])
def test_a_run_that_goes_on_has_what_an_unbroken_one_has(write: str, handlers: Any) -> None:
    whole = train("out/a", Collecting(write))
    with pytest.raises(Stop):
        train("out/b", Collecting(write, fails_at=8), handlers=handlers)
    rest = train("out/b", Collecting(write), resume=True)
    assert rest.state.global_step == STEPS
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)
    assert rest.last.maxlen == 3


def test_a_callback_without_a_state_dict_goes_on_counting() -> None:
    whole = train("out/a", Collecting(), callbacks=[Patient()])
    assert whole.state.global_step < STEPS
    with pytest.raises(Stop):
        train("out/b", Collecting(fails_at=whole.state.global_step - 1), callbacks=[Patient()], checkpoint_every="step")
    assert train("out/b", Collecting(), callbacks=[Patient()], resume=True).state.global_step == whole.state.global_step


def test_what_a_hook_of_the_start_sets_anew_is_restored_after_it() -> None:
    class OnStart(Collecting):
        def on_fit_start(self) -> None:
            self.queue = torch.zeros(8, 1)

    whole = train("out/a", OnStart())
    with pytest.raises(Stop):
        train("out/b", OnStart(fails_at=8))
    rest = train("out/b", OnStart(), resume=True)
    torch.testing.assert_close(attributes_of(rest), attributes_of(whole), rtol=0, atol=0)


def test_what_does_not_change_is_not_in_the_checkpoint_and_follows_the_program() -> None:
    class Frozen(Collecting):
        def __init__(self, factor: float, fails_at: int | None = None) -> None:
            super().__init__(fails_at=fails_at)
            self.reference, self.factor = copy.deepcopy(self.model).requires_grad_(False), factor

    with pytest.raises(Stop):
        train("out/b", Frozen(1.0, fails_at=8))
    text = next(Path("out/checkpoint-b").glob("step-*/state.json")).read_text()
    assert "self.target" in text
    assert "self.reference" not in text
    assert "self.factor" not in text
    assert train("out/b", Frozen(2.0), resume=True).factor == 2.0


def test_what_cannot_be_stored_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    class Holding(Collecting):
        def __init__(self) -> None:
            super().__init__()
            self.records: list[object] = []

        def on_update_end(self) -> None:
            self.records.append(object())

    with caplog.at_level(logging.WARNING):
        train("out/a", Holding())
    assert caplog.text.count("self.records has changed since training began, but a checkpoint cannot contain") == 1


def test_a_failure_after_a_target_changed_writes_no_emergency_checkpoint(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Early(Collecting):
        def on_update_end(self) -> None:
            pass

        def on_before_backward(self, loss: Any) -> None:
            super().on_update_end()  # before the step is made

    with caplog.at_level(logging.WARNING), pytest.raises(Stop):
        train("out/a", Early(fails_at=8), handlers="any")
    assert "no emergency checkpoint" in caplog.text
    assert [path.name for path in Path("out/checkpoint-a").glob("step-*")] == ["step-00000005"]
