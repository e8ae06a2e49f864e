"""What a run keeps besides model and optimizer, on each process: states of its own, shared buffers, closures."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer
from accmt.processes import gather_objects, is_main_process, process_index


def make_points(count: int = 24) -> TensorDataset:
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(module: Any, path: Path, epochs: int, data: Any = None, **settings: Any) -> Any:
    hps = {
        "epochs": epochs,
        "batch_size": 8 // int(os.environ.get("WORLD_SIZE", 1)),
        "optim": {"type": "SGD", "lr": 0.05},
    }
    Trainer(hps, path, seed=0, verbose=False, model_saving=None, checkpoint_every="epoch", **settings).fit(
        module, make_points() if data is None else data
    )
    return module


class Carried(AcceleratorModule):
    """Carries something of each process's batches on, as a recurrent network its hidden state."""

    process_state = ("hidden",)

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.hidden = torch.zeros(3)

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        self.hidden = 0.5 * self.hidden + inputs.mean(0)
        return nn.functional.mse_loss(self.model(inputs + self.hidden), targets)


class Counting(Callback):
    """Counts other things on each process."""

    process_state = ("count",)

    def __init__(self) -> None:
        self.count = self.losses = 0

    def on_update_end(self) -> None:
        self.count += 1 + process_index()
        self.losses += 1 + process_index()


def carried(folder: Path) -> Any:
    """Return what each process has at the end of a whole and of a resumed run."""

    def run(name: str, epochs: int, **settings: Any) -> list[Any]:
        counting = Counting()
        module = train(Carried(), folder / name, epochs, callbacks=counting, **settings)
        return [module.hidden.tolist(), module.model.weight.tolist(), counting.count]

    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger("accmt")
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING)
    whole = run("whole", 2)
    logger.removeHandler(handler)
    logger.setLevel(logging.ERROR)
    run("part", 1)
    return {"whole": gather_objects(whole), "resumed": gather_objects(run("part", 2, resume=True)), "said": said}


class Views(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.register_buffer("scale", torch.zeros(3))
        views = {"same": self.scale, "view": self.scale[1:], "expanded": self.scale.expand(4, 3)}
        self.register_buffer("view", views[kind])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale.add_(inputs.detach().mean(0))
        return self.head(inputs) * (1 + self.view.mean())


class WithViews(Carried):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.model = Views(kind)


def views(folder: Path) -> Any:
    """Return which buffers still share their memory, and their values, whole and resumed."""
    found = {}
    for kind in ("same", "view", "expanded"):
        outcomes = []
        for name, epochs, resume in (("a", 2, False), ("b", 1, False), ("b", 2, True)):
            torch.manual_seed(0)
            model = train(WithViews(kind), folder / f"{kind}-{name}", epochs, resume=resume).model
            is_shared = model.view.untyped_storage().data_ptr() == model.scale.untyped_storage().data_ptr()
            outcomes.append([is_shared, model.scale.tolist(), model.head.weight.tolist()])
        found[kind] = gather_objects([outcomes[0], outcomes[2]])
    return found


class ByLBFGS(ExtendedAcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def get_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch

        def closure() -> torch.Tensor:
            self.zero_grad()
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.backward(loss)
            return loss

        return self.optimizer.step(closure)


def lbfgs(folder: Path) -> Any:
    """Return each process's weights."""
    module = train(ByLBFGS(), folder / "lbfgs", 1, shuffle_train=False)
    return gather_objects(module.model.weight.tolist())


class Local(ExtendedAcceleratorModule):
    """Trains a replica on each process, without averaging."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def get_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.unwrapped_model(batch[0]), batch[1])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def replicas(folder: Path) -> Any:
    """Return the weights of each process's replica, of a whole and of a resumed run."""
    settings: dict[str, Any] = {"failures": {"compare_replicas": False}}
    whole = train(Local(), folder / "local-a", 2, **settings).model.weight.tolist()
    train(Local(), folder / "local-b", 1, **settings)
    resumed = train(Local(), folder / "local-b", 2, resume=True, **settings).model.weight.tolist()
    return {"whole": gather_objects(whole), "resumed": gather_objects(resumed)}


def main(result: str, folder: str) -> None:
    logging.getLogger("accmt").setLevel(logging.ERROR)
    outcomes = {case.__name__: case(Path(folder)) for case in (carried, views, lbfgs, replicas)}
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
