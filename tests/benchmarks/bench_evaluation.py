"""Microseconds per batch of `validate`, an exact evaluation by hand with Accelerate, and transformers' `evaluate`.

    make bench

All evaluate the same network on the same samples in memory, in batches of 32 and on one thread: mean loss and accuracy,
each sample once. The networks are a small one (64-256-10), where the loop is most of the work, and a larger one
(64-2048-2048-10). Each round times one whole call of each contestant, after a call that warmed it up, in the time of
the processor, so that other work on the machine counts less; rounds alternate the order, and the ratio is that of the
medians.

By hand means: losses and predictions of each batch go through `gather_for_metrics`, which drops what Accelerate adds to
the last batch, and are added up. accmt also seeds all generators for each fetch and each step, so that neither workers
nor processes change what a step or a dataset draws; "without seeds" shows what that costs.

Then the memory that Python holds at the peak is shown for sets of several sizes, samples not counted.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from bench_loop import BATCH_SIZE, Sample, build_model, make_samples
from hf_trainer import WithLoss
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, TrainingArguments
from transformers import Trainer as TransformersTrainer

from accmt import AcceleratorModule, Accuracy, Trainer

REFERENCE = "by hand with Accelerate"

Results = dict[str, float]
Evaluate = Callable[[], Results]


def evaluate_by_hand(network: nn.Module, samples: Dataset[Sample]) -> Evaluate:
    """Return an evaluation that is exact on any number of processes, as one writes it with Accelerate."""
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(network, DataLoader(samples, BATCH_SIZE))

    @torch.inference_mode()
    def evaluate() -> Results:
        model.eval()
        loss, correct, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
        for inputs, labels in loader:
            scores = model(inputs)
            losses = functional.cross_entropy(scores, labels, reduction="none")
            losses, predictions, references = accelerator.gather_for_metrics((losses, scores.argmax(-1), labels))
            loss += losses.double().sum()
            correct += (predictions == references).sum()
            count += len(references)
        model.train()
        return {"loss": loss.item() / count, "accuracy": correct.item() / count}

    return evaluate


class Classifier(AcceleratorModule):
    """The network as a module of accmt."""

    def __init__(self, network: nn.Module) -> None:
        self.model = network

    def validation_step(self, batch: list[Tensor]) -> dict[str, Any]:
        """Return the mean loss of the batch, and what accuracy is computed of."""
        inputs, labels = batch
        scores = self.model(inputs)
        return {"loss": functional.cross_entropy(scores, labels), "accuracy": (scores.argmax(-1), labels)}


def evaluate_by_accmt(network: nn.Module, samples: Dataset[Sample], folder: Path) -> Evaluate:
    """Return `Trainer.validate`."""
    hps = {"epochs": 1, "batch_size": BATCH_SIZE, "optim": {"type": "AdamW", "lr": 1e-3}}
    trainer = Trainer(hps, folder / "model", metrics=Accuracy(), accelerator={"cpu": True}, verbose=False)
    module = Classifier(network)

    def evaluate() -> Results:
        results = trainer.validate(module, samples)
        return {"loss": results["val_loss"], "accuracy": results["accuracy"]}

    return evaluate


class WithScores(WithLoss):
    """A network that returns its loss and its scores, as the transformers Trainer wants it."""

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss and the scores of the batch."""
        scores = self.network(inputs)
        return {"loss": functional.cross_entropy(scores, labels), "scores": scores}


class Named(Dataset[dict[str, Tensor]]):
    """The samples as dicts."""

    def __init__(self, samples: Dataset[Sample]) -> None:
        self.samples = [dict(zip(("inputs", "labels"), samples[index], strict=True)) for index in range(len(samples))]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return a sample."""
        return self.samples[index]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.samples)


def evaluate_by_transformers(network: nn.Module, samples: Dataset[Sample], folder: Path) -> Evaluate:
    """Return `Trainer.evaluate` of transformers."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=BATCH_SIZE,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )

    def compute_metrics(prediction: Any) -> Results:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    trainer = TransformersTrainer(
        WithScores(network), arguments, eval_dataset=Named(samples), compute_metrics=compute_metrics
    )
    trainer.remove_callback(PrinterCallback)

    def evaluate() -> Results:
        results = trainer.evaluate()
        return {"loss": results["eval_loss"], "accuracy": results["eval_accuracy"]}

    return evaluate


class Repeated(Dataset[Sample]):
    """A few samples again and again, so that a large set takes no memory."""

    def __init__(self, samples: list[Sample], count: int) -> None:
        self.samples, self.count = samples, count

    def __getitem__(self, index: int) -> Sample:
        """Return a sample."""
        return self.samples[index % len(self.samples)]

    def __len__(self) -> int:
        """Return how many there are."""
        return self.count


def build_larger_model() -> nn.Module:
    """Build the larger network."""
    return nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def seed_nothing(seed: int, device: torch.device | None = None) -> None:
    """Stand in the place of `seed_generators`."""


def without_seeds(evaluate: Evaluate) -> Evaluate:
    """Return the evaluation without the seeds that accmt gives generators."""

    def evaluate_unseeded() -> Results:
        with (
            mock.patch("accmt.loop.evaluation.seed_generators", seed_nothing),
            mock.patch("accmt.data.fetching.seed_generators", seed_nothing),
        ):
            return evaluate()

    return evaluate_unseeded


def build_contestants(network: nn.Module, samples: Dataset[Sample], folder: Path) -> dict[str, Evaluate]:
    """Return the contestants, each with the same network."""
    by_accmt = evaluate_by_accmt(network, samples, folder)
    return {
        REFERENCE: evaluate_by_hand(network, samples),
        "transformers Trainer.evaluate": evaluate_by_transformers(network, samples, folder),
        "accmt Trainer.validate": by_accmt,
        "the same without seeds": without_seeds(by_accmt),
    }


def measure(contestants: dict[str, Evaluate], num_batches: int, num_rounds: int) -> dict[str, list[float]]:
    """Return the microseconds per batch of each contestant, round by round.

    Raises:
        ValueError: Two contestants came to different results.
    """
    found = {name: evaluate() for name, evaluate in contestants.items()}
    if len({tuple(round(value, 5) for value in results.values()) for results in found.values()}) > 1:
        raise ValueError(f"the results differ: {found}")
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(num_rounds):
        for name in contestants if number % 2 == 0 else reversed(contestants):
            gc.collect()
            start = time.process_time()
            contestants[name]()
            times[name].append((time.process_time() - start) / num_batches * 1e6)
    return times


def peak_kilobytes(evaluate: Evaluate) -> float:
    """Return how much more memory than before Python held at the peak; tensors' own memory is seen by their number."""
    gc.collect()
    tracemalloc.start()
    evaluate()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1024


def print_times(title: str, times: dict[str, list[float]]) -> None:
    """Print medians, minima and the ratio of the medians to the reference."""
    reference = statistics.median(times[REFERENCE])
    print(f"\n| {title} | median us | minimum us | x {REFERENCE} |\n|---|---|---|---|")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"| {name} | {median:.0f} | {min(values):.0f} | {median / reference:.2f} |", flush=True)


def print_memory(samples: list[Sample], sizes: tuple[int, ...], folder: Path) -> None:
    """Print the peak of each contestant for sets of several sizes."""
    print(f"\n| kB at the peak | {' | '.join(f'{size} samples' for size in sizes)} |\n|---|{'---|' * len(sizes)}")
    peaks: dict[str, list[float]] = {}
    for size in sizes:
        for name, evaluate in build_contestants(build_model(), Repeated(samples, size), folder).items():
            evaluate()
            peaks.setdefault(name, []).append(peak_kilobytes(evaluate))
    for name, values in peaks.items():
        print(f"| {name} | {' | '.join(f'{value:.0f}' for value in values)} |", flush=True)


def main() -> None:
    """Time, then measure memory, on one thread."""
    parser = argparse.ArgumentParser(description="Time an evaluation beside its peers.")
    parser.add_argument("--batches", type=int, default=1000, help="batches of an evaluation of the small network")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, each with every contestant")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    contests = {"small network": (build_model(), options.batches), "larger network": (build_larger_model(), 200)}
    samples = make_samples(options.batches * BATCH_SIZE - 1)
    with tempfile.TemporaryDirectory() as name:
        for title, (network, num_batches) in contests.items():
            contestants = build_contestants(network, samples[: num_batches * BATCH_SIZE - 1], Path(name))
            print_times(title, measure(contestants, num_batches, options.rounds))
        print_memory(samples[:1000], (1_000, 10_000, 100_000), Path(name))


if __name__ == "__main__":
    main()
