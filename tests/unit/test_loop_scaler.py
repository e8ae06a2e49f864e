"""Gradient scaling, shown with torch's scaler for CPUs: the arithmetic of fp16 runs without a GPU."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from accmt import Callback
from tests.toys import Linear, logged, make_points, make_trainer


def make_accelerator() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return accelerator


def train(module=None, **settings):
    norms = []

    class Look(Callback):
        def on_before_optimizer_step(self, optimizer):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            norms.append(torch.cat([p.grad.flatten() for p in parameters]))

    module = module or Linear()
    hps = {
        "epochs": 2,
        "optim": {"type": "SGD", "lr": 0.1},
        "scheduler": {"type": "StepLR", "step_size": 1, "gamma": 0.9},
    }
    trainer = make_trainer(hps, callbacks=Look(), **settings)
    state = trainer.fit(module, make_points(8))
    return module, trainer, state, torch.stack(norms)


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_scaled_training_sees_the_true_gradients(clip, accumulation: int):
    *_, plain = train(clip_grad=clip, grad_accumulation_steps=accumulation)
    *_, scaled = train(clip_grad=clip, grad_accumulation_steps=accumulation, accelerator=make_accelerator())
    assert torch.allclose(plain, scaled, rtol=1e-6, atol=1e-8)
    assert clip is None or scaled.norm(dim=1).max() <= clip * (1 + 1e-5)


def test_an_update_that_the_scaler_skips_advances_nothing_and_is_counted():
    class Overflowing(Linear):
        def training_step(self, batch):
            loss = self.step(batch)
            return loss * float("inf") if self.state.batch_iteration == 2 else loss

    module, trainer, state, _ = train(Overflowing(), accelerator=make_accelerator())
    assert (state.global_step, state.skipped_steps, state.batch_iteration, state.samples_seen) == (7, 1, 8, 16)
    assert module.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**7)
    assert logged(trainer, "skipped_steps")[-1] == (7, 1.0)
    assert trainer.run.accelerator.scaler.get_scale() == 512.0
    assert torch.isfinite(module.model.weight).all()


def test_a_window_that_weighs_nothing_leaves_the_scaler_usable():
    class Weightless(Linear):
        def training_step(self, batch):
            return {"loss": self.step(batch), "weight": float(self.state.batch_iteration != 1)}

    module, _, state, _ = train(Weightless(), accelerator=make_accelerator())
    assert (state.global_step, state.skipped_steps) == (7, 1)
    assert isinstance(module.model, nn.Linear)


@pytest.mark.parametrize("weightless", [0, 1], ids=["first window", "second window"])
def test_a_window_without_any_gradient_is_skipped(weightless: int):
    class Weightless(Linear):
        def training_step(self, batch):
            return {"loss": self.step(batch), "weight": float(self.state.batch_iteration // 2 != weightless)}

    module, trainer, state, _ = train(Weightless(), accelerator=make_accelerator(), grad_accumulation_steps=2)
    assert (state.global_step, state.skipped_steps) == (3, 1)
    assert trainer.run.accelerator.scaler.get_scale() == 1024.0
    assert torch.isfinite(module.model.weight).all()
