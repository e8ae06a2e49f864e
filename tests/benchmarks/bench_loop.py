"""Microseconds per step of this loop, a loop by hand with Accelerate, the transformers Trainer, and plain torch.

    make bench
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_loop.py --contest mixture --cpu-time

The last contest is one of two processes, beside a loop by hand with torch's DistributedDataParallel. A mixture of three
sources is compared with one set, also where the module returns the loss of each sample without a mixture, and with a
larger network (64-1024-1024-10).

All train the same small network (64-256-10, batch 32, AdamW, one thread) on the same samples in memory, so that the
loop is measured, not the mathematics. Each round builds every contestant anew, lets it run one epoch to warm up and
times a second one; the rounds alternate the order. The ratio is that of the medians. accmt takes fused AdamW by itself;
therefore each peer is shown with it too, and accmt without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from hf_trainer import time_trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter

from accmt import AcceleratorModule, Callback, TensorBoard, Trainer

BATCH_SIZE = 32
LOG_EVERY = 10
NUM_VALIDATION = 640
LR = 1e-3

Sample = tuple[Tensor, Tensor]
Epoch = Callable[[], None]
Times = dict[str, list[float]]

TWO_PROCESSES = "loop only, two processes"
DDP_BY_HAND = "hand-written DDP"
ONE_SET = "accmt, one data set"
MIXTURE = "a mixture of three sources"
CLOCK: list[Callable[[], float]] = [time.perf_counter]


@dataclass(frozen=True)
class Contest:
    """Contestants that do the same work; each returns the seconds of one warm epoch."""

    title: str
    reference: str
    contestants: dict[str, Callable[[], float]]
    num_steps: int


def make_samples(count: int) -> list[Sample]:
    """Make random samples: inputs `[64]` and a label."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(count, 64, generator=generator), torch.randint(10, (count,), generator=generator)
    return list(zip(inputs, labels, strict=True))


def build_model() -> nn.Module:
    """Build the network that all train."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def time_second(epoch: Epoch) -> float:
    """Run an epoch twice and return the seconds of the second time."""
    epoch()
    gc.collect()
    start = CLOCK[0]()
    epoch()
    return CLOCK[0]() - start


def run_torch(train: list[Sample], *, fused: bool | None = None) -> float:
    """Time plain torch."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    loader = DataLoader(train, BATCH_SIZE, shuffle=True)

    def epoch() -> None:
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return time_second(epoch)


def run_accelerate(train: list[Sample], *, fused: bool | None = None) -> float:
    """Time the loop of Accelerate's documentation."""
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(train, BATCH_SIZE, shuffle=True))

    def epoch() -> None:
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return time_second(epoch)


def run_accelerate_in_use(train: list[Sample], validation: list[Sample], *, fused: bool | None = None) -> float:
    """Time that loop with clipping, TensorBoard every 10 updates, and validation after the epoch."""
    accelerator = Accelerator(cpu=True)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    loaders = DataLoader(train, BATCH_SIZE, shuffle=True), DataLoader(validation, BATCH_SIZE)
    model, optimizer, train_loader, validation_loader = accelerator.prepare(model, optimizer, *loaders)

    def train_epoch(writer: SummaryWriter) -> None:
        model.train()
        for step, (inputs, labels) in enumerate(train_loader):
            loss = functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % LOG_EVERY == 0:
                writer.add_scalar("train_loss", loss.item(), step)

    @torch.inference_mode()
    def validate(writer: SummaryWriter) -> None:
        model.eval()
        losses = []
        for inputs, labels in validation_loader:
            loss = functional.cross_entropy(model(inputs), labels)
            losses.append(accelerator.gather_for_metrics(loss.repeat(len(labels))))
        writer.add_scalar("val_loss", torch.cat(losses).mean().item(), 0)

    def epoch() -> None:
        train_epoch(writer)
        validate(writer)

    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        return time_second(epoch)


def run_hf_trainer(train: list[Sample], optim: str) -> float:
    """Time the transformers Trainer with all that can be off, off."""
    return time_trainer(build_model(), train, batch_size=BATCH_SIZE, lr=LR, optim=optim)


class Classifier(AcceleratorModule):
    """The network as a module of accmt."""

    def __init__(self) -> None:
        self.model = build_model()

    def step(self, batch: list[Tensor]) -> Tensor:
        """Return the mean loss of the batch."""
        inputs, labels = batch
        return functional.cross_entropy(self.model(inputs), labels)


class Larger(Classifier):
    """The same with a larger network."""

    def __init__(self) -> None:
        layers = nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        self.model = nn.Sequential(*layers)


class OfSources(Classifier):
    """Also returns the loss of each sample, from which a mixture finds that of each source."""

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        """Return the mean loss, and those of samples."""
        inputs, labels = batch
        losses = functional.cross_entropy(self.model(inputs), labels, reduction="none")
        return {"loss": losses.mean(), "losses": losses}


class LargerOfSources(OfSources, Larger):
    """Both."""


class EpochTimer(Callback):
    """Keeps the seconds of the last epoch, its validation included."""

    order = float("inf")

    def on_epoch_start(self) -> None:
        """Start the clock."""
        gc.collect()
        self.start = CLOCK[0]()

    def on_epoch_end(self) -> None:
        """Stop the clock."""
        self.seconds = CLOCK[0]() - self.start


@contextmanager
def build_trainer(
    timer: EpochTimer,
    *,
    fused: bool | None = None,
    shared: Path | None = None,
    data: object = None,
    **arguments: object,
) -> Iterator[Trainer]:
    """Build a Trainer of two epochs that leaves nothing behind; several processes share a folder."""
    optim = {"type": "AdamW", "lr": LR} | ({} if fused is None else {"fused": fused})
    with tempfile.TemporaryDirectory() as folder:
        yield Trainer(
            hps_config={"epochs": 2, "batch_size": BATCH_SIZE, "optim": optim, "data": data},
            model_path=(shared or Path(folder)) / "model",
            logging_dir=(shared or Path(folder)) / "logs",
            model_saving=None,
            checkpoint_every=None,
            accelerator={"cpu": True},
            callbacks=timer,
            verbose=False,
            **arguments,
        )


def run_accmt(train: list[Sample], *, fused: bool | None = None, folder: Path | None = None) -> float:
    """Time accmt with all that can be off, off."""
    timer = EpochTimer()
    with build_trainer(timer, fused=fused, shared=folder, log_every=-1) as trainer:
        trainer.fit(Classifier(), train)
    return timer.seconds


def run_accmt_in_use(train: list[Sample], validation: list[Sample], *, fused: bool | None = None) -> float:
    """Time accmt with clipping, TensorBoard every 10 updates, and validation after the epoch."""
    timer = EpochTimer()
    with build_trainer(timer, fused=fused, log_every=LOG_EVERY, log_with=TensorBoard, clip_grad=1.0) as trainer:
        trainer.fit(Classifier(), train, validation)
    return timer.seconds


def run_mixture(train: list[Sample], module: type[Classifier] = OfSources) -> float:
    """Time accmt with the same samples in three sources of equal weight, and a row of their losses every 10 steps."""
    timer = EpochTimer()
    sources = {name: train[number::3] for number, name in enumerate("abc")}
    with build_trainer(timer, log_every=LOG_EVERY, data={"mix": dict.fromkeys(sources, 1)}) as trainer:
        trainer.fit(module(), sources)
    return timer.seconds


def run_one_set(train: list[Sample], module: type[Classifier] = Classifier) -> float:
    """Time accmt with one data set, and a row every 10 steps."""
    timer = EpochTimer()
    with build_trainer(timer, log_every=LOG_EVERY) as trainer:
        trainer.fit(module(), train)
    return timer.seconds


def build_contests(num_steps: int) -> list[Contest]:
    """Return the contests, over epochs of so many steps."""
    train, validation = make_samples(num_steps * BATCH_SIZE), make_samples(NUM_VALIDATION)
    loop_only = {
        "plain torch": lambda: run_torch(train),
        "plain torch, fused": lambda: run_torch(train, fused=True),
        "hand-written Accelerate": lambda: run_accelerate(train),
        "hand-written Accelerate, fused": lambda: run_accelerate(train, fused=True),
        "transformers Trainer": lambda: run_hf_trainer(train, "adamw_torch"),
        "transformers Trainer, fused": lambda: run_hf_trainer(train, "adamw_torch_fused"),
        "accmt": lambda: run_accmt(train),
        "accmt, not fused": lambda: run_accmt(train, fused=False),
    }
    in_use = {
        "hand-written Accelerate": lambda: run_accelerate_in_use(train, validation),
        "hand-written Accelerate, fused": lambda: run_accelerate_in_use(train, validation, fused=True),
        "accmt": lambda: run_accmt_in_use(train, validation),
        "accmt, not fused": lambda: run_accmt_in_use(train, validation, fused=False),
    }
    few = train[: num_steps // 5 * BATCH_SIZE]
    mixed = {
        ONE_SET: lambda: run_one_set(train),
        "accmt, one data set, loss of each sample": lambda: run_one_set(train, OfSources),
        "accmt, three sources": lambda: run_mixture(train),
    }
    larger = {
        ONE_SET: lambda: run_one_set(few, Larger),
        "accmt, one data set, loss of each sample": lambda: run_one_set(few, LargerOfSources),
        "accmt, three sources": lambda: run_mixture(few, LargerOfSources),
    }
    return [
        Contest("loop only", "hand-written Accelerate", loop_only, num_steps),
        Contest("clip, TensorBoard every 10, validation", "hand-written Accelerate", in_use, num_steps),
        Contest(MIXTURE, ONE_SET, mixed, num_steps),
        Contest(f"{MIXTURE}, larger network", ONE_SET, larger, num_steps // 5),
    ]


def measure(contest: Contest, num_rounds: int) -> Times:
    """Run all rounds and return the microseconds per step of each contestant, round by round."""
    times: Times = {name: [] for name in contest.contestants}
    names = list(contest.contestants)
    for number in range(num_rounds):
        for name in names if number % 2 == 0 else reversed(names):
            times[name].append(contest.contestants[name]() / contest.num_steps * 1e6)
    return times


def run_ddp(train: list[Sample], *, fused: bool | None = None) -> float:
    """Time the loop of torch's documentation of DistributedDataParallel."""
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=fused)
    sampler: DistributedSampler[Sample] = DistributedSampler(train)
    loader = DataLoader(train, BATCH_SIZE, sampler=sampler)

    def epoch() -> None:
        for inputs, labels in loader:
            loss = functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return time_second(epoch)


def race_in_process(rank: int, num_steps: int, num_rounds: int, folder: str, port: int) -> None:
    """Be one of two processes that race; the main one writes the times down."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ.update(group | {"LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = make_samples(num_steps * BATCH_SIZE * 2)
    contestants = {
        DDP_BY_HAND: lambda: run_ddp(train),
        f"{DDP_BY_HAND}, fused": lambda: run_ddp(train, fused=True),
        "accmt": lambda: run_accmt(train, folder=Path(folder)),
    }
    times = measure(Contest(TWO_PROCESSES, DDP_BY_HAND, contestants, num_steps), num_rounds)
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure_two_processes(num_steps: int, num_rounds: int) -> Times:
    """Run the race of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(race_in_process, (num_steps, num_rounds, folder, port), nprocs=2)
        times: Times = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
        return times


def print_table(results: list[tuple[str, str, Times]]) -> None:
    """Print medians, minima and the ratio of the medians to the reference of each contest."""
    print("| contest | contestant | median us | minimum us | ratio | to |\n|---|---|---|---|---|---|")
    for title, reference, times in results:
        base = statistics.median(times[reference])
        for name, values in times.items():
            median = statistics.median(values)
            print(f"| {title} | {name} | {median:.0f} | {min(values):.0f} | {median / base:.2f} | {reference} |")


def main() -> None:
    """Run all contests on one thread a process."""
    parser = argparse.ArgumentParser(description="Time the training loop beside its peers.")
    parser.add_argument("--steps", type=int, default=500, help="steps of an epoch")
    parser.add_argument("--rounds", type=int, default=9, help="rounds, each with every contestant")
    parser.add_argument("--contest", default="", help="only contests with this in their title")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's time: other work counts less")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.cpu_time:
        CLOCK[0] = time.process_time
    results = []
    for contest in build_contests(options.steps):
        if options.contest in contest.title:
            results.append((contest.title, contest.reference, measure(contest, options.rounds)))
    if options.contest in TWO_PROCESSES:
        results.append((TWO_PROCESSES, DDP_BY_HAND, measure_two_processes(options.steps, options.rounds)))
    print_table(results)


if __name__ == "__main__":
    main()
