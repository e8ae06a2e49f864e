"""Running out of memory, and going on with smaller micro-batches."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, Callback, Trainer
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import ByHand, Record, Recorder, logged, make_points, make_trainer

AUTO = {"max_micro_batch_size": "auto"}
HPS = {
    "epochs": 2,
    "batch_size": 8,
    "optim": {"type": "AdamW", "lr": 0.01},
    "scheduler": {"type": "LinearWithWarmup", "num_warmup_steps": 2},
}


class Hungry(AcceleratorModule):
    """Runs out of memory where more than `fits` samples go through the model at once.

    Args:
        fits: Samples that fit.
        first_batch: The batch from which on memory is short.
        fails_in: "forward" or "backward".
    """

    def __init__(self, fits: int, *, first_batch: int = 0, fails_in: str = "forward") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.fits = fits
        self.first_batch = first_batch
        self.fails_in = fails_in
        self.sizes: list[int] = Record()

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        self.sizes.append(len(inputs))
        outputs = self.model(inputs)
        if len(inputs) > self.fits and self.state.batch_iteration >= self.first_batch:
            if self.fails_in == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            outputs.register_hook(_run_out)
        return nn.functional.mse_loss(outputs, targets)


def _run_out(gradient: torch.Tensor) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def train(module: AcceleratorModule, tmp_path: Path, hps: dict[str, Any] | None = None, **settings: Any) -> Trainer:
    trainer = make_trainer({**HPS, **(hps or {})}, str(tmp_path / "model"), log_every=1, **settings)
    trainer.fit(module, make_points(44))
    return trainer


def assert_close(one: AcceleratorModule, other: AcceleratorModule) -> None:
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
@pytest.mark.parametrize("first_batch", [0, 1, 7])
@pytest.mark.parametrize("every", [None, "2 steps"])
def test_the_weights_are_those_of_a_run_with_such_micro_batches_from_its_start(
    fails_in: str, first_batch: int, every: str | None, tmp_path: Path
) -> None:
    module = Hungry(3, first_batch=first_batch, fails_in=fails_in)
    settings = {"grad_accumulation_steps": 2, "checkpoint_every": every}
    trainer = train(module, tmp_path / "auto", AUTO, **settings)
    reference = Hungry(99)
    expected = train(reference, tmp_path / "fixed", {"max_micro_batch_size": 2}, **settings)
    assert_close(module, reference)
    assert trainer.state.global_step == expected.state.global_step == 6
    assert trainer.state.samples_seen == expected.state.samples_seen == 88
    assert trainer.train_step_batch_size == 2
    assert trainer.run.stepper.optimizer.param_groups[0]["lr"] == expected.run.stepper.optimizer.param_groups[0]["lr"]


def test_the_order_of_samples_and_the_rows_are_what_they_would_have_been(tmp_path: Path) -> None:
    module, reference = Hungry(4, first_batch=4), Hungry(99)
    trainer = train(module, tmp_path / "auto", AUTO)
    expected = train(reference, tmp_path / "fixed")
    assert [step for step, _ in logged(trainer, "train_loss")] == [step for step, _ in logged(expected, "train_loss")]
    for (_, mine), (_, theirs) in zip(logged(trainer, "train_loss"), logged(expected, "train_loss"), strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


def test_only_the_window_in_work_is_done_again(tmp_path: Path) -> None:
    module = Hungry(4, first_batch=4)
    train(module, tmp_path, AUTO)
    assert module.sizes == [8, 8, 8, 8, 8, 4, 4, 4, *[4] * 11]


def test_no_checkpoint_is_left_where_none_was_asked_for(tmp_path: Path) -> None:
    trainer = train(Hungry(4, first_batch=3), tmp_path, AUTO, checkpoint_every=None)
    assert not list(trainer.settings.checkpoint_folder.glob("step-*"))
    again = train(Hungry(99), tmp_path, AUTO, checkpoint_every=None)
    assert not again.run.is_resumed


def test_what_was_found_is_kept_in_the_checkpoint(tmp_path: Path) -> None:
    train(Hungry(4), tmp_path, {"max_steps": 4, **AUTO}, checkpoint_every="1 step")
    module = Hungry(4)
    train(module, tmp_path, AUTO, checkpoint_every="1 step", resume=True)
    assert max(module.sizes) == 4


def test_callbacks_keep_their_state_and_are_told_that_the_run_goes_on(tmp_path: Path) -> None:
    class Counting(Callback):
        def __init__(self) -> None:
            self.updates = 0

        def on_update_end(self) -> None:
            self.updates += 1

        def state_dict(self) -> dict[str, int]:
            return {"updates": self.updates}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.updates = state["updates"]

    counting, recorder = Counting(), Recorder()
    train(Hungry(4, first_batch=4), tmp_path, AUTO, callbacks=[counting, recorder])
    assert counting.updates == 12
    assert recorder.names("on_resume") == ["on_resume"]
    assert recorder.names("on_exception", "on_runtime_error", "on_cuda_out_of_memory") == []


def test_a_single_sample_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train(Hungry(0), tmp_path, AUTO)


def test_batches_that_somebody_else_cuts_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer({**HPS, **AUTO}, str(tmp_path / "model"))
    with raises_at(ArgumentError, "max_micro_batch_size: auto"):
        trainer.fit(Hungry(1), DataLoader(make_points(8), batch_size=4))


def test_a_module_that_steps_by_itself_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer({**HPS, **AUTO}, str(tmp_path / "model"))
    with raises_at(ArgumentError, "max_micro_batch_size: auto"):
        trainer.fit(ByHand(), make_points(4))


def test_the_optimizer_state_of_the_run_that_ended_is_free_before_the_next_loads_its_own(tmp_path: Path) -> None:
    states: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    class Look(Callback):
        def on_update_end(self) -> None:
            if self.state.global_step == 2:
                states.extend(weakref.ref(s["exp_avg"]) for s in self.module.optimizer.state.values())

        def on_fit_start(self) -> None:
            alive.append(sum(state() is not None for state in states))

    train(Hungry(4, first_batch=4), tmp_path, AUTO, callbacks=Look())
    assert len(states) == 4
    assert alive == [0, 0]
