"""Trains on packed documents, and in plain torch on each document by itself; writes how much the weights differ.

torchrun --nproc-per-node 2 packed.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tests.many_runs  # noqa: F401
from accmt import Callback, Monitor
from accmt.addons.made_modules import HuggingFaceModule
from accmt.processes import gather_objects, is_main_process
from accmt.sharded_tensors import make_whole
from tests.distributed.scripts.sharded import VOCABULARY, make_llama
from tests.toys import Record, make_trainer

STEP, NUMBER, TOKENS, RATE = 12, 43, 24, 0.5
LENGTHS = [1 + (37 * index) % 17 for index in range(NUMBER)]


def make_documents() -> list[dict[str, Any]]:
    """Return documents, of some of which the first half is a prompt without labels."""
    documents = []
    for index, length in enumerate(LENGTHS):
        ids = [1 + (index * 7 + 5 * place) % (VOCABULARY - 1) for place in range(length)]
        hidden = index % 2 * (length // 2)
        documents.append({"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]})
    return documents


def train_by_hand(model: Any) -> None:
    """Train in plain torch: each step has the gradient of the mean loss over the target tokens of its documents."""
    documents = make_documents()
    for start in range(0, NUMBER, STEP):
        model.zero_grad()
        targets = 0
        for document in documents[start : start + STEP]:
            ids, labels = (torch.tensor(document[name]) for name in ("input_ids", "labels"))
            logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
            nn.functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100).backward()
            targets += int((labels[1:] != -100).sum())
        with torch.no_grad():
            for weight in model.parameters():
                weight -= RATE * weight.grad / targets


class Shapes(Callback):
    """Writes down the tokens of this process's rows."""

    def __init__(self) -> None:
        self.tokens: list[int] = Record()

    def on_before_training_step(self, batch: Any) -> None:
        self.tokens.append(batch["input_ids"].numel())


def main(result: str, folder: str) -> None:
    os.chdir(folder)
    model, shapes = make_llama().double(), Shapes()
    hps = {"batch_size": STEP // int(os.environ.get("WORLD_SIZE", "1")), "optim": {"type": "SGD", "lr": RATE}}
    trainer = make_trainer(
        hps | {"max_tokens": TOKENS, "packing": True},
        shuffle_train=False,
        callbacks=[shapes],
        failures={"try_longest": True},  # without effect
        monitor=Monitor(throughput=True),
    )
    trainer.fit(HuggingFaceModule(model), make_documents())
    expected = make_llama().double()
    train_by_hand(expected)
    own = torch.cat([make_whole(weight).detach().flatten() for weight in model.parameters()])
    other = torch.cat([weight.detach().flatten() for weight in expected.parameters()])
    tokens = gather_objects(shapes.tokens)
    found = {
        "difference": float((own - other).norm() / other.norm()),
        "tokens": tokens,
        "counters": [trainer.state.global_step, trainer.state.samples_seen],
    }
    if is_main_process():
        Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
