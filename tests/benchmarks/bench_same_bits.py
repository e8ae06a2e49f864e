"""What `same_bits` costs on two processes, and its sum over processes alone beside `torch.distributed.all_reduce`.

    OMP_NUM_THREADS=1 python tests/benchmarks/bench_same_bits.py
    OMP_NUM_THREADS=1 python tests/benchmarks/bench_same_bits.py --cpu-time --size 24 --units 2

Both train the same small transformer on the same samples, for which a step of one process takes about 50 ms on one core
(`--size` is its samples per step). Runs with and without take turns; steps are timed after the first five. "Extra" is
the median of the differences of neighboring runs. On a busy machine, take `--cpu-time`, and the minimum.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, Trainer
from accmt.addons.same_bits.sums import all_reduce

PROCESSES = 2
WIDTH, LENGTH, VOCABULARY = 128, 32, 1000
WARM_UP = 5
SIZES = {"1 MB": 2**18, "16 MB": 2**22, "64 MB": 2**24}

Options = argparse.Namespace
Times = dict[str, list[float]]


class Tokens(AcceleratorModule):
    """Predicts each token from itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, nn.Linear(WIDTH, VOCABULARY))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Return the loss."""
        return functional.cross_entropy(self.model(batch[0]).flatten(0, 1), batch[0].flatten())


class StepTimer(Callback):
    """Keeps the milliseconds of each step, from the end of one to the end of the next."""

    order = float("inf")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.ends: list[float] = []

    def on_update_end(self) -> None:
        """Read the clock."""
        self.ends.append(self.clock())

    @property
    def milliseconds(self) -> list[float]:
        """The times of the steps after the first ones."""
        ends = self.ends[WARM_UP:]
        return [1e3 * (end - begin) for begin, end in zip(ends, ends[1:], strict=False)]


def run(folder: Path, options: Options, units: int | None) -> float:
    """Return the median milliseconds of a step."""
    timer = StepTimer(time.process_time if options.cpu_time else time.perf_counter)
    size = options.size * (PROCESSES if units else 1)  # with units, a batch is that of all processes
    samples = options.size * PROCESSES * options.steps
    generator = torch.Generator().manual_seed(1)
    trainer = Trainer(
        {"epochs": 1, "batch_size": size, "optim": {"type": "AdamW", "lr": 1e-3}},
        folder / "model",
        logging_dir=folder / "logs",
        model_saving=None,
        checkpoint_every=None,
        accelerator={"cpu": True},
        callbacks=timer,
        verbose=False,
        log_every=-1,
        seed=1,
        same_bits=units,
    )
    trainer.fit(Tokens(), TensorDataset(torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)))
    return statistics.median(timer.milliseconds)


def time_sum(add: Callable[[Tensor], Any], number: int, rounds: int) -> float:
    """Return the median milliseconds of a sum of vectors of all processes."""
    vector, times = torch.randn(number), []
    for _ in range(rounds):
        dist.barrier()
        begin = time.perf_counter()
        add(vector)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def measure_in_process(rank: int, options: Options, folder: str, port: int) -> None:
    """Be one of the processes; the main one writes the times down."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(PROCESSES), "RANK": str(rank)}
    os.environ.update(group | {"LOCAL_RANK": str(rank), "ACCELERATE_USE_CPU": "true"})
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    steps: Times = {"without": [], "same_bits": []}
    for _ in range(options.rounds):
        for name, times in steps.items():
            times.append(run(Path(folder), options, options.units if name == "same_bits" else None))
    sums = {
        name: {
            "torch": time_sum(dist.all_reduce, number, 12),
            "same_bits": time_sum(all_reduce, number, 12),
        }
        for name, number in SIZES.items()
    }
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps([steps, sums]), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--units", type=int, default=8)
    parser.add_argument("--size", type=int, default=28, help="samples of a step on each process")
    parser.add_argument("--steps", type=int, default=30, help="steps of a run")
    parser.add_argument("--rounds", type=int, default=7, help="runs of each kind")
    parser.add_argument("--cpu-time", action="store_true", help="the processor's time: other work counts less")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure_in_process, (options, folder, port), nprocs=PROCESSES)
        steps, sums = json.loads((Path(folder) / "times.json").read_text(encoding="utf-8"))
    print("| a step on 2 processes | median ms | minimum ms | ratio of medians | of minima |\n|---|---|---|---|---|")
    base = steps["without"]
    for name, times in steps.items():
        median, least = statistics.median(times), min(times)
        ratios = f"{median / statistics.median(base):.3f} | {least / min(base):.3f}"
        print(f"| {name} | {median:.1f} | {least:.1f} | {ratios} |")
    extra = statistics.median(with_ - without for without, with_ in zip(base, steps["same_bits"], strict=True))
    print(f"\nextra: {extra:.1f} ms a step\n")
    print("| a sum over 2 processes | all_reduce of torch, ms | same_bits, ms |\n|---|---|---|")
    for size, of_size in sums.items():
        print(f"| {size} | {of_size['torch']:.2f} | {of_size['same_bits']:.2f} |")


if __name__ == "__main__":
    main()
