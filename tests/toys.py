"""Small modules, data and trainers for tests."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset, get_worker_info

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, Trainer
from accmt.callbacks import HOOKS
from accmt.checks import Facts
from accmt.checks.table import STAGES, find_engine

HPS = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}


def make_points(count: int = 8) -> TensorDataset:
    """Make points `[3]` and the targets of a linear function."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 3, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


class Numbers(Dataset[torch.Tensor]):
    """The numbers 0, 1, 2 ... as samples, or given ones."""

    def __init__(self, values: int | Sequence[float]) -> None:
        self.values = list(range(values)) if isinstance(values, int) else list(values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(self.values[index]))

    def __len__(self) -> int:
        return len(self.values)


class Stream(IterableDataset[Any]):
    """Samples that can only be read from the start; the workers of a DataLoader share them, as torch asks.

    Attributes:
        num_read: How many were read.
        epochs: The epochs that it was told.
    """

    def __init__(self, values: int | Iterable[Any]) -> None:
        self.values = range(values) if isinstance(values, int) else values
        self.num_read = 0
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for value in islice(iter(self.values), first, None, step):
            self.num_read += 1
            yield value

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class SizedStream(Stream):
    """A stream that knows its length."""

    def __len__(self) -> int:
        return len(self.values)  # type: ignore[arg-type]


class Texts(Dataset[Any]):
    """Token ids of given lengths, each with a label and its index; counts how often each is read.

    Args:
        lengths: How many ids each has.
        draws: Whether each has a number of both random generators, too.
    """

    def __init__(self, lengths: Sequence[int], *, draws: bool = False) -> None:
        self.lengths_of_texts, self.draws = lengths, draws
        self.reads: Counter[int] = Counter()

    def __getitem__(self, index: int) -> dict[str, Any]:
        length = self.lengths_of_texts[index]
        self.reads[index] += 1
        ids = [1 + (index * 7 + place) % 30 for place in range(length)]
        sample = {"input_ids": ids, "label": index % 3, "index": index}
        return sample | {"noise": random.random() + float(torch.rand(()))} if self.draws else sample

    def __len__(self) -> int:
        return len(self.lengths_of_texts)


def pad_texts(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Collate texts, padded to the longest."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    others = {name: torch.tensor([sample[name] for sample in samples]) for name in samples[0] if name != "input_ids"}
    return {"input_ids": torch.tensor(rows), **others}


class Record(list[Any]):
    """A list of what a test saw; of a class of its own, so it is not part of checkpoints, as a plain list would be."""


class Linear(AcceleratorModule):
    """Fits a linear function."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)


class ByHand(ExtendedAcceleratorModule):
    """Fits a linear function, and makes its optimizer steps itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step_optimizer()
        self.zero_grad()
        return loss


class Scripted(AcceleratorModule):
    """Returns the mean of the numbers in a batch as its training loss, and scripted validation losses, one a pass.

    Attributes:
        seen: The numbers of each training batch.
        validated: The numbers of each validation batch.
    """

    def __init__(self, val_losses: Sequence[float] = ()) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.val_losses = list(val_losses)
        self.seen: list[list[float]] = Record()
        self.validated: list[list[float]] = Record()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append(batch.tolist())
        return batch.mean() + 0 * self.model.weight.sum()

    def validation_step(self, batch: torch.Tensor) -> torch.Tensor:
        self.validated.append(batch.tolist())
        if not self.val_losses:
            return batch.mean()
        return torch.tensor(float(self.val_losses[self.state.evaluations_done]))


class Recorder(Callback):
    """Writes down every hook, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = Record()
        self.rows: list[tuple[int, dict[str, float]]] = Record()

    def names(self, *only: str) -> list[str]:
        """Return the hooks called, or those of `only`."""
        return [name for name in self.calls if not only or name in only]


class InterruptionError(Exception):
    """What ends a run before its time."""


class InterruptAt(Callback):
    """Ends a run inside the window after an optimizer step.

    Args:
        update: Steps done before; None means never.
    """

    def __init__(self, update: int | None) -> None:
        self.update = update

    def on_after_backward(self) -> None:
        if self.state.global_step == self.update:
            raise InterruptionError


def _make_hook(name: str) -> Any:
    def hook(self: Recorder, **data: Any) -> None:
        self.calls.append(name)
        if name == "on_log":
            self.rows.append((data["step"], dict(data["values"])))

    return hook


for _name in HOOKS:
    setattr(Recorder, _name, _make_hook(_name))


def make_trainer(hps: dict[str, Any] | None = None, model_path: str = "out/model", **settings: Any) -> Trainer:
    """Make a quiet trainer without checkpoints, which saves no model unless told to."""
    settings = {"model_saving": None, "checkpoint_every": None, "verbose": False, "seed": 0, **settings}
    return Trainer({**HPS, **(hps or {})}, model_path, **settings)


def logged(trainer: Trainer, name: str) -> list[tuple[int, float]]:
    """Return the (step, value) pairs of one name in the run's history."""
    from accmt import read_history

    rows = [row for row in read_history(trainer.log_dir) if "values" in row]
    return [(row["step"], row["values"][name]) for row in rows if name in row["values"]]


def check_module(module: Any, *, sets: dict[str, Any] | None = None) -> None:
    """Run the checks of a module, as `fit` does once it has the sets to evaluate."""
    settings = make_trainer().settings
    facts = Facts(settings=settings, module=module)
    facts.sets = sets or {}
    for row in STAGES["inputs"]:
        if row.subject == "module" and row.check is not find_engine:
            row.check(facts)
