"""Trains on data that a user's DistributedSampler shares, or of which one process loses a whole batch.

torchrun --nproc-per-node 2 own_data.py RESULT.json FOLDER sampler|nothing
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, default_collate

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer
from accmt.processes import gather_objects, is_main_process, num_processes, process_index
from tests.toys import Record

NUMBERS = TensorDataset(torch.arange(48.0)[:, None])
HPS = {"epochs": 2, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}


class Seeing(AcceleratorModule):
    """Notes the samples that it trains on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(1, 1)
        self.seen: list[int] = Record()

    def step(self, batch: Any) -> torch.Tensor:
        self.seen += batch[0][:, 0].int().tolist()
        return (self.model(batch[0] / 48) - 1).square().mean()


def train(folder: Path, hps: dict[str, Any], **settings: Any) -> tuple[list[int], list[float], int]:
    """Train on a DistributedSampler, and return samples, weights and the count of samples."""
    here = PartialState(cpu=True)
    sampler = DistributedSampler(NUMBERS, num_replicas=here.num_processes, rank=here.process_index, seed=5)
    module = Seeing()
    trainer = Trainer({**HPS, **hps}, folder / "m", model_saving=None, logging_dir=folder, verbose=False, **settings)
    state = trainer.fit(module, DataLoader(NUMBERS, 4, sampler=sampler))
    weights = torch.cat([p.detach().flatten() for p in module.model.parameters()]).tolist()
    return module.seen, weights, state.samples_seen


def resume_within_an_epoch(folder: Path) -> dict[str, Any]:
    """Train without a break, and with one in the middle of an epoch."""
    whole = train(folder / "whole", {}, seed=1)
    first = train(folder / "part", {"max_steps": 3}, seed=1, checkpoint_every="1 step")
    second = train(folder / "part", {}, seed=1, checkpoint_every="1 step", resume=True)
    return {"whole": gather_objects(whole), "parts": gather_objects((first, second)), "processes": num_processes()}


def drop_on_last_process(samples: list[Any]) -> Any:
    """Leave nothing of a batch, on one process."""
    is_lost = process_index() == num_processes() - 1 and any(int(sample[0]) >= 24 for sample in samples)
    return None if is_lost else default_collate(samples)


def main() -> None:
    """Run what is asked for and write the results."""
    result, folder, case = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    if case == "nothing":
        settings = {"model_saving": None, "logging_dir": folder, "shuffle_train": False}
        trainer = Trainer(HPS, folder / "m", collate_fn=drop_on_last_process, **settings)
        trainer.fit(Seeing(), NUMBERS)
    outcome = resume_within_an_epoch(folder)
    if is_main_process():
        result.write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
