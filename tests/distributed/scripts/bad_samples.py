"""Trains and evaluates on data of which some samples cannot be read, on one process or many.

torchrun --nproc-per-node 2 bad_samples.py RESULT.json
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from accmt import Trainer, read_history
from accmt.processes import gather_objects, is_main_process, num_processes
from tests.distributed.scripts.windows import (
    BATCH_SIZE,
    LR,
    GradientRecorder,
    Regression,
    Samples,
    compute_loss,
    own_samples,
)
from tests.pairs import pairs

SAMPLES = 29
BAD = {
    "here and there": [1, 5, 20, 28],
    "all of a batch": [1, *range(8, 12), *range(16, 24), 27],  # of one process, and of all
    "the first": list(range(8)),
}
OF_EACH = ("unshared", "shared by a sampler")
"""Data of which each process has a part of its own."""


@dataclass(frozen=True)
class Case:
    """One run of the grid."""

    bad: str
    accumulation: int
    weighted: bool = False
    data: str = "sized"
    workers: int = 0
    epochs: int = 2

    @property
    def name(self) -> str:
        return "-".join(f"{key}={value}" for key, value in asdict(self).items())


def make_cases() -> list[Case]:
    """Return the grid."""
    cases = [Case(bad, a, w) for bad, a, w in pairs(BAD, (1, 2, 4), (False, True))]
    cases += [Case(bad, 2, data=data) for bad, data in itertools.product(BAD, ("loader", *OF_EACH))]
    return [*cases, Case(next(iter(BAD)), 2, workers=2)]


class Unreadable(Samples):
    """Samples of which some cannot be read."""

    def __init__(self, indices: Sequence[int], bad: str) -> None:
        super().__init__(indices)
        self.bad = set(BAD[bad])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.indices[index] in self.bad:
            raise KeyError(f"sample {self.indices[index]}")
        return super().__getitem__(index)


class Evaluated(Regression):
    """Returns the loss of validation batches too."""

    def validation_step(self, batch: Any) -> torch.Tensor:
        return compute_loss(self.model, batch, weighted=False)[0]


def samples_of(case: Case, process: int, processes: int) -> list[int]:
    """Return the samples of a process that has a part of its own; a sampler gives some twice."""
    if case.data == "unshared":
        return own_samples(SAMPLES, process, processes)
    return list(DistributedSampler(range(SAMPLES), processes, process, shuffle=False))


def place() -> tuple[int, int]:
    """Return this process and how many there are, before there is a group."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def make_data(case: Case) -> Any:
    """Return the case's data in the form it asks for."""
    if case.data == "unshared":
        return Unreadable(samples_of(case, *place()), case.bad)
    samples = Unreadable(range(SAMPLES), case.bad)
    return DataLoader(samples, BATCH_SIZE) if case.data == "loader" else samples


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Train one case and return what its updates were made of."""
    recorder, process, processes = GradientRecorder(), *place()
    by_sampler = {"sampler": DistributedSampler(range(SAMPLES), processes, process, shuffle=False)}
    trainer = Trainer(
        {"epochs": case.epochs, "batch_size": BATCH_SIZE, "optim": {"type": "SGD", "lr": LR}},
        folder / "model",
        model_saving=None,
        checkpoint_every=None,
        logging_dir=folder,
        grad_accumulation_steps=case.accumulation,
        shuffle_train=False,
        data_options={"shard": case.data != "unshared"},
        dataloader_num_workers=case.workers,
        callbacks=recorder,
        verbose=False,
        failures={"on_bad_sample": "skip"},
        **(by_sampler if case.data == "shared by a sampler" else {}),
    )
    module = Evaluated(weighted=case.weighted)
    state = trainer.fit(module, make_data(case), None if case.data in OF_EACH else make_data(case))
    weights = torch.cat([p.detach().flatten() for p in module.model.parameters()]).tolist()
    every = gather_objects((recorder.gradients, state.state_dict(), weights, state.metrics))
    rows = [row["values"] for row in read_history(trainer.log_dir) if "values" in row] if is_main_process() else []
    return {
        "gradients": recorder.gradients,
        "rows": rows,
        "state": state.state_dict(),
        "metrics": state.metrics,
        "weights": weights,
        "processes_agree": all(other == every[0] for other in every),
        "processes": num_processes(),
    }


def main() -> None:
    """Run the grid and write the results."""
    with tempfile.TemporaryDirectory() as folder:
        results = {case.name: run_case(case, Path(folder) / str(i)) for i, case in enumerate(make_cases())}
    if is_main_process():
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
