"""Whole runs with evaluation, metrics, saving and callbacks; writes what each process saw.

torchrun --nproc-per-node 2 runs.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import tests.many_runs  # noqa: F401
from accmt import (
    SWA,
    AcceleratorModule,
    Accuracy,
    Callback,
    MainProcessCallback,
    Trainer,
    on_main_process,
    read_history,
)
from accmt.processes import gather_objects, is_main_process, process_index


def make_points(count: int, seed: int = 0) -> TensorDataset:
    """Make points `[4]` with one of three labels."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


class RunningMean(nn.Module):
    """Subtracts the mean of the features seen in training, which each process sees others of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(features.detach().mean(0), 0.1)
        return features - self.mean.clone()


class Classifier(AcceleratorModule):
    """A small classifier, with or without buffers."""

    def __init__(self, *, has_buffers: bool = False) -> None:
        torch.manual_seed(0)
        middle = RunningMean() if has_buffers else nn.Identity()
        self.model = nn.Sequential(nn.Linear(4, 8), middle, nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.model(inputs), labels)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        inputs, labels = batch
        scores = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(scores, labels), "accuracy": (scores.argmax(-1), labels)}


class Everywhere(Callback):
    """Counts evaluations on every process, and adds a value that differs."""

    count = 0

    def on_evaluation_end(self, metrics: dict[str, float]) -> None:
        self.count += 1
        metrics["process"] = float(process_index())


class OnMain(MainProcessCallback):
    """Counts evaluations on the main process only, and adds a value that the others do not have."""

    count = 0

    def on_evaluation_end(self, metrics: dict[str, float]) -> None:
        self.count += 1
        metrics["on_main"] = torch.tensor(-float(self.count))


def train(folder: Path) -> dict[str, Any]:
    """Train with everything on and return what happened."""
    hps = {
        "epochs": 2,
        "batch_size": 4,
        "optim": {"type": "AdamW", "lr": 0.01},
        "scheduler": {"type": "LinearWithWarmup", "warmup_ratio": 0.2},
    }
    everywhere, on_main = Everywhere(), OnMain()
    trainer = Trainer(
        hps,
        folder / "model",
        model_saving="best_accuracy",
        checkpoint_every=None,
        logging_dir=folder / "logs",
        log_with="tensorboard",
        metrics=[Accuracy(), {"on_main": "min"}],
        patience={"on_main": 1},
        callbacks=[everywhere, on_main],
        seed=5,
        clip_grad=1.0,
        verbose=False,
    )
    module = Classifier(has_buffers=True)
    state = trainer.fit(module, make_points(29), make_points(9, seed=1))
    weights = torch.cat([tensor.flatten() for tensor in module.model.state_dict().values()]).tolist()
    every = gather_objects(
        (
            weights,
            everywhere.count,
            on_main.count,
            trainer.is_main,
            trainer.is_distributed,
            str(trainer.log_dir),
            state.metrics,
        )
    )
    return {
        "every": every,
        "state": state.state_dict(),
        "best": dict(state.best),
        "lr": module.optimizer.param_groups[0]["lr"],
        "rows": len([row for row in read_history(trainer.log_dir) if "values" in row]) if trainer.is_main else 0,
    }


class Normalized(AcceleratorModule):
    """Normalizes its inputs, and keeps the mean of each micro-batch of the last epoch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
        self.means: list[list[float]] = []
        self.statistics: list[list[float]] = []

    def on_epoch_start(self) -> None:
        self.means.clear()

    def on_after_training_step(self, batch: Any) -> None:
        self.means.append(batch[0].mean(0).tolist())

    def training_step(self, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: Any) -> torch.Tensor:
        self.statistics.append(self.model[0].running_mean.tolist())
        return self.training_step(batch)


def average_weights(folder: Path) -> list[Any]:
    """Return the means of all micro-batches of an epoch, and those that the batch norm of an average has."""
    hps = {"epochs": 2, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
    settings: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "verbose": False, "seed": 1}
    module = Normalized()
    trainer = Trainer(hps, folder / "swa", callbacks=SWA(0), logging_dir=folder, **settings)
    trainer.fit(module, make_points(20), make_points(13))
    return gather_objects((module.means, module.statistics[-1]))


class ReductionCounter(Callback):
    """Counts the gradient reductions of DistributedDataParallel."""

    count = 0

    def on_fit_start(self) -> None:
        if isinstance(self.module.model, nn.parallel.DistributedDataParallel):
            self.module.model.register_comm_hook(None, self.reduce)

    def reduce(self, state, bucket):  # torch looks at annotations here, and refuses their text
        self.count += 1
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda future: future.value()[0] / torch.distributed.get_world_size())


def count_reductions(folder: Path) -> tuple[int, int]:
    """Return how often gradients were reduced, and the updates, with four batches an update."""
    counter = ReductionCounter()
    quiet = {"model_saving": None, "checkpoint_every": None, "logging_dir": folder, "verbose": False}
    hps = {"epochs": 2, "batch_size": 2, "optim": "SGD"}
    trainer = Trainer(hps, folder / "none", grad_accumulation_steps=4, callbacks=counter, **quiet)
    state = trainer.fit(Classifier(), make_points(24))
    return counter.count, state.global_step


def train_different_models(folder: Path) -> dict[str, list[str]]:
    """Return what each process says of a model that differs from the main process's in a type, a shape or a name."""
    changes: dict[str, Callable[[nn.Sequential], Any]] = {
        "type": lambda model: model[-1].double(),
        "shape": lambda model: model.__setitem__(-1, nn.Linear(3, 7)),
        "name": lambda model: model.append(nn.Linear(1, 1)),
    }
    said = {}
    for name, change in changes.items():
        module = Classifier()
        if process_index() > 0:
            change(module.model)
        hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
        own: dict[str, Any] = {"model_saving": None, "checkpoint_every": None, "logging_dir": folder, "verbose": False}
        try:
            Trainer(hps, folder / "none", **own).fit(module, make_points(8))
            said[name] = gather_objects("nothing")
        except TypeError as error:
            said[name] = gather_objects(str(error))
    return said


class Evading(Classifier):
    """Goes around the wrapper that reduces gradients."""

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.unwrapped_model(inputs), labels)


def evade_reduction(folder: Path) -> list[str]:
    """Return what each process raised when the step did not call the wrapped model."""
    hps = {"epochs": 1, "batch_size": 4, "optim": "SGD"}
    trainer = Trainer(hps, folder / "e", model_saving=None, checkpoint_every=None, logging_dir=folder, verbose=False)
    try:
        trainer.fit(Evading(), make_points(24))
    except TypeError as error:
        return gather_objects(str(error))
    return gather_objects("nothing")


def fail_on_main(folder: Path) -> list[str]:
    """Let saving fail on the main process, and return what each process raised."""
    (folder / "blocked").mkdir(parents=True, exist_ok=True)
    (folder / "blocked" / "model.safetensors").mkdir(exist_ok=True)
    hps = {"epochs": 1, "batch_size": 4, "optim": "SGD"}
    trainer = Trainer(
        hps, folder / "blocked", model_saving="always", checkpoint_every=None, logging_dir=folder, verbose=False
    )
    try:
        trainer.fit(Classifier(), make_points(8))
    except OSError as error:
        return gather_objects(type(error).__name__)
    return gather_objects("nothing")


def part(folder: Path) -> dict[str, Any]:
    """Train in a `with` block, and return what a process is after it, and what it raises when it trains once more."""
    acted: list[str] = []
    act = on_main_process(lambda: acted.append("main"))
    hps = {"epochs": 1, "batch_size": 4, "optim": "SGD"}
    trainer = Trainer(hps, folder / "p", model_saving=None, checkpoint_every=None, logging_dir=folder, verbose=False)
    with trainer:
        updates = trainer.fit(Classifier(), make_points(24)).global_step
        act()
    act()
    seen = {"updates": updates, "group": dist.is_initialized(), "is_main": trainer.is_main, "acted": len(acted)}
    trainer.close()
    try:
        trainer.fit(Classifier(), make_points(24))
    except ValueError as error:
        return {**seen, "again": str(error)}
    return {**seen, "again": "trained"}


def main() -> None:
    """Run everything and write the results."""
    folder = Path(sys.argv[2])
    results = {
        "training": train(folder),
        "averages": average_weights(folder),
        "reductions": count_reductions(folder),
        "models": train_different_models(folder),
        "evasion": evade_reduction(folder),
        "failure": fail_on_main(folder),
    }
    index = process_index()
    (folder / f"parted-{index}.json").write_text(json.dumps(part(folder)))
    if is_main_process():
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
