"""Tokens a second, MFU, memory and overhead on a GPU, beside Accelerate by hand, transformers' Trainer and Lightning.

    make gpu                                                      # the tests, then this
    PYTHONPATH=. python tests/benchmarks/bench_gpu.py --device cpu  # tiny models: shows that it works

Models are made from a configuration with random weights, so nothing is downloaded: an encoder of 22 million parameters,
a causal language model of 124 million, and a network so small that a step is nothing but overhead. All contestants
train in bf16 with fused AdamW and clipping, on the same samples in memory. Each round builds every contestant anew,
lets it run one epoch to warm up and times a second one; rounds alternate the order. Ratios are those of medians.

What it prints are the tables of docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib.metadata
import importlib.util
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from accmt import AcceleratorModule, Callback, Trainer
from accmt.addons.monitor import PEAKS

LR = 1e-4
CLIP = 1.0
BY_HAND = "Accelerate by hand"
LIBRARIES = ("torch", "accelerate", "transformers", "lightning")


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        operations: Of one token, forward and backward, by hand; 0 where none are counted.
    """

    name: str
    build: Callable[[], nn.Module]
    samples: list[dict[str, Tensor]]
    batch_size: int
    operations: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return len(self.samples) // self.batch_size

    @property
    def tokens(self) -> int:
        """Tokens of an epoch."""
        return sum(sample["input_ids"].numel() for sample in self.samples)


class Samples(Dataset[dict[str, Tensor]]):
    """Samples in memory."""

    def __init__(self, samples: list[dict[str, Tensor]]) -> None:
        self.samples = samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


class Tiny(nn.Module):
    """A network that costs nothing; its loss is returned as transformers models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss."""
        return {"loss": functional.cross_entropy(self.layers(input_ids), labels)}


def count_operations(model: nn.Module, layers: int, width: int, length: int) -> float:
    """Return operations of a token, forward and backward.

    Source: https://arxiv.org/abs/2204.02311, appendix B: 6 of each weight that is multiplied, 12 of each layer's width
    and each token that is attended to.
    """
    embedded = {
        id(weight) for part in model.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
    }
    output = getattr(model, "get_output_embeddings", lambda: None)()
    multiplied = sum(weight.numel() for weight in model.parameters() if id(weight) not in embedded)
    if output is not None and id(output.weight) in embedded:  # tied: looked up at the input, multiplied at the output
        multiplied += output.weight.numel()
    return 6 * multiplied + 12 * layers * width * length


def make_encoder(*, is_small: bool) -> Workload:
    """Make the encoder that classifies texts."""
    from transformers import BertConfig, BertForSequenceClassification

    layers, width, length, vocabulary = (1, 32, 16, 100) if is_small else (6, 384, 128, 30522)
    batch_size, steps = (4, 3) if is_small else (64, 60)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        num_labels=5,
    )
    generator = torch.Generator().manual_seed(0)
    samples = [
        {
            "input_ids": torch.randint(vocabulary, (length,), generator=generator),
            "labels": torch.randint(5, (), generator=generator),
        }
        for _ in range(batch_size * steps)
    ]
    operations = count_operations(BertForSequenceClassification(config), layers, width, length)
    return Workload("encoder", lambda: BertForSequenceClassification(config), samples, batch_size, operations)


def make_causal(*, is_small: bool) -> Workload:
    """Make the causal language model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, length, vocabulary = (1, 32, 16, 100) if is_small else (12, 768, 512, 50257)
    batch_size, steps = (4, 3) if is_small else (16, 40)
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (batch_size * steps, length), generator=generator)
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    operations = count_operations(GPT2LMHeadModel(config), layers, width, length)
    return Workload("causal", lambda: GPT2LMHeadModel(config), samples, batch_size, operations)


def make_tiny(*, is_small: bool) -> Workload:
    """Make the network whose steps are overhead."""
    generator = torch.Generator().manual_seed(0)
    count = 32 * (10 if is_small else 1000)
    inputs, labels = torch.randn(count, 64, generator=generator), torch.randint(10, (count,), generator=generator)
    samples = [{"input_ids": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]
    return Workload("overhead", Tiny, samples, 32)


@dataclass
class Timer:
    """The seconds of the second epoch, and the most memory of a run."""

    device: torch.device
    seconds: float = 0.0
    start: float = 0.0

    def begin(self) -> None:
        """Begin an epoch, when the device has nothing left to do."""
        gc.collect()
        self._wait()
        self.start = time.perf_counter()

    def end(self) -> None:
        """End an epoch, when the device is done with it."""
        self._wait()
        self.seconds = time.perf_counter() - self.start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def train_by_hand(work: Workload, timer: Timer) -> None:
    """Train with the loop of Accelerate's documentation."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=timer.device.type == "cpu")
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    loader = DataLoader(Samples(work.samples), work.batch_size, shuffle=True, pin_memory=timer.device.type == "cuda")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for _ in range(2):
        timer.begin()
        for batch in loader:
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        timer.end()


def train_torch(work: Workload, timer: Timer) -> None:
    """Train with torch alone."""
    device = timer.device
    model = work.build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    loader = DataLoader(Samples(work.samples), work.batch_size, shuffle=True, pin_memory=device.type == "cuda")
    model.train()
    for _ in range(2):
        timer.begin()
        for batch in loader:
            placed = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(**placed)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        timer.end()


class Module(AcceleratorModule):
    """A model whose loss is that of its forward."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the model's loss."""
        loss: Tensor = self.model(**batch)["loss"]
        return loss


class Epochs(Callback):
    """Times the epochs of accmt."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def on_epoch_start(self) -> None:
        """Start the clock."""
        self.timer.begin()

    def on_epoch_end(self) -> None:
        """Stop the clock."""
        self.timer.end()


def train_accmt(work: Workload, timer: Timer, **settings: Any) -> Trainer:
    """Train with accmt."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            {"epochs": 2, "batch_size": work.batch_size, "optim": {"type": "AdamW", "lr": LR}},
            f"{folder}/model",
            mixed_precision="bf16",
            clip_grad=CLIP,
            logging_dir=f"{folder}/logs",
            callbacks=Epochs(timer),
            accelerator={"cpu": timer.device.type == "cpu"},
            **{"model_saving": None, "checkpoint_every": None, "log_every": -1, "verbose": False, **settings},
        )
        trainer.fit(Module(work.build()), Samples(work.samples))
    return trainer


def train_transformers(work: Workload, timer: Timer) -> None:
    """Train with the Trainer of transformers."""
    from transformers import PrinterCallback, TrainerCallback, TrainingArguments
    from transformers import Trainer as TransformersTrainer

    class Epoch(TrainerCallback):
        def on_epoch_begin(self, *args: object, **others: object) -> None:
            timer.begin()

        def on_epoch_end(self, *args: object, **others: object) -> None:
            timer.end()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=work.batch_size,
            learning_rate=LR,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.01,
            max_grad_norm=CLIP,
            bf16=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=timer.device.type == "cpu",
            remove_unused_columns=False,
        )
        trainer = TransformersTrainer(work.build(), arguments, train_dataset=Samples(work.samples), callbacks=[Epoch()])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def train_lightning(work: Workload, timer: Timer) -> None:
    """Train with Lightning."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build()

        def training_step(self, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=LR, fused=True)

        def configure_gradient_clipping(self, optimizer: Any, *args: object, **named: object) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)  # what it would do itself, but not with fused optimizers

        def on_train_epoch_start(self) -> None:
            timer.begin()

        def on_train_epoch_end(self) -> None:
            timer.end()

    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="gpu" if timer.device.type == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    is_pinned = timer.device.type == "cuda"
    loader = DataLoader(Samples(work.samples), work.batch_size, shuffle=True, pin_memory=is_pinned)
    module = Lit()
    module.model.train()  # Lightning leaves modes as they are
    trainer.fit(module, loader)


@dataclass
class Results:
    """What one contestant took, round by round."""

    seconds: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return statistics.median(self.seconds)


def make_contestants() -> dict[str, Callable[[Workload, Timer], Any]]:
    """Return what trains; Lightning only where it is installed."""
    contestants: dict[str, Callable[[Workload, Timer], Any]] = {
        BY_HAND: train_by_hand,
        "accmt": train_accmt,
        "transformers Trainer": train_transformers,
    }
    if importlib.util.find_spec("lightning") is not None:
        contestants["Lightning"] = train_lightning
    return contestants


def forget() -> None:
    """Let the next contestant find an empty device, and Accelerate as new."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def compete(
    work: Workload, contestants: dict[str, Callable[[Workload, Timer], Any]], device: torch.device, rounds: int
) -> dict[str, Results]:
    """Let all train in turn, in alternating order."""
    results = {name: Results() for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            forget()
            torch.manual_seed(0)
            timer = Timer(device)
            contestants[name](work, timer)
            results[name].seconds.append(timer.seconds)
            if device.type == "cuda":
                results[name].memory = max(results[name].memory, torch.cuda.max_memory_allocated())
    return results


def find_peak(device: torch.device) -> float:
    """Return the operations a second of the device; 0 where they are not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)


def print_throughput(work: Workload, results: dict[str, Results], device: torch.device) -> None:
    """Print tokens a second, MFU, peak memory and ratio of each."""
    peak = find_peak(device)
    millions = sum(weight.numel() for weight in work.build().parameters()) / 1e6
    print(f"\n{work.name}: {millions:.1f} million parameters, {work.batch_size} samples a batch, {work.steps} steps")
    print("| | tokens a second | MFU | peak memory, GB | ms a step | time beside the loop by hand |")
    print("|---|---|---|---|---|---|")
    for name, result in results.items():
        tokens_per_s = work.tokens / result.median
        mfu = f"{tokens_per_s * work.operations / peak:.1%}" if peak else "-"
        memory = f"{result.memory / 1e9:.2f}" if result.memory else "-"
        ratio = result.median / results[BY_HAND].median
        step_ms = 1e3 * result.median / work.steps
        print(f"| {name} | {tokens_per_s:,.0f} | {mfu} | {memory} | {step_ms:.2f} | {ratio:.2f} |")


def print_overhead(work: Workload, results: dict[str, Results]) -> None:
    """Print the microseconds of a step of the tiny network."""
    print(f"\noverhead: a network of two layers, {work.steps} steps")
    print("| | us a step | time beside the loop by hand |")
    print("|---|---|---|")
    for name, result in results.items():
        step_us = 1e6 * result.median / work.steps
        print(f"| {name} | {step_us:,.0f} | {result.median / results[BY_HAND].median:.2f} |")


def time_save_state(work: Workload, device: torch.device, rounds: int) -> float:
    """Return the seconds of `accelerator.save_state`, with the optimizer's state."""
    accelerator = Accelerator(mixed_precision="bf16", cpu=device.type == "cpu")
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = {name: torch.stack([s[name] for s in work.samples[:2]]).to(device) for name in work.samples[0]}
    accelerator.backward(model(**batch)["loss"])
    optimizer.step()
    timer, seconds = Timer(device), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            timer.begin()
            accelerator.save_state(folder)
            timer.end()
            seconds.append(timer.seconds)
    return statistics.median(seconds)


def print_stall(work: Workload, device: torch.device, rounds: int) -> None:
    """Print how long training stands still for a checkpoint, beside `accelerator.save_state`."""
    forget()
    # Once an epoch: a checkpoint that comes before the last one is written would wait for the disk.
    trainer = train_accmt(work, Timer(device), checkpoint_every=f"{work.steps} steps", profiler="simple")
    phase = trainer.profile.phases["checkpoint"]
    forget()
    saving = time_save_state(work, device, rounds)
    print(f"\ncheckpoints of the model `{work.name}` with AdamW's state")
    print("| | seconds |")
    print("|---|---|")
    print(f"| `accelerator.save_state` | {saving:.4f} |")
    print(f"| accmt: training stands still, in the mean of {phase.calls} | {phase.mean_s:.4f} |")
    print(f"| accmt: at most (the first gets its memory) | {phase.slowest_s:.4f} |")
    print(f"| mean, beside `save_state` | {phase.mean_s / saving:.3f} |")


def describe(device: torch.device) -> str:
    """Return hardware, versions and date."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = []
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{library} {importlib.metadata.version(library)}")
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{name}; Python {platform.python_version()}, {', '.join(versions)}; {today}"


def main() -> None:
    """Run all contests and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=None, help="3 on a GPU, 1 on a CPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device: --device cpu shows that this works")
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    is_small = device.type == "cpu"
    rounds = options.rounds or (1 if is_small else 3)
    contestants = make_contestants()
    print(describe(device))
    if "Lightning" not in contestants:
        print("Lightning is not installed, so it is left out")
    works = [make_encoder(is_small=is_small), make_causal(is_small=is_small)]
    for work in works:
        print_throughput(work, compete(work, contestants, device, rounds), device)
    tiny = make_tiny(is_small=is_small)
    print_overhead(tiny, compete(tiny, {**contestants, "torch alone": train_torch}, device, rounds))
    for work in works:
        print_stall(work, device, max(rounds, 3))


if __name__ == "__main__":
    main()
