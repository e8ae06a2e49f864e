"""The same gradients, losses and counts as plain torch on one big batch, in full and in reduced precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accmt import Callback
from tests.distributed.scripts import windows
from tests.distributed.test_windows import reference
from tests.gpu.toys import HPS, Classifier, make_data, train, weights_of

CASES = {case.name: case for case in windows.make_cases() if case.data in ("sized", "stream")}


@pytest.mark.parametrize("name", CASES)
def test_every_update_equals_that_of_one_big_batch(name: str, settings: dict[str, Any]) -> None:
    case = CASES[name]
    result = windows.run_case(case, Path(), accelerator=settings["accelerator"])
    expected = reference(case, 1)
    assert len(result["gradients"]) == len(expected["gradients"]) == result["state"]["global_step"]
    for got, gradient in zip(result["gradients"], expected["gradients"], strict=True):
        assert (torch.tensor(got) - gradient).norm() / gradient.norm() <= 5e-6
    assert result["losses"] == pytest.approx(expected["losses"], rel=5e-6)
    assert result["learning_rates"] == expected["learning_rates"]


class OnDevice(windows.Regression):
    """Leaves the weight of a batch on the device."""

    def training_step(self, batch: Any) -> Any:
        loss, _ = windows.compute_loss(self.model, batch, weighted=True)
        return {"loss": loss, "weight": batch["mask"].sum()}


@pytest.mark.parametrize("accumulation", [1, 3])
def test_weights_that_stay_on_the_device_give_the_same(
    accumulation: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = windows.Case(29, accumulation, weighted=True)
    monkeypatch.setattr(windows, "Regression", lambda weighted: OnDevice(weighted=weighted))
    result, expected = windows.run_case(case, Path(), accelerator=settings["accelerator"]), reference(case, 1)
    assert len(result["gradients"]) == len(expected["gradients"])
    for got, gradient in zip(result["gradients"], expected["gradients"], strict=True):
        assert (torch.tensor(got) - gradient).norm() / gradient.norm() <= 5e-6


class Order(Callback):
    """Keeps the batches in their order."""

    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_before_training_step(self, batch: Any) -> None:
        self.batches.append([part.clone() for part in batch])


class Plain(Classifier):
    """Without what is random, so that plain torch can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5))


def train_by_hand(
    batches: list[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    scaler: Any,
    *,
    optim: dict[str, Any],
    clip: float | None,
    infinite: int = -1,
) -> dict[str, torch.Tensor]:
    """Train with torch alone: autocast, scaler, clipping; the loss of the batch `infinite` is."""
    model = Plain().model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), **optim)
    for index, (inputs, labels) in enumerate(batches):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(inputs).float(), labels)
        scaler.scale(loss * float("inf") if index == infinite else loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("fused", [False, True])
def test_bf16_trains_as_plain_torch_under_autocast(
    fused: bool, clip: float | None, settings: dict[str, Any], device: torch.device
) -> None:
    order, module = Order(), Plain()
    optim = {"lr": 1e-2, "fused": fused}
    hps = {"optim": {"type": "AdamW", **optim}, "scheduler": None}
    train(module, make_data(), settings, hps=hps, mixed_precision="bf16", clip_grad=clip, callbacks=order)
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    expected = train_by_hand(order.batches, device, torch.bfloat16, scaler, optim=optim, clip=clip)
    assert all(tensor.dtype == torch.float32 for tensor in module.model.parameters())
    for name, tensor in weights_of(module).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def _with_scaler(device: torch.device) -> dict[str, Any]:
    """Return the arguments for fp16; on a CPU, which has no such arithmetic, only for its scaler."""
    from accelerate import Accelerator
    from accelerate.utils import GradScalerKwargs

    if device.type == "cuda":
        handler = GradScalerKwargs(init_scale=1024.0, growth_interval=5)
        return {"mixed_precision": "fp16", "accelerator": {"kwargs_handlers": [handler]}}
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    return {"accelerator": accelerator}


class Overflowing(Plain):
    """Has an infinite loss at one step."""

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        return loss * float("inf") if self.state.batch_iteration == 2 else loss


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("fused", [False, True])
def test_fp16_skips_clips_and_scales_as_plain_torch_does(
    fused: bool, clip: float | None, settings: dict[str, Any], device: torch.device
) -> None:
    order, module = Order(), Overflowing()
    optim = {"lr": 1e-2, "fused": fused}
    hps = {"optim": {"type": "AdamW", **optim}, "scheduler": None, "epochs": 1}
    trainer = train(module, make_data(), {**settings, **_with_scaler(device)}, hps=hps, clip_grad=clip, callbacks=order)
    assert (trainer.state.global_step, trainer.state.skipped_steps, len(order.batches)) == (15, 1, 16)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=5)
    dtype = torch.float16 if device.type == "cuda" else None
    expected = train_by_hand(order.batches, device, dtype, scaler, optim=optim, clip=clip, infinite=2)
    for name, tensor in weights_of(module).items():
        assert torch.isfinite(tensor).all()
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)
    assert trainer.run.accelerator.scaler.get_scale() == scaler.get_scale() == 512.0 * 2 ** (13 // 5)
    steps = {float(state["step"]) for state in trainer.run.stepper.optimizer.state.values()}
    assert steps == {15.0}, "a skipped step counts nowhere"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_that_weighs_nothing_is_skipped_with_a_scaler_too(
    accumulation: int, settings: dict[str, Any], device: torch.device
) -> None:
    class Weightless(Plain):
        def training_step(self, batch: Any) -> Any:
            weight = (batch[1] >= 0).sum() * (self.state.batch_iteration >= accumulation)
            return {"loss": super().training_step(batch), "weight": weight}

    module = Weightless()
    trainer = train(
        module,
        make_data(),
        {**settings, **_with_scaler(device)},
        hps={"epochs": 1, "optim": HPS["optim"]},
        grad_accumulation_steps=accumulation,
    )
    assert (trainer.state.global_step, trainer.state.skipped_steps) == (16 // accumulation - 1, 1)
    assert all(torch.isfinite(tensor).all() for tensor in weights_of(module).values())
