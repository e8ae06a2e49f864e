"""Count the Python calls of accmt's own code that one optimizer step makes.

    python tests/benchmarks/count_calls.py [--by-function]

A tiny model, one process, no validation, no log rows: what is counted is the loop itself. Two runs that differ only in
their number of steps are compared, so that what a run does once cancels out. Calls are counted by `sys.setprofile`; the
resumption of a generator is one too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import accmt
from accmt import AcceleratorModule, Trainer

PACKAGE = str(Path(accmt.__file__).parent)
STEPS = 20
CASES: dict[str, dict[str, Any]] = {
    "bare step": {"enable_progress_bar": False},
    "bare step, progress bar on": {"enable_progress_bar": True},
    "bare step, checkpoints on": {"enable_progress_bar": False, "checkpoint_every": "epoch"},
    "bare step, a mixture of three sources": {"enable_progress_bar": False, "num_sources": 3},
}


class Tiny(AcceleratorModule):
    """One layer; in a mixture, it returns the loss of each sample, too."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 2)

    def training_step(self, batch: list[torch.Tensor]) -> Any:
        """Return the mean loss of a batch."""
        inputs, labels = batch
        losses = nn.functional.cross_entropy(self.model(inputs), labels, reduction="none")
        return {"loss": losses.mean(), "losses": losses} if self.wants_sample_losses else losses.mean()


def count_fit(num_steps: int, num_sources: int = 1, **arguments: Any) -> Counter[str]:
    """Count the calls of a run of so many steps, by file and function."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls[f"{code.co_filename[len(PACKAGE) + 1 :]}:{code.co_firstlineno} {code.co_name}"] += 1

    samples = TensorDataset(torch.randn(num_steps * 2, 4), torch.zeros(num_steps * 2, dtype=torch.long))
    data: Any = samples
    hps: dict[str, Any] = {"epochs": 1, "batch_size": 2, "optim": {"type": "AdamW", "lr": 1e-3}}
    if num_sources > 1:
        names = [f"source{number}" for number in range(num_sources)]
        data, hps = dict.fromkeys(names, samples), {**hps, "epochs": -1, "max_steps": num_steps}
        hps["data"] = {"mix": dict.fromkeys(names, 1), "stop": "repeat"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            hps,
            Path(folder) / "model",
            logging_dir=Path(folder) / "logs",
            **{"model_saving": None, "checkpoint_every": None, "log_every": -1, "verbose": False, **arguments},
        )
        sys.setprofile(count)
        try:
            trainer.fit(Tiny(), data)
        finally:
            sys.setprofile(None)
    return calls


def count_step(**arguments: Any) -> Counter[str]:
    """Count the calls of one step, by file and function, to the nearest whole one."""
    count_fit(1, **arguments)  # what is imported or built once in a process
    calls = count_fit(2 * STEPS, **arguments)
    calls.subtract(count_fit(STEPS, **arguments))
    return Counter({name: round(count / STEPS) for name, count in calls.items() if round(count / STEPS)})


def main() -> None:
    """Print the calls of a step, with and without a progress bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by-function", action="store_true", help="list the functions that are called")
    options = parser.parse_args()
    for name, arguments in CASES.items():
        calls = count_step(**arguments)
        files = {function.split(":")[0] for function in calls}
        print(f"{name}: {calls.total()} calls a step, in {len(files)} files")
        for function, count in calls.most_common() if options.by_function else ():
            print(f"  {count:4}  {function}")


if __name__ == "__main__":
    main()
