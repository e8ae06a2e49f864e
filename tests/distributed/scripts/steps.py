"""What each process does in its steps, where processes differ; writes what they saw.

torchrun --nproc-per-node 2 steps.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, ExtendedAcceleratorModule
from accmt.errors import ModuleContractError
from accmt.metrics import RunningAverages
from accmt.processes import acting_alone, gather_objects, is_main_process, num_processes
from tests.toys import Linear, Numbers, logged, make_points, make_trainer

EPOCHS = 3


class Drawing(AcceleratorModule):
    """Draws as dropout does."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1)
        self.drawn: list[float] = []

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand(()).item())
        return self.model(batch[:, None]).mean()

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand(()).item())
        return batch


class Uneven(ExtendedAcceleratorModule):
    """Learns the mean of the samples, whose batches are of unequal size."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)

    def training_step(self, batch: torch.Tensor) -> None:
        self.backward(self.model(batch[:, None]).mean())
        self.step()


class Weighted(Uneven):
    """Learns the mean of the samples above 1: each batch weighs as many as it has."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.late = late

    def training_step(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        is_counted = (batch > 1).float()
        loss = (self.model(batch[:, None]).squeeze(1) * is_counted).sum() / is_counted.sum().clamp(min=1)
        self.backward(loss, None if self.late else is_counted.sum())
        self.step()
        return {"loss": loss + batch.max(), "weight": is_counted.sum()}


def learn_weighted() -> list[Any]:
    """Take one step on batches of two samples, of which one more counts on process 0; give weight and logged loss."""
    values = [6.0, 3.0] + [0.0, 9.0] * (num_processes() - 1)
    trainer = make_trainer({"optim": {"type": "SGD", "lr": 1.0}}, shuffle_train=False)
    trainer.fit(module := Weighted(), Numbers(values))
    trainer_of_late = make_trainer({"optim": {"type": "SGD", "lr": 1.0}}, shuffle_train=False)
    try:
        trainer_of_late.fit(Weighted(late=True), Numbers(values))
        error = ""
    except ModuleContractError as caught:
        error = str(caught)
    row = [value for _, value in logged(trainer, "train_loss")] if is_main_process() else []
    return [float(module.model.weight), row, error]


class Direct(Uneven):
    """Calls backward of the loss itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def training_step(self, batch: torch.Tensor) -> None:
        self.model(batch[:, None]).mean().backward()
        if self.how == "own step":
            self.optimizer.step()
        else:
            self.step()


class Second(Uneven):
    """Makes a second step, without gradients of its own."""

    def training_step(self, batch: torch.Tensor) -> None:
        self.optimizer.step()  # before there are any
        self.backward(self.model(batch[:, None]).mean())
        self.step()
        self.step()


def find_warnings() -> dict[str, int]:
    """Return, for each kind of manual step, how many warnings say that its batches are not weighted."""
    kinds = {how: Direct(how) for how in ("step", "own step")} | {"both": Second(), "as documented": Uneven()}
    said: dict[str, list[str]] = {how: [] for how in kinds}
    for how, module in kinds.items():
        handler = logging.Handler()
        handler.emit = lambda record, lines=said[how]: lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("accmt").addHandler(handler)
        make_trainer({"epochs": 2}).fit(module, Numbers([1.0] * 4 * num_processes()))
        logging.getLogger("accmt").removeHandler(handler)
    return {how: sum("call self.backward(loss)" in line for line in lines) for how, lines in said.items()}


class Leaving(AcceleratorModule):
    """Leaves out batches without a number above 0: some before the model is called, some after it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: torch.Tensor) -> torch.Tensor | None:
        if (batch < 0).all():
            return None
        outputs = self.model(batch[:, None])
        if (batch == 0).all():
            return None
        return (outputs - 1).square().mean()


# Windows of six batches of one sample: all kept, some left out, all left out, a short one.
LEAVING = [[1, 2, 3, 4, 5, 6], [-1, 2, 0, 4, -1, 0], [-1, 0, -1, -1, 0, -1], [1, -1, 3, 4]]


def leave_out() -> list[Any]:
    """Train on windows of six samples, of which some are left out; give the weights and the counts."""
    values = [value for window in LEAVING for value in window]
    accumulation = {"grad_accumulation_steps": 6 // num_processes()}
    trainer = make_trainer({"batch_size": 1, "epochs": 2}, shuffle_train=False, **accumulation)
    state = trainer.fit(module := Leaving(), Numbers(values))
    weights = torch.cat([weight.detach().flatten() for weight in module.model.parameters()]).tolist()
    row = logged(trainer, "skipped_batches")[-1:] if is_main_process() else []
    return [weights, state.skipped_batches, state.skipped_steps, state.samples_seen, row]


def draw() -> list[float]:
    """Return what one process draws in training, in one evaluation, and in predictions: two batches of each."""
    data = Numbers(4 * int(os.environ["WORLD_SIZE"]))
    trainer = make_trainer({"epochs": EPOCHS}, evaluate_every_n_steps=f"{EPOCHS} epochs", num_sanity_val_steps=0)
    trainer.fit(module := Drawing(), data, data)
    trainer.predict(module, data)
    return module.drawn


def learn_unevenly() -> float:
    """Take one step of rate 1 on samples of which process 0 has one more than the others."""
    values = [6.0] + [0.0] * (2 * num_processes() - 2)
    trainer = make_trainer({"optim": {"type": "SGD", "lr": 1.0}}, shuffle_train=False)
    trainer.fit(module := Uneven(), Numbers(values))
    return float(module.model.weight)


class Spectrum(nn.Module):
    """Has a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 1, dtype=torch.complex64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.to(torch.complex64) @ self.weight).abs()


def learn_complex() -> list[float]:
    """Train a complex parameter on batches of six samples over all processes."""
    module = Linear()
    module.model = Spectrum()
    make_trainer({"batch_size": 6 // num_processes()}, shuffle_train=False).fit(module, make_points(12))
    return torch.view_as_real(module.model.weight.detach()).flatten().tolist()


def continue_row() -> dict[str, float]:
    """Add values of each process to those that a run of one process had not logged yet."""
    window = RunningAverages()
    with acting_alone():
        window.add(torch.tensor(1.0), 2)
        state = window.state_dict()
    window = RunningAverages()
    window.load_state_dict(state)
    window.add(torch.tensor(4.0), 1)
    return window.take_row("loss")


def throughput() -> list[list[float]]:
    """Return what the rows say of samples and batches a second."""
    trainer = make_trainer({"batch_size": 4}, monitor={"throughput": True})
    trainer.fit(Linear(), make_points(16 * num_processes()))
    rows = [logged(trainer, name) for name in ("samples_per_s", "batches_per_s")] if is_main_process() else []
    return [[value for _, value in row] for row in rows]


def main(result: str, folder: str) -> None:
    os.chdir(folder)
    own: dict[str, Any] = {"drawn": draw(), "weight": learn_unevenly(), "row": continue_row(), "rates": throughput()}
    own["left_out"] = leave_out()
    own["complex"] = learn_complex()
    own["weighted"] = learn_weighted()
    own["warnings"] = find_warnings()
    every = gather_objects(own)
    if is_main_process():
        Path(result).write_text(json.dumps(every))


if __name__ == "__main__":
    main(*sys.argv[1:])
