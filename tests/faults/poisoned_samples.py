"""Plants a poisoned sample at a random place of the training data, and shows that a replay of its step ranks it first.

    python tests/faults/poisoned_samples.py --runs 100

Runs take turns with a wrong label, an input that is 100 times too large, and a text of 10,000 equal tokens. Each trains
on all data before the step, and measures the step's samples as `accmt replay` does.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Trainer
from accmt.addons.flight_recorder.examiner import EXAMINED_FILE, Examination
from accmt.files import read_json_lines

SAMPLES, BATCH = 240, 8
CLASSES, WIDTH = 4, 12
VOCABULARY = 30


class Classifier(AcceleratorModule):
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, CLASSES))

    def step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(self.model(inputs), labels)


class LanguageModel(AcceleratorModule):
    """Predicts the next token from the one before."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))

    def step(self, batch: Any) -> Any:
        ids, mask = batch["input_ids"], batch["attention_mask"][:, 1:].bool()
        logits = self.model(ids[:, :-1])
        loss = nn.functional.cross_entropy(logits[mask], ids[:, 1:][mask])
        return {"loss": loss, "weight": mask.sum()}


def make_points(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Make points around the centre of each class."""
    centres = 3 * torch.randn(CLASSES, WIDTH)
    labels = torch.tensor([rng.randrange(CLASSES) for _ in range(SAMPLES)])
    return centres[labels] + 0.5 * torch.randn(SAMPLES, WIDTH), labels


def make_wrong_label(rng: random.Random, place: int) -> tuple[AcceleratorModule, Any, dict[str, Any]]:
    inputs, labels = make_points(rng)
    labels[place] = (labels[place] + rng.randrange(1, CLASSES)) % CLASSES
    return Classifier(), TensorDataset(inputs, labels), {}


def make_large_input(rng: random.Random, place: int) -> tuple[AcceleratorModule, Any, dict[str, Any]]:
    """Make targets that a class cannot predict exactly, or the gradient of a large input would vanish."""
    inputs, _ = make_points(rng)
    targets = inputs[:, :1] + 0.1 * torch.randn(SAMPLES, 1)
    inputs[place] *= 100

    class Regression(AcceleratorModule):
        def __init__(self) -> None:
            self.model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))

        def step(self, batch: Any) -> torch.Tensor:
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    return Regression(), TensorDataset(inputs, targets), {}


def make_equal_tokens(rng: random.Random, place: int) -> tuple[AcceleratorModule, Any, dict[str, Any]]:
    texts = []
    for _ in range(SAMPLES):
        first, length = rng.randrange(VOCABULARY), rng.randrange(5, 40)
        texts.append({"input_ids": [(first + 7 * position) % VOCABULARY for position in range(length)]})
    texts[place] = {"input_ids": [rng.randrange(VOCABULARY)] * 10_000}
    return LanguageModel(), texts, {"collate_fn": pad}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    lengths = [len(sample["input_ids"]) for sample in samples]
    ids = torch.zeros(len(samples), max(lengths), dtype=torch.long)
    for row, sample in zip(ids, samples, strict=True):
        row[: len(sample["input_ids"])] = torch.tensor(sample["input_ids"])
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


KINDS: dict[str, Callable[[random.Random, int], tuple[AcceleratorModule, Any, dict[str, Any]]]] = {
    "wrong label": make_wrong_label,
    "input times 100": make_large_input,
    "10,000 equal tokens": make_equal_tokens,
}


def find_rank(kind: str, rng: random.Random, folder: Path) -> int:
    """Train up to the step of a poisoned sample, and return its rank in it, from 1."""
    torch.manual_seed(rng.randrange(2**31))
    order = list(range(SAMPLES))
    rng.shuffle(order)
    at = rng.randrange(SAMPLES // 2, SAMPLES)  # in the second half, so that the model has learned something
    module, data, settings = KINDS[kind](rng, order[at])
    step = at // BATCH + 1
    trainer = Trainer(
        {"epochs": 1, "batch_size": BATCH, "max_steps": step, "optim": {"type": "AdamW", "lr": 0.02}},
        folder / "model",
        logging_dir=str(folder / "logs"),
        model_saving=None,
        checkpoint_every=None,
        verbose=False,
        sampler=order,
        seed=rng.randrange(2**31),
        ledger=Examination(every=None, folder=str(folder), first=step, last=step),
        **settings,
    )
    trainer.fit(module, data)
    [report] = read_json_lines(folder / EXAMINED_FILE)
    assert report["why_not_split"] == "", report["why_not_split"]
    return [sample["number"] for sample in report["samples"]].index(order[at]) + 1


def main(runs: int, seed: int) -> bool:
    """Try so many runs; return whether the poisoned sample was ranked first in all."""
    rng = random.Random(seed)
    print(f"seed {seed}")
    first: Counter[str] = Counter()
    for number in range(runs):
        kind = list(KINDS)[number % len(KINDS)]
        with tempfile.TemporaryDirectory(prefix="accmt-poison-") as folder:
            rank = find_rank(kind, rng, Path(folder))
        first[kind] += rank == 1
        if rank != 1:
            print(f"run {number + 1}: {kind}: rank {rank}", flush=True)
    print(", ".join(f"{kind}: {count}" for kind, count in first.items()))
    print(f"the poisoned sample is ranked first in {first.total()} of {runs} runs")
    return first.total() == runs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    sys.exit(0 if main(**vars(parser.parse_args())) else 1)
