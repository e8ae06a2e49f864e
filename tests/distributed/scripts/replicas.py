"""Trains programs that draw or change weights outside of the training step, and writes what each process ends with.

PYTHONPATH=. torchrun --nproc-per-node 2 replicas.py RESULT.json FOLDER CASE ...
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer
from accmt.errors import AccmtError
from accmt.processes import gather_objects, is_main_process, process_index
from accmt.sharded_tensors import is_dtensor, make_whole
from tests.distributed.scripts.sharded import Texts, make_texts
from tests.toys import make_points

STEPS = 6


class Points(AcceleratorModule):
    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)) if model is None else model

    def step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


def add_noise(model: nn.Module) -> None:
    """Draw from each of the generators that a program may use."""
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(()) + float(np.random.normal()) + random.random()  # noqa: NPY002
            weight.add_(float(noise), alpha=0.01)


class Noise(Callback):
    """Changes the weights at one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda: add_noise(self.module.unwrapped_model))


class GradientNoise(Callback):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad.add_(torch.randn_like(weight), alpha=0.1)


class Drop(Callback):
    """Leaves a layer out of a step, as DINO does in its first epoch."""

    def on_after_backward(self) -> None:
        self.module.unwrapped_model[2].weight.grad = None


class Langevin(torch.optim.SGD):
    """Stochastic gradient Langevin dynamics: each step adds noise."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.add_(torch.randn_like(weight), alpha=0.01)
        return result


class Change(Callback):
    """Changes something on one process, at one step."""

    def __init__(self, change: Callable[[Any], None], step: int, process: int = 1) -> None:
        self._change = change
        self._step = step
        self._process = process

    def on_after_optimizer_step(self) -> None:
        if self.state.global_step + 1 == self._step and process_index() == self._process:
            with torch.no_grad():
                self._change(self.trainer.run)


def change_weight(run: Any) -> None:
    own = [weight for name, weight in run.unwrapped_model.named_parameters() if name in ("2.bias", "model.norm.weight")]
    own_part = own[0].to_local() if is_dtensor(own[0]) else own[0]
    own_part.view(-1)[0] += 1e-3


def swap_weights(run: Any) -> None:
    own = next(iter(run.unwrapped_model.parameters())).view(-1)
    own[:2] = own[:2].flip(0).clone()


def change_state(run: Any) -> None:
    next(iter(run.stepper.optimizer.state.values()))["exp_avg"].view(-1)[0] += 1e-3


def change_rate(run: Any) -> None:
    run.stepper.optimizer.param_groups[0]["lr"] *= 2


class OwnBackward(Points):
    def step(self, batch: Any) -> torch.Tensor:
        loss = super().step(batch)
        if self.model.training:
            (0.5 * loss).backward(retain_graph=True)
        return loss


class Unused(nn.Module):
    """Has a layer that the loss does not depend on, as BERT's pooler is for most losses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.pooler, self.uses_all = nn.Linear(3, 1), nn.Linear(3, 3), False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(self.pooler(inputs) if self.uses_all else inputs)


class UnusedLater(Points):
    def __init__(self) -> None:
        super().__init__(Unused())

    def training_step(self, batch: Any) -> torch.Tensor:
        self.unwrapped_model.uses_all = self.state.global_step < 3
        return self.step(batch)


RARE: dict[str, Any] = {"checkpoint_every": None, "evaluate_every_n_steps": "6 steps"}  # when replicas are compared
FINDING = {"parallelism": {"ddp": {"find_unused_parameters": True}}}


class Manual(ExtendedAcceleratorModule):
    """Draws after its optimizer step: what a process draws for its own batch differs from the others'."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.drawn: list[float] = []

    def training_step(self, batch: Any) -> None:
        self.zero_grad()
        self.backward(nn.functional.mse_loss(self.model(batch[0]), batch[1]))
        self.step_optimizer()
        self.drawn.append(torch.rand(()).item())

    def validation_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])


class BatchNorm(Points):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def run_case(name: str, folder: Path) -> list[dict[str, Any]]:
    """Train one case, and return what every process has then, or the error."""
    kind, _, hook = name.rpartition(" noise in ")
    if hook.startswith("on_"):
        module, callbacks, optim, settings = Texts() if kind == "texts" else Points(), [Noise(hook)], "AdamW", {}
    else:
        module, callbacks, optim, settings = CASES[name]()
    hps = {"max_steps": STEPS, "batch_size": 2, "optim": {"type": optim, "lr": 0.01}}
    own: dict[str, Any] = {"model_saving": None, "checkpoint_every": "2 steps", "seed": 5, "verbose": False} | settings
    data = make_texts() if isinstance(module, Texts) else make_points(8)
    trainer = Trainer(hps, folder / name / "model", logging_dir=folder / "logs", callbacks=callbacks, **own)
    error = ""
    try:
        trainer.fit(module, data, data)
    except (AccmtError, RuntimeError) as raised:
        error = "\n".join([f"{type(raised).__name__}: {raised}", *getattr(raised, "__notes__", [])])
    facts = {
        "error": error,
        "weights": [make_whole(weight).tolist() for weight in module.model.parameters()],
        "checkpoints": sorted(path.name for path in (folder / name).glob("checkpoint-model/step-*")),
        "drawn": getattr(module, "drawn", []),
        "step": trainer.state.global_step,
    }
    return gather_objects(facts)


CASES: dict[str, Callable[[], tuple[Any, list[Callback], Any, dict[str, Any]]]] = {
    "gradient noise": lambda: (Points(), [GradientNoise()], "SGD", {}),
    "langevin": lambda: (Points(), [], Langevin, {}),
    "batch norm": lambda: (BatchNorm(), [], "AdamW", {}),
    "manual": lambda: (Manual(), [], Langevin, {"checkpoint_every": None}),
    "changed at once": lambda: (Points(), [Change(change_weight, 1)], "AdamW", {}),
    "changed later": lambda: (Points(), [Change(change_weight, 3)], "AdamW", {}),
    "swapped": lambda: (Points(), [Change(swap_weights, 5)], "AdamW", {"checkpoint_every": None}),
    "state": lambda: (Points(), [Change(change_state, 4)], "AdamW", {}),
    "rate": lambda: (Points(), [Change(change_rate, 4)], "AdamW", {}),
    "on purpose": lambda: (Points(), [Change(change_weight, 3)], "AdamW", {"failures": {"compare_replicas": False}}),
    "own backward": lambda: (OwnBackward(), [], "AdamW", {}),
    "max_norm": lambda: (Points(nn.Sequential(nn.Embedding(3, 4, max_norm=1.0))), [], "AdamW", {}),
    "dropped": lambda: (Points(), [Drop()], "AdamW", {}),
    "unused": lambda: (Points(Unused()), [], "AdamW", {}),
    "unused later": lambda: (UnusedLater(), [], "AdamW", RARE),
    "unused and found": lambda: (Points(Unused()), [], "AdamW", FINDING),
    "texts": lambda: (Texts(), [], "AdamW", {}),
    "texts changed": lambda: (Texts(), [Change(change_weight, 3, process=2)], "AdamW", {}),
    "split texts changed": lambda: (Texts(), [Change(change_weight, 3, process=1)], "AdamW", {}),
}


def main(result: str, folder: str, *names: str) -> None:
    results = {name: run_case(name, Path(folder)) for name in names}
    if is_main_process():
        Path(result).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
