"""Evaluates and predicts data of several kinds; writes which sample each position in the data was said to be.

torchrun --nproc-per-node 2 sample_indices.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Metric, Trainer
from accmt.processes import is_main_process

SAMPLES = 13
BAD = (4, 7)


class Rows(Dataset[Any]):
    """Rows of different lengths that begin with 100 more than their index; some cannot be read."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad = bad

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError("a truncated file")
        return {"input_ids": torch.full((1 + index * 5 % 7,), 100 + index)}

    def __len__(self) -> int:
        return SAMPLES


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Rows()[index] for index in range(SAMPLES))


def collate(rows: list[Any]) -> Any:
    ids = [row["input_ids"] for row in rows]
    return {"input_ids": torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)}


class Pairs(Metric):
    """Keeps which sample was said to be where; the results only say how many are right."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        found = sorted(zip(predictions.tolist(), references.tolist(), strict=True))
        return {"right": sum(value == 100 + index for index, value in found), "sum": sum(index for index, _ in found)}


class Reading(AcceleratorModule):
    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.is_none = False

    def validation_step(self, batch: Any) -> Any:
        indices, values = self.state.sample_indices, batch["input_ids"][:, 0]
        self.is_none |= indices is None
        return {"right": (values.new_tensor([-1] * len(values) if indices is None else indices), values)}

    def predict_step(self, batch: Any) -> Any:
        return [
            [index, row[0].item()] for index, row in zip(self.state.sample_indices, batch["input_ids"], strict=True)
        ]


def evaluate(data: Any, hps: dict[str, Any] | None = None, **settings: Any) -> Any:
    hps = {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}, **(hps or {})}
    trainer = Trainer(
        hps, "model", metrics=Pairs("right"), collate_fn=collate, seed=3, verbose=False, model_saving=None, **settings
    )
    module = Reading()
    results = trainer.validate(module, data)
    if module.is_none:
        return "none"
    predictions = trainer.predict(module, data)
    is_right = predictions is None or all(value == 100 + index for index, value in predictions)
    assert trainer.state.sample_indices is None
    return [results["right"], results["sum"], is_right]


def main(result: str, folder: str) -> None:
    os.chdir(folder)
    own = {
        "plain": evaluate(Rows()),
        "shuffled": evaluate(Rows(), shuffle_validation=True),
        "with workers": evaluate(Rows(), dataloader_num_workers=1),
        "cut by tokens": evaluate(Rows(), {"max_tokens": 14}),
        "bad": evaluate(Rows(BAD), failures={"on_bad_sample": "skip"}),
        "bad, cut by tokens": evaluate(Rows(BAD), {"max_tokens": 14}, failures={"on_bad_sample": "skip"}),
        "loader": evaluate(DataLoader(Rows(), 3, collate_fn=collate)),
        "shuffled loader": evaluate(DataLoader(Rows(), 3, sampler=RandomSampler(Rows()), collate_fn=collate)),
        "stream": evaluate(Stream()),
    }
    if is_main_process():
        Path(result).write_text(json.dumps(own))


if __name__ == "__main__":
    main(*sys.argv[1:])
