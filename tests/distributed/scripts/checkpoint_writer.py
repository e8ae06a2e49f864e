"""Saves from threads while the main threads reduce on the default group; writes what each process saw.

torchrun --nproc-per-node 2 checkpoint_writer.py FOLDER RESULT.json
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accmt.checkpoint import writer as writer_module
from accmt.checkpoint.contents import StateCollector, load_state, write_state
from accmt.checkpoint.store import CheckpointStore
from accmt.checkpoint.writer import CheckpointWriter
from accmt.errors import CheckpointError
from accmt.processes import (
    broadcast_object,
    gather_objects,
    new_cpu_group,
    process_index,
    run_on_main_process,
)
from tests.distributed.scripts.answers import write_and_leave

NUM_SAVES = 20


class Run:
    """A small model in training on all processes."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(8, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.failures: list[CheckpointError] = []
        self.store = CheckpointStore(folder, max_checkpoints=NUM_SAVES, group=new_cpu_group())
        collector = StateCollector(self.model, [self.optimizer])
        self.writer = CheckpointWriter(self.store, collector, is_async=True, on_failure=self.failures.append)
        self.num_updates = 0

    def update(self) -> None:
        self.model(torch.full((2, 8), 1.0 + process_index())).square().mean().backward()  # reduces gradients
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_updates += 1

    def save(self) -> torch.Tensor:
        self.writer.save(self.num_updates, {"updates": self.num_updates}, {"of": process_index()})
        return self.model.module.weight.detach().clone()


def write_with_delay(collected: Any, folder: Path) -> list[Path]:
    """Write so that the processes come to the publication one after the other, now this one first, now that one."""
    time.sleep(0.02 * ((process_index() + len(list(folder.parent.parent.iterdir()))) % 2))
    return write_state(collected, folder)


def train_while_saving(run: Run) -> dict[str, Any]:
    weights, sums = {}, []
    run.update()
    run.writer.prepare({})
    for _ in range(NUM_SAVES):
        weights[run.num_updates] = run.save()
        for number in range(5):
            run.update()
            total = torch.tensor([number + process_index()])
            dist.all_reduce(total)
            sums.append(total.item() == 2 * number + 1)
    run.writer.wait()
    is_exact = []
    for step, expected in weights.items():
        found = run.store.find(run.store.folder / f"step-{step:08d}")
        others = load_state(run.model, [run.optimizer], found.folder)
        is_exact.append(torch.equal(run.model.module.weight, expected) and others == {"updates": step})
    return {"sums are right": all(sums), "exact": is_exact, "failures": len(run.failures)}


def fail_on(rank: int, run: Run) -> list[str]:
    """Save twice, the first time with a failure on one process, and return what was told."""

    def write_or_fail(collected: Any, folder: Path) -> list[Path]:
        if process_index() == rank:
            raise OSError(28, "No space left on device")
        return write_state(collected, folder)

    run.failures.clear()
    writer_module.write_state = write_or_fail
    run.update()
    run.save()
    for _ in range(5):
        run.update()
    run.writer.wait()
    writer_module.write_state = write_state
    run.save()
    run.writer.wait()
    return [str(failure) for failure in run.failures]


def answer(folder: Path) -> dict[str, Any]:
    group = new_cpu_group()
    answers: dict[str, Any] = {
        "gathered": gather_objects(process_index(), group=group),
        "broadcast": broadcast_object(process_index(), group=group),
        "on main": run_on_main_process(process_index, group=group),
    }
    run = Run(folder)
    writer_module.write_state = write_with_delay
    answers["trained"] = train_while_saving(run)
    for rank in (0, 1):
        answers[f"failed on {rank}"] = fail_on(rank, run)
        answers[f"saved after {rank}"] = run.store.newest().step == run.num_updates
    run.writer.close()
    return answers


def main() -> None:
    dist.init_process_group("gloo")
    write_and_leave(answer(Path(sys.argv[1])), sys.argv[2])


if __name__ == "__main__":
    main()
