"""Evaluates sets of several lengths with many metrics, and writes what each process got.

torchrun --nproc-per-node 2 metrics.py RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torchmetrics import classification, regression, retrieval, text, wrappers

import tests.many_runs  # noqa: F401
from accmt.data import Shard, SourceOptions, build_source
from accmt.errors import MetricError
from accmt.metrics import (
    AUROC,
    F1,
    RMSE,
    Accuracy,
    Metric,
    MetricBatch,
    MetricParallel,
    Perplexity,
    Precision,
    ValidationCollector,
    build_metrics,
)
from accmt.metrics.gathering import CHUNK_BYTES, gather_on_main_process
from accmt.processes import gather_objects, num_processes, process_index

LENGTHS = (1, 8, 9, 17)
BATCH_SIZE = 4
CLASSES = 5
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains"]


class InOrder(Metric):
    """Depends on the order of the samples, and on every kind of output."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self.name: float(sum((place + 1) * index for place, index in enumerate(read_indices(predictions))))}


def read_indices(predictions: Any) -> list[int]:
    """Return the samples' own numbers, whatever form they were returned in."""
    if isinstance(predictions, dict):
        return predictions["index"].tolist()
    first = predictions[0]
    if isinstance(first, dict):
        return [int(sample["index"]) for sample in predictions]
    return [int(value) for value in predictions]


class FromSums(torchmetrics.Metric):
    """A metric as a user would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("largest", torch.tensor(-torch.inf), dist_reduce_fx="max")
        self.add_state("scale", torch.tensor(0.0), dist_reduce_fx="mean")  # set by the first update, and equal then

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.total += ((preds - target) ** 2).sum()
        self.largest = torch.maximum(self.largest, preds.max())
        self.scale = torch.full_like(self.scale, 2.0)

    def compute(self) -> torch.Tensor:
        return torch.stack([self.total * self.scale, self.largest])


class ErrorOfProcess(MetricParallel):
    """A mean over samples."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {self.name: (predictions.double() - references.double()).abs().mean()}


class ErrorOfBatch(MetricBatch):
    """The same, batch by batch."""

    compute = ErrorOfProcess.compute


def make_metrics() -> list[Any]:
    own: list[Any] = [
        InOrder(f"order_of_{kind}") for kind in ("tensors", "arrays", "dicts", "lists_of_dicts", "strings")
    ]
    own += [ErrorOfProcess("error_of_processes"), ErrorOfBatch("error_of_batches")]
    own += [ErrorOfProcess("largest_of_processes", reduction="max")]
    builtin = [
        Accuracy(),
        F1(num_classes=CLASSES),
        Precision(num_classes=CLASSES, average="none"),
        RMSE(),
        AUROC(num_classes=CLASSES),
        AUROC("binary_auroc_of_logits"),
        Perplexity(),
    ]
    given = [
        classification.BinaryF1Score(),
        wrappers.ClasswiseWrapper(classification.MulticlassRecall(CLASSES, average=None), prefix="recall_of_"),
        torchmetrics.MetricCollection(
            [classification.MulticlassAccuracy(CLASSES), classification.MulticlassF1Score(CLASSES)]
        ),
        regression.PearsonCorrCoef(),
        regression.SpearmanCorrCoef(),
        torchmetrics.MeanMetric(),
        retrieval.RetrievalMRR(),
        text.BLEUScore(n_gram=1),
        FromSums(),
    ]
    return [*own, *builtin, *given]


def make_sample(index: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(index + 1)
    return {
        "index": index,
        "logits": torch.randn(CLASSES, generator=generator) * 3,
        "label": int(torch.randint(CLASSES, (), generator=generator)),
        "score": float(torch.randn((), generator=generator)),
        "target": float(torch.randn((), generator=generator)),
        "tokens": torch.randint(-1, CLASSES, (3,), generator=generator),
        "words": " ".join(WORDS[(index * step) % len(WORDS)] for step in (1, 2, 3)),
    }


def validate(samples: list[dict[str, Any]]) -> dict[str, Any]:
    index = torch.tensor([sample["index"] for sample in samples])
    logits = torch.stack([sample["logits"] for sample in samples])
    labels = torch.tensor([sample["label"] for sample in samples])
    scores = torch.tensor([sample["score"] for sample in samples])
    targets = torch.tensor([sample["target"] for sample in samples])
    tokens = torch.stack([sample["tokens"] for sample in samples])
    tokens = torch.where(tokens < 0, -100, tokens)
    words = [sample["words"] for sample in samples]
    classes = (logits.argmax(-1), labels)
    return {
        "val_loss": (scores.double() - targets).square().mean(),
        "order_of_tensors": (index, index),
        "order_of_arrays": (index.numpy(), index.numpy()),
        "order_of_dicts": ({"index": index, "words": words}, {"index": index}),
        "order_of_lists_of_dicts": ([{"index": sample["index"]} for sample in samples], words),
        "order_of_strings": ([str(sample["index"]) for sample in samples], words),
        "error_of_processes": (scores, targets),
        "error_of_batches": (scores, targets),
        "largest_of_processes": (0 * scores, 0 * targets),
        "accuracy": (logits, labels),
        "f1": (logits, labels),
        "precision": classes,
        "rmse": (scores, targets),
        "auroc": (logits, labels),
        "binary_auroc_of_logits": (scores, (labels > 1).long()),
        "perplexity": (logits.unsqueeze(1).repeat(1, 3, 1), tokens),
        "binary_f1_score": (labels.remainder(2), (labels > 1).long()),
        "classwise_wrapper": classes,
        "metric_collection": classes,
        "pearson_corr_coef": (scores, targets + scores),
        "spearman_corr_coef": (scores, targets),
        "mean_metric": (scores, targets.abs()),
        "retrieval_mrr": {"preds": scores, "target": (labels > 1), "indexes": index % 3},
        "bleu_score": (words, [[f"{line} {WORDS[0]}"] for line in words]),
        "from_sums": (scores, targets),
    }


def batches_of(length: int) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    share = Shard(process_index(), num_processes())
    options = SourceOptions(purpose="validate", batch_size=BATCH_SIZE, shard=share, seed=0, shuffle=False, collate=list)
    for micro_batch in build_source([make_sample(index) for index in range(length)], options).micro_batches(0):
        if micro_batch.batch is not None:
            yield micro_batch.index, micro_batch.batch


def evaluate(metrics: tuple[Metric, ...], length: int, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
    collector = ValidationCollector(metrics, chunk_bytes=chunk_bytes)
    for position, batch in batches_of(length):
        with torch.inference_mode():
            collector.add(validate(batch), len(batch), position)
    return collector.compute()


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except MetricError as error:
        return str(error)
    return "no error"


class Failing(Metric):
    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        raise MetricError(f"computed by process {process_index()}")


class Averaged(FromSums):
    """Averages its state over processes, which is not exact."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="mean")


def feed(metric: Any, entry: Any) -> dict[str, float]:
    (built,) = build_metrics(metric)
    collector = ValidationCollector([built])
    collector.add({built.name: entry}, 1)
    return collector.compute()


class FailingOnOne(MetricParallel):
    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        if process_index() == num_processes() - 1:
            raise MetricError(f"computed by process {process_index()}")
        return {self.name: 1.0}


def reduce_uneven(kind: type[MetricParallel], reduction: str) -> float:
    """Reduce the values of processes with 0, 1, 4, 9 ... samples, of which each has the number of its process."""
    rank = process_index()
    metric = kind("uneven", reduction=reduction)
    collector = ValidationCollector([metric])
    if rank:
        collector.add({"uneven": (torch.full((rank**2,), float(rank)), torch.zeros(rank**2))}, 1)
    return collector.compute()["uneven"]


def ask_everything() -> dict[str, Any]:
    metrics = build_metrics(make_metrics())
    own = torch.tensor([float(process_index())])
    return {
        "values": {str(length): evaluate(metrics, length) for length in LENGTHS},
        "again": evaluate(metrics, LENGTHS[-1]),
        "failing": message_of(lambda: feed(Failing("failing"), (own, own))),
        "averaged": message_of(lambda: feed(Averaged(), (own, 0 * own))),
        "nothing": message_of(lambda: ValidationCollector(build_metrics("accuracy")).compute()),
        "gathered": gather_on_main_process(list(range(3 * process_index())), chunk_bytes=1),
        "chunked": [evaluate(metrics, LENGTHS[-1], chunk) for chunk in (1, 200, None)],
        "failing_on_one": message_of(lambda: feed(FailingOnOne("failing"), (own, own))),
        "uneven": {
            f"{kind.__name__}_{reduction}": reduce_uneven(kind, reduction)
            for kind in (ErrorOfProcess, ErrorOfBatch)
            for reduction in ("mean", "sum", "max", "min")
            if num_processes() > 1
        },
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # sets of one sample have one class
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    answers = gather_objects(ask_everything())
    if process_index() == 0:
        Path(sys.argv[1]).write_text(json.dumps(answers))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
