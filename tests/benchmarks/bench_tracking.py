"""What trackers cost a step of about 5 milliseconds, also where they are slow, down, or raise.

    python tests/benchmarks/bench_tracking.py

Each contestant trains the same network for 300 updates. Rounds alternate the order; the table shows the median step
beside that of a run without trackers in the same round (the middle of all rounds), and the same for the mean step, in
which rare long steps count too. Rows are logged at every update, if not said otherwise.
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
WIDTH = 1024
BATCH_SIZE = 48
REFERENCE = "no tracker"


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


CONTESTANTS: dict[str, Callable[[], dict[str, Any]]] = {
    REFERENCE: lambda: {"log_with": None, "log_every": 1},
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
        tracker_flush_s=1.0,
        callbacks=stopwatch,
        seed=0,
        **settings,
    )
    trainer.fit(Network(), data)
    steps = stopwatch.steps_ms()
    return statistics.median(steps), statistics.fmean(steps)


def main(rounds: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        names = list(CONTESTANTS)[:: 1 if number % 2 == 0 else -1]
        for name in names:
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(time_run(CONTESTANTS[name](), Path(folder)))
    print("| tracker | median step, ms | median x without | mean x without |\n|---|---|---|---|")
    for name, measured in times.items():
        ratios = [
            statistics.median(
                own[part] / reference[part] for own, reference in zip(measured, times[REFERENCE], strict=True)
            )
            for part in (0, 1)
        ]
        print(f"| {name} | {statistics.median(m for m, _ in measured):.2f} | {ratios[0]:.3f} | {ratios[1]:.3f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    main(parser.parse_args().rounds)
