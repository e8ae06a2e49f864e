"""Processes that were given different data or settings; writes how each ended.

torchrun --nproc-per-node 2 alike.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule
from accmt.errors import AccmtError
from accmt.processes import gather_objects, is_main_process
from tests.toys import Linear, Numbers, make_points, make_trainer

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
POINTS = make_points(24)


def fit(*data: Any, hps: dict[str, Any] | None = None, **settings: Any) -> None:
    make_trainer(hps, settings.pop("path", "out/model"), **settings).fit(Linear(), *data)


def raises() -> Any:
    if RANK:
        raise OSError("no such file on this machine")
    return make_points()


class Made(Linear):
    def get_train_dataloader(self) -> Any:
        return raises()


class WithoutStep(AcceleratorModule):
    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)


def make_two_mistakes() -> None:
    trainer = make_trainer(sampler=[0, 1, 2, 3] if RANK else None)
    trainer.fit(WithoutStep() if RANK else Linear(), DataLoader(make_points(), 2))


class EveryOther(IterableDataset[Any]):
    """A stream of which each process reads its part."""

    def __iter__(self) -> Any:
        return iter([POINTS[i] for i in range(RANK, len(POINTS), WORLD)])


class Augmented(Dataset[Any]):
    """Samples with noise, from a generator that nobody seeds or from torch's, and labels that are the same."""

    def __init__(self, *, is_seeded: bool) -> None:
        self.is_seeded = is_seeded

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(3) if self.is_seeded else torch.frombuffer(bytearray(os.urandom(3)), dtype=torch.uint8)
        return POINTS[index][0] + noise / 1000, POINTS[index][1]

    def __len__(self) -> int:
        return len(POINTS)


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([Augmented(is_seeded=False)[i] for i in range(8)])


class OfDatasets(Linear):
    """Trains on all rows of a stream that `datasets` has split by process."""

    seen: tuple[float, ...] = ()

    def training_step(self, batch: Any) -> Any:
        self.seen += tuple(batch["x"].tolist())
        return self.model(batch["x"][:, None].expand(-1, 3).float()).mean()


def split_by_datasets(wrap: Callable[[Any], Any]) -> None:
    from datasets import Dataset as Rows
    from datasets.distributed import split_dataset_by_node

    stream = Rows.from_dict({"x": list(range(12))}).with_format("torch").to_iterable_dataset(num_shards=WORLD)
    module = OfDatasets()
    make_trainer().fit(module, wrap(split_dataset_by_node(stream, RANK, WORLD)))
    seen = sorted(x for part in gather_objects(module.seen) for x in part)
    assert seen == list(range(12)), seen


class Playing(IterableDataset[Any]):
    """A stream that uses the current model; one process plays longer."""

    def __iter__(self) -> Any:
        for _ in range(8 - 2 * RANK):
            yield self.module.model.weight.detach()[0].clone()


class Player(Linear):
    fresh: tuple[bool, ...] = ()

    def training_step(self, batch: Any) -> Any:
        self.fresh += (torch.equal(batch, self.model.weight),)
        return self.model(batch).square().mean()


def play() -> None:
    stream, module = Playing(), Player()
    stream.module = module
    make_trainer({"batch_size": 1}, data_options={"shard": False}).fit(module, stream)
    assert all(module.fresh[: 8 - 2 * RANK]), module.fresh


class Unseeded(Sampler[int]):
    """Draws another order on each process."""

    def __len__(self) -> int:
        return len(POINTS)

    def __iter__(self) -> Any:
        return iter(random.Random(RANK).sample(range(len(POINTS)), len(POINTS)))


class Growing(Linear):
    """Gets more data while it trains, on one process."""

    def __init__(self) -> None:
        super().__init__()
        self.samples = [POINTS[index] for index in range(12)]

    def get_train_dataloader(self) -> Any:
        return self.samples

    def on_epoch_end(self) -> None:
        if RANK == WORLD - 1:
            self.samples += self.samples[:4]


def resume_with_other_rows() -> None:
    settings = {"path": "out/other", "checkpoint_every": "1 step", "checkpoint_options": {"async_checkpointing": False}}
    fit(POINTS, hps={"max_steps": 1}, **settings)
    fit(Subset(POINTS, range(len(POINTS))[::-1]), hps={"max_steps": 2}, resume=True, **settings)


CASES: dict[str, Callable[[], Any]] = {
    "training data": lambda: fit(make_points(8 + 4 * RANK)),
    "validation data": lambda: fit(make_points(), make_points(4 + RANK)),
    "a named set": lambda: fit(make_points(), {"a": make_points(4), "b": make_points(4 + RANK)}),
    "names of sets": lambda: fit(make_points(), {f"set{RANK}": make_points(4)}),
    "validation on one": lambda: fit(make_points(), make_points(4) if RANK else None),
    "none on one": lambda: fit(make_points() if RANK else None),
    "kinds": lambda: fit(DataLoader(make_points(), 2) if RANK else make_points()),
    "loaders": lambda: fit(DataLoader(make_points(), 2 + 2 * RANK)),
    "streams": lambda: fit(iter(Numbers(8)) if RANK else make_points()),
    "an error on one": lambda: make_trainer().fit(Made()),
    "an order of sets": lambda: fit(make_points(), dict.fromkeys(["ab", "ba"][RANK % 2], make_points(4))),
    "two mistakes on one": make_two_mistakes,
    "batch size": lambda: fit(make_points(), hps={"batch_size": 2 + RANK}),
    "accumulation": lambda: fit(make_points(), grad_accumulation_steps=1 + RANK),
    "when to save": lambda: fit(make_points(), checkpoint_every="epoch" if RANK else "step"),
    "test data": lambda: make_trainer().test(Linear(), make_points(4 + RANK)),
    "seeds": lambda: fit(make_points(), seed=RANK),
    "a part of each": lambda: fit(Subset(POINTS, range(RANK, len(POINTS), WORLD))),
    "a part of each, with workers": lambda: fit(Subset(POINTS, range(RANK, 24, WORLD)), dataloader_num_workers=1),
    "a part of each to validate": lambda: fit(POINTS, Subset(POINTS, range(RANK, len(POINTS), WORLD))),
    "a loader of a part of each": lambda: fit(DataLoader(Subset(POINTS, range(RANK, len(POINTS), WORLD)), 2)),
    "a stream of every other": lambda: fit(EveryOther()),
    "a stream of every other, with a worker": lambda: fit(EveryOther(), dataloader_num_workers=1),
    "a loader of a stream of every other": lambda: fit(DataLoader(EveryOther(), 2)),
    "a sampler function of each": lambda: fit(
        POINTS, sampler=lambda data: list(range(len(data)))[:: 1 - 2 * (RANK % 2)]
    ),
    "orders": lambda: fit(DataLoader(POINTS, 4, sampler=Unseeded())),
    "orders to validate": lambda: fit(POINTS, DataLoader(POINTS, 4, sampler=Unseeded())),
    "growing data": lambda: make_trainer({"epochs": 2}).fit(Growing()),
    "other rows at a resume": resume_with_other_rows,
    "every other on purpose": lambda: fit(EveryOther(), data_options={"shard": False}),
    "split by datasets": lambda: split_by_datasets(lambda stream: stream),
    "split by datasets, in a loader": lambda: split_by_datasets(lambda stream: DataLoader(stream, 2)),
    "a stream that uses the model": play,
    "augmented": lambda: fit(Augmented(is_seeded=True), Augmented(is_seeded=True)),
    "augmented without a seed": lambda: fit(Augmented(is_seeded=False), NoisyStream()),
    "data of their own": lambda: fit(make_points(8 + 4 * RANK), data_options={"shard": False}),
    "the same": lambda: fit(make_points(), {"a": make_points(4), "b": DataLoader(make_points(3), 2)}),
}


def outcome(case: Callable[[], Any]) -> str:
    try:
        case()
    except (AccmtError, OSError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return ""


def main(result: str, folder: str) -> None:
    os.chdir(folder)
    outcomes = {name: gather_objects(outcome(case)) for name, case in CASES.items()}
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
