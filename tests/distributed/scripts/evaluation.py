"""Validates, tests and predicts data of several lengths, and writes what each process got.

torchrun --nproc-per-node 2 evaluation.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, Dataset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Accuracy, Metric, Trainer
from accmt.processes import data_index, gather_objects, is_main_process
from tests.splitting import is_split, split

LENGTHS = (1, 8, 17)
BATCH_SIZE = 4
MAX_TOKENS = 11
OTHER_LENGTH = 6


class Texts(Dataset[dict[str, Any]]):
    """Samples that know their own number."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length, self.seed = length, seed

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(100 * self.seed + index)
        inputs = torch.randn(4, generator=generator)
        length = 1 + 3 * index % 7  # for a budget of tokens
        return {
            "index": index,
            "inputs": inputs,
            "label": int(inputs.sum() > 0),
            "text": f"text {index}",
            "length": length,
        }

    def __len__(self) -> int:
        return self.length


def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack what can be stacked."""
    return {
        "index": torch.tensor([sample["index"] for sample in samples]),
        "inputs": torch.stack([sample["inputs"] for sample in samples]),
        "label": torch.tensor([sample["label"] for sample in samples]),
        "text": [sample["text"] for sample in samples],
    }


class InOrder(Metric):
    """Depends on the order of the samples; its predictions are lists of dicts, its references strings."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        indices = [sample["index"] for sample in predictions]
        right = [text == f"text {index}" for text, index in zip(references, indices, strict=True)]
        return {self.name: float(sum((place + 1) * index for place, index in enumerate(indices))) * all(right)}


class Margin(Metric):
    """Takes dicts of tensors."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self.name: float((predictions["scores"].double() * references["sign"]).mean())}


class Classifier(AcceleratorModule):
    """Returns outputs of every kind; processes begin with different weights, as without a seed."""

    def __init__(self) -> None:
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        if is_split():
            self.own_model = model
        else:
            self.model = model

    def configure_model(self) -> None:
        whole = {"output_layouts": Replicate()}
        self.model = split(self.own_model, {"0": ColwiseParallel(**whole), "3": ColwiseParallel(**whole)})

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["inputs"]), batch["label"])

    def validation_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        scores = self.model(batch["inputs"])
        return {
            "loss": nn.functional.cross_entropy(scores.double(), batch["label"]),
            "half": scores.double().square().mean() / 2,
            "accuracy": (scores, batch["label"]),
            "in_order": ([{"index": int(index)} for index in batch["index"]], batch["text"]),
            "margin": ({"scores": scores[:, 0]}, {"sign": batch["label"] * 2 - 1}),
        }

    def predict_step(self, batch: dict[str, Any]) -> dict[str, Any]:
        scores = self.model(batch["inputs"])
        return {"scores": scores, "index": batch["index"], "text": batch["text"], "ragged": ragged(batch["index"])}


def ragged(index: torch.Tensor) -> torch.Tensor:
    """Return rows as long as the largest index of the batch."""
    return index[:, None].repeat(1, int(index.max()) + 1)


def make_trainer(folder: Path, max_tokens: int | None = None, **settings: Any) -> Trainer:
    """Make a quiet trainer."""
    hps = {"epochs": 1, "batch_size": BATCH_SIZE, "optim": {"type": "AdamW", "lr": 0.01}, "max_tokens": max_tokens}
    told = {"model_saving": None, "checkpoint_every": None, "logging_dir": folder / "logs", "verbose": False, "seed": 5}
    metrics = [Accuracy(), InOrder("in_order"), Margin("margin")]
    return Trainer(hps, folder / "model", metrics=metrics, collate_fn=collate, **told | settings)


def plain(predictions: Any) -> Any:
    """Return predictions as JSON values."""
    if isinstance(predictions, torch.Tensor):
        return predictions.tolist()
    if isinstance(predictions, dict):
        return {name: plain(part) for name, part in predictions.items()}
    return [plain(part) for part in predictions] if isinstance(predictions, list) else predictions


def evaluate_lengths(folder: Path) -> dict[str, Any]:
    """Evaluate and predict sets of every length, each with another one beside it, as read and cut by tokens."""
    module, answers = Classifier(), {}
    for length in LENGTHS:
        sets = {"a": Texts(length), "b": Texts(OTHER_LENGTH, seed=1)}
        for name, max_tokens in ((str(length), None), (f"{length} cut", MAX_TOKENS)):
            trainer = make_trainer(folder, max_tokens)
            answers[name] = {
                "validate": trainer.validate(module, sets),
                "test": trainer.test(module, Texts(length)),
                "predict": plain(trainer.predict(module, Texts(length))),
                "predict_sets": plain(trainer.predict(module, sets)),
            }
    return answers


def train_and_evaluate(folder: Path) -> dict[str, Any]:
    """Train, and ask for the values of the last evaluation again, of the model and of what was saved of it."""
    trainer = make_trainer(folder, model_saving=["best_valid_loss", "last"], checkpoint_every="epoch")
    module = Classifier()
    state = trainer.fit(module, Texts(32), Texts(9, seed=1))
    before = [tensor.clone() for tensor in module.model.state_dict().values()]
    again = {path or "own": trainer.validate(ckpt_path=path) for path in (None, "best", "last", folder / "model")}
    output = folder / "results.json"
    trainer.validate(results_output=output)
    after = module.model.state_dict().values()
    return {
        "logged": state.metrics,
        "again": {str(name): values for name, values in again.items()},
        "written": json.loads(output.read_text()),
        "is_same": all(torch.equal(*pair) for pair in zip(before, after, strict=True)),
    }


def predict_otherwise(folder: Path) -> dict[str, Any]:
    """Predict data that are cut or shared otherwise."""
    module, data = Classifier(), Texts(9)
    loader = DataLoader(data, batch_size=2, collate_fn=collate)
    return {
        "loader": plain(make_trainer(folder).predict(module, loader)),
        "chunked": plain(make_trainer(folder, metric_options={"gather_chunk_size": 1}).predict(module, data)),
        "unchunked": plain(make_trainer(folder, metric_options={"gather_chunk_size": None}).predict(module, data)),
        "limited": plain(make_trainer(folder, limit_batches={"predict": 1}).predict(module, data)),
    } | ({} if is_split() else predict_alone(folder, module))


def predict_alone(folder: Path, module: AcceleratorModule) -> dict[str, Any]:
    """Predict data that each process has for itself."""
    own = Texts(7 + data_index())
    alone = make_trainer(folder, data_options={"shard": False}).predict(module, own)
    alone_cut = make_trainer(folder, MAX_TOKENS, data_options={"shard": False}).predict(module, own)
    return {"alone": plain(alone), "alone cut": plain(alone_cut)}


def find_errors(folder: Path) -> dict[str, str]:
    """Return what each process is told of weights that are not there."""
    try:
        make_trainer(folder / "empty").validate(Classifier(), Texts(3), ckpt_path="best")
    except FileNotFoundError as error:
        return {"best": str(error).partition("\n")[0]}
    return {}


def main() -> None:
    """Run everything and let the main process write what all saw."""
    result, folder = Path(sys.argv[1]), Path(sys.argv[2])
    own = {
        "lengths": evaluate_lengths(folder),
        "trained": train_and_evaluate(folder / "trained"),
        "otherwise": predict_otherwise(folder),
        "errors": find_errors(folder),
    }
    every = gather_objects(own)
    if is_main_process():
        result.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
