"""Sharded and split models whose processes hold the same data, or parts of them; writes how each run ended.

torchrun --nproc-per-node 4 same_data.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as Rows
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

import tests.many_runs  # noqa: F401
from accmt import Trainer
from accmt.errors import AccmtError
from accmt.processes import gather_objects, is_main_process
from tests.distributed.scripts.sharded import Texts, make_texts
from tests.splitting import num_data_processes

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GROUPS = num_data_processes()
GROUP = RANK // (WORLD // GROUPS)
TEXTS = make_texts()
BACKWARDS = Subset(TEXTS, range(len(TEXTS))[::-1])


def part_of(index: int, count: int) -> Subset[Any]:
    """Return one of several parts of the data, all of one length."""
    return Subset(TEXTS, range(index, len(TEXTS) // count * count, count))


class Stream(IterableDataset[Any]):
    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return (self.data[index] for index in range(len(self.data)))


def fit(data: Any, *others: Any, path: str = "model", steps: int = 2, **settings: Any) -> None:
    hps = {"max_steps": steps, "batch_size": 2, "optim": {"type": "SGD", "lr": 0.01}}
    own = {"model_saving": None, "checkpoint_every": None, "seed": 5, "verbose": False, "log_with": None, **settings}
    Trainer(hps, path, **own).fit(Texts(), data, *others)


def resume(path: str, *, of: Callable[[Any], Any]) -> None:
    """Resume within an epoch with the same samples, which is fine, and then with others."""
    settings = {
        "path": path,
        "checkpoint_every": "1 step",
        "checkpoint_options": {"async_checkpointing": False},
        "resume": "auto",
    }
    fit(of(TEXTS), steps=1, **settings)
    fit(of(TEXTS), steps=2, **settings)
    fit(of(BACKWARDS), steps=3, **settings)


def split_by_datasets() -> None:
    rows = {"input_ids": [tokens.tolist() for tokens, _ in TEXTS], "labels": [labels.tolist() for _, labels in TEXTS]}
    stream = Rows.from_dict(rows).with_format("torch").to_iterable_dataset(num_shards=2 * GROUPS)
    fit(split_dataset_by_node(stream, GROUP, GROUPS).map(lambda row: row), collate_fn=collate)


def collate(rows: list[Any]) -> Any:
    return torch.stack([row["input_ids"] for row in rows]), torch.stack([row["labels"] for row in rows])


CASES: dict[str, Callable[[], Any]] = {
    "the same": lambda: fit(TEXTS, TEXTS),
    "the same stream": lambda: fit(Stream(TEXTS), Stream(TEXTS)),
    "the same loader": lambda: fit(DataLoader(Stream(TEXTS), 2)),
    "a part of each on purpose": lambda: fit(
        part_of(GROUP, GROUPS), part_of(GROUP, GROUPS), data_options={"shard": False}
    ),
    "a stream of each on purpose": lambda: fit(Stream(part_of(GROUP, GROUPS)), data_options={"shard": False}),
    "a sampler that divides them": lambda: fit(TEXTS, sampler=DistributedSampler(TEXTS, GROUPS, GROUP, seed=3)),
    "a stream that datasets divides": split_by_datasets,
    "a part of each": lambda: fit(part_of(RANK, WORLD)),
    "a part of each to validate": lambda: fit(TEXTS, part_of(RANK, WORLD)),
    "a stream of each": lambda: fit(Stream(part_of(RANK, WORLD))),
    "a loader of each": lambda: fit(DataLoader(part_of(RANK, WORLD), 2)),
    "others at a resume": lambda: resume("sized", of=lambda data: data),
    "another stream at a resume": lambda: resume("stream", of=Stream),
    "another loader at a resume": lambda: resume("loader", of=lambda data: DataLoader(Stream(data), 2)),
}


def outcome(case: Callable[[], Any]) -> str:
    try:
        case()
    except AccmtError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main(result: str, folder: str) -> None:
    os.chdir(folder)
    outcomes = {name: gather_objects(outcome(case)) for name, case in CASES.items()}
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
