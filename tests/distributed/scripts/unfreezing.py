"""Runs in which layers are frozen and unfrozen, unbroken and continued; writes the weights of each.

torchrun --nproc-per-node 2 unfreezing.py RESULT.json FOLDER
torchrun --nproc-per-node 2 unfreezing.py one-process|in-a-step|hooked FOLDER
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import Subset, TensorDataset

import tests.many_runs  # noqa: F401
from accmt import EMA, AcceleratorModule, Callback, Trainer
from accmt.processes import gather_objects, is_main_process
from tests.toys import Record

SAMPLES, BATCH_SIZE, ACCUMULATION, EPOCHS, LR = 13, 2, 2, 4, 0.05
Plan = Mapping[int, Mapping[int, bool]]
"""In the epoch that begins after which optimizer step which layer is trained, or no longer."""
PLANS: dict[str, Plan] = {
    "unfrozen": {0: {0: False, 2: False}, 2: {2: True}, 4: {0: True}},
    "frozen": {2: {0: False}, 4: {4: False}},
    "swapped": {0: {0: False}, 2: {0: True, 2: False}, 4: {2: True, 4: False}},
}
STOP = 5
SETTINGS = {
    "unfrozen": {"parallelism": {"ddp": {"gradient_as_bucket_view": True}}},
    "frozen": {"set_to_none": False},
    "swapped": {"parallelism": {"ddp": {"find_unused_parameters": True}}},
}


def make_points() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


class Regression(AcceleratorModule):
    def __init__(self, start: Mapping[int, bool]) -> None:
        self.model = build_model()
        for layer, is_trained in start.items():
            self.model[layer].requires_grad_(is_trained)

    def step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


class Freezing(Callback):
    """Follows a plan; what it did before an interruption it does not do again."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.trained: list[list[int]] = Record()

    def on_epoch_start(self) -> None:
        done = self.state.global_step
        if self.state.train_step > 0:
            return
        for layer, is_trained in self.plan.get(done, {}).items() if done else ():
            self.module.unwrapped_model[layer].requires_grad_(is_trained)

    def on_before_optimizer_step(self) -> None:
        layers = self.module.unwrapped_model
        self.trained.append([layer for layer in (0, 2, 4) if layers[layer].weight.grad is not None])


class StopAt(Callback):
    def __init__(self, update: int) -> None:
        self.update = update

    def on_before_optimizer_step(self) -> None:
        if self.state.global_step == self.update:
            raise InterruptedError


def train(folder: Path, plan: Plan, *, stop: int | None = None, **settings: Any) -> dict[str, Any]:
    callbacks = [freezing := Freezing(plan), ema := EMA(0.5), *([] if stop is None else [StopAt(stop)])]
    trainer = Trainer(
        {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "optim": {"type": "AdamW", "lr": LR}},
        folder / "model",
        **{
            "resume": "auto",
            "checkpoint_every": "step",
            "grad_accumulation_steps": ACCUMULATION,
            "model_saving": None,
            "shuffle_train": False,
            "seed": 5,
            "verbose": False,
            "logging_dir": folder,
            "callbacks": callbacks,
            **settings,
        },
    )
    module = Regression(plan.get(0, {}))
    with contextlib.suppress(InterruptedError):
        trainer.fit(module, make_points())
    weights = {name: weight.tolist() for name, weight in module.unwrapped_model.state_dict().items()}
    averages = {name: average.tolist() for name, average in sorted(ema.average.items())}
    return {"every": gather_objects(weights), "averages": averages, "trained": freezing.trained}


class OnOneProcess(Callback):
    def on_epoch_start(self) -> None:
        if self.state.epoch == 1 and os.environ["RANK"] == "0":
            self.module.unwrapped_model[0].requires_grad_(False)


class InAStep(Regression):
    def training_step(self, batch: Any) -> torch.Tensor:
        self.unwrapped_model[0].requires_grad_(self.state.epoch > 0)
        return self.step(batch)


class Hooked(Regression):
    """Has its gradients averaged by a function of its own, and notes at which updates."""

    def on_fit_start(self) -> None:
        self.averaged_at: list[int] = Record()
        self.model.register_comm_hook(self, note_and_average)


def note_and_average(module, bucket):  # torch takes annotations that are texts for wrong ones
    module.averaged_at.append(module.state.global_step)
    return default_hooks.allreduce_hook(None, bucket)


def train_otherwise(how: str, folder: Path) -> None:
    hps = {"epochs": 2, "batch_size": BATCH_SIZE, "optim": "SGD"}
    freezing = Freezing({3: {0: True, 2: True}}) if how == "hooked" else OnOneProcess()
    kinds = {"one-process": Regression({}), "in-a-step": InAStep({0: False}), "hooked": Hooked({0: False, 2: False})}
    module = kinds[how]
    trainer = Trainer(hps, folder / "model", logging_dir=folder, callbacks=freezing, model_saving=None)
    trainer.fit(module, Subset(make_points(), range(12)))  # whole batches: else some process has none at the end
    if is_main_process():
        sys.stdout.write(f"averaged at {sorted(set(module.averaged_at))}\n")


def main(result: str, folder: str) -> None:
    if not result.endswith(".json"):
        train_otherwise(result, Path(folder))
        return
    outcomes = {}
    for name, plan in PLANS.items():
        place, settings = Path(folder) / name, SETTINGS.get(name, {})
        unbroken = train(place / "unbroken", plan, **settings)
        train(place / "broken", plan, stop=STOP, **settings)
        outcomes[name] = {"unbroken": unbroken, "continued": train(place / "broken", plan, **settings)}
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
