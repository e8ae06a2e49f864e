"""Runs that meet losses that are not finite, or run out of memory, on one process; writes what became of each.

torchrun --nproc-per-node 2 recovery.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, Trainer
from accmt.errors import NonFiniteError

SAMPLES = 48
GLOBAL_BATCH = 12
BAD_SAMPLE = 29  # in the third window of an epoch, which is not shuffled


class Network(AcceleratorModule):
    """Runs out of memory on one process, with more samples than fit, from a batch on."""

    def __init__(self, out_of_memory: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
        self.out_of_memory = out_of_memory

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        if self.out_of_memory is not None and self.runs_out(len(inputs), **self.out_of_memory):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return nn.functional.mse_loss(self.model(inputs), targets)

    def runs_out(self, samples: int, *, process: int, fits: int, begins: int) -> bool:
        return dist.get_rank() == process and samples > fits and self.state.batch_iteration >= begins


def make_data(*, has_bad_sample: bool) -> TensorDataset:
    inputs = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    if has_bad_sample:
        targets[BAD_SAMPLE] = float("nan")
    return TensorDataset(inputs, targets)


def run(folder: Path, *, module: Network, has_bad_sample: bool, hps: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Train, and return what became of the run."""
    hps = {"epochs": 2, "batch_size": GLOBAL_BATCH // dist.get_world_size(), **hps}
    hps["optim"] = {"type": "SGD", "lr": 0.05, "momentum": 0.9}
    settings = {"model_saving": None, "verbose": False, "seed": 0, "log_every": 2, "shuffle_train": False, **settings}
    trainer = Trainer(hps, str(folder / "model"), logging_dir=str(folder / "logs"), **settings)
    outcome: dict[str, Any] = {"error": None}
    try:
        trainer.fit(module, make_data(has_bad_sample=has_bad_sample))
    except NonFiniteError as error:
        outcome["error"] = str(error)
    weights = [parameter.detach().flatten().tolist() for parameter in module.model.parameters()]
    counters = trainer.state.state_dict()
    return {
        **outcome,
        "weights": [value for part in weights for value in part],
        **{name: counters[name] for name in ("global_step", "skipped_steps", "samples_seen", "epoch")},
        "micro_batch": trainer.train_step_batch_size,
    }


def main() -> None:
    result, folder = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    processes = dist.get_world_size()
    outcomes = {}
    for reaction in ("stop", "skip", "rollback"):
        settings = {"failures": {"on_nonfinite": reaction}, "checkpoint_every": "1 step"}
        outcomes[reaction] = run(folder / reaction, module=Network(), has_bad_sample=True, hps={}, **settings)
    size = GLOBAL_BATCH // processes
    for begins, every in ((0, None), (1, None), (5, "2 steps")):
        told = {"process": processes - 1, "fits": size // 2, "begins": begins}
        outcomes[f"memory {begins}"] = run(
            folder / f"memory{begins}",
            module=Network(told),
            has_bad_sample=False,
            hps={"max_micro_batch_size": "auto"},
            checkpoint_every=every,
        )
    everywhere: list[Any] = [None] * processes
    dist.all_gather_object(everywhere, outcomes)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(everywhere))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
