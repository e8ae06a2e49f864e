"""What trackers cost a step of about 5 milliseconds, also where they are slow, down, or raise.

    python tests/benchmarks/bench_tracking.py

Each contestant trains the same network for 300 updates, between two runs without trackers; the table shows the median
step beside the mean of those two (the middle of all rounds), and the same for the mean step, in which rare long steps
count too. The first line is a run without trackers measured in the same way: how far it is from 1 is the error of the
others. Rows are logged at every update, if not said otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import GeneralTracker
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, Trainer

UPDATES = 300
WARM_UP = 20
WIDTH = 512
BATCH_SIZE = 128


class Troubled(GeneralTracker):
    """A tracker that does at its calls what a function of their number does."""

    name = "troubled"
    requires_logging_directory = False
    tracker = None

    def __init__(self, trouble: Callable[[int], None]) -> None:
        super().__init__()
        self.trouble = trouble
        self.num_calls = 0

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Have trouble."""
        self.num_calls += 1
        self.trouble(self.num_calls)


def always_raise(call: int) -> None:
    """Raise at each call."""
    raise ConnectionError("no route to host")


def be_slow(call: int) -> None:
    """Take five seconds for each call."""
    time.sleep(5.0)


def be_down_for_a_while(call: int) -> None:
    """Raise at the calls from 10 to 60."""
    if 10 <= call <= 60:
        raise ConnectionError("no route to host")


def without_trackers() -> dict[str, Any]:
    """Return the settings of the run that others are compared with."""
    return {"log_with": None, "log_every": 1}


CONTESTANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "no tracker": without_trackers,
    "MLflow (sqlite)": lambda: {"log_with": "mlflow", "log_every": 1},
    "MLflow (sqlite), log_every=10": lambda: {"log_with": "mlflow", "log_every": 10},
    "TensorBoard": lambda: {"log_with": "tensorboard", "log_every": 1},
    "raises at each call": lambda: {"log_with": Troubled(always_raise), "log_every": 1},
    "takes 5 s per call": lambda: {"log_with": Troubled(be_slow), "log_every": 1},
    "down for calls 10 to 60": lambda: {"log_with": Troubled(be_down_for_a_while), "log_every": 1},
}


class Network(AcceleratorModule):
    """A network that takes about 5 milliseconds per step on one thread."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the mean squared error."""
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)


class Stopwatch(Callback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_before_training_step(self) -> None:
        """Note the time."""
        self.moments.append(time.perf_counter())

    def steps_ms(self) -> list[float]:
        """Return how long each step took, the first ones left out."""
        pairs = zip(self.moments[WARM_UP:], self.moments[WARM_UP + 1 :], strict=False)
        return [1e3 * (end - begin) for begin, end in pairs]


def time_run(settings: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Return the median and the mean step of one run, in milliseconds."""
    data = TensorDataset(torch.randn(BATCH_SIZE * UPDATES, WIDTH), torch.randn(BATCH_SIZE * UPDATES, 1))
    stopwatch = Stopwatch()
    trainer = Trainer(
        {"epochs": 1, "batch_size": BATCH_SIZE, "optim": {"type": "SGD", "lr": 1e-3}},
        str(folder / "model"),
        logging_dir=str(folder / "logs"),
        model_saving=None,
        checkpoint_every=None,
        verbose=False,
        tracker_options={"flush_s": 1.0},
        callbacks=stopwatch,
        seed=0,
        **settings,
    )
    trainer.fit(Network(), data)
    steps = stopwatch.steps_ms()
    return statistics.median(steps), statistics.fmean(steps)


def median_and_mean_step(settings: dict[str, Any]) -> tuple[float, float]:
    """Return both of one run, in milliseconds, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return time_run(settings, Path(folder))


def main(rounds: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    steps: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    before = median_and_mean_step(without_trackers())
    for _ in range(rounds):
        for name, settings in CONTESTANTS.items():
            measured = median_and_mean_step(settings())
            after = median_and_mean_step(without_trackers())
            steps[name].append(measured[0])
            ratios[name].append((2 * measured[0] / (before[0] + after[0]), 2 * measured[1] / (before[1] + after[1])))
            before = after
    print("| tracker | median step, ms | median x without | mean x without |\n|---|---|---|---|")
    for name, pairs in ratios.items():
        median, mean = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"| {name} | {statistics.median(steps[name]):.2f} | {median:.3f} | {mean:.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    main(parser.parse_args().rounds)
