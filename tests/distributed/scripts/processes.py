"""Asks every question that needs several processes, and writes the answers of each.

torchrun --nproc-per-node 2 processes.py RESULT.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler

from accmt.addons.outputs import gather_on_cpu
from accmt.data import Shard, SourceOptions, build_source
from accmt.processes import (
    broadcast_object,
    gather_objects,
    is_main_process,
    num_processes,
    process_index,
    run_on_every_process,
    run_on_main_process,
    sum_over_processes,
)
from tests.distributed.scripts.answers import write_and_leave


class AwkwardError(Exception):
    """Can be pickled, but not be read back: as many errors whose constructor takes two arguments."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} {code}")


def error_of(action: Callable[[], Any], run: Callable[..., Any] = run_on_main_process) -> str | None:
    """Return what an action, on the main process unless told otherwise, raises here."""
    try:
        run(action)
    except Exception as error:  # noqa: BLE001 - which one is the answer
        return f"{type(error).__name__}: {error}"
    return None


def fail(error: Exception) -> None:
    raise error


def fail_on(process: int, error: Exception) -> None:
    if process_index() == process:
        raise error


def fail_with_something_that_cannot_be_pickled() -> None:
    error = OSError("the disk is full")
    error.connection = lambda: None  # type: ignore[attr-defined]
    raise error


def read_with_own_generators() -> dict[str, list[int]]:
    """Read data whose order each process would draw from a generator with another seed."""
    rank = process_index()
    options = {"purpose": "train", "batch_size": 2, "shard": Shard(rank, num_processes())}
    sampler = RandomSampler(range(13), generator=torch.Generator().manual_seed(rank))
    given = DataLoader(range(13), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(rank))
    loaders = {
        "sampler": build_source(range(13), SourceOptions(**options, sampler=sampler)),
        "loader": build_source(given, SourceOptions(**options)),
    }
    return {
        name: [
            int(s)
            for micro_batch in loader.micro_batches(1)
            if micro_batch.batch is not None
            for s in micro_batch.batch
        ]
        for name, loader in loaders.items()
    }


def make_rows() -> torch.Tensor:
    """Make 3 rows on the first process and 5 on the second."""
    return torch.arange(3.0 + 2 * process_index()).reshape(-1, 1) + 10 * process_index()


def answer() -> dict[str, Any]:
    """Ask everything once."""
    acted: list[str] = []
    answers = {
        "num_processes": num_processes(),
        "process_index": process_index(),
        "is_main_process": is_main_process(),
        "sums": sum_over_processes([process_index() + 1, 0.1, 1e15 + process_index()]),
        "no_sums": sum_over_processes([]),
        "gathered": gather_objects({"rank": process_index()}),
        "broadcast": broadcast_object(["of", process_index()]),
        "on_main": run_on_main_process(lambda: acted.append("acted") or "done"),
        "plain_error": error_of(lambda: fail(ValueError("wrong"))),
        "awkward_error": error_of(lambda: fail(AwkwardError("wrong", 3))),
        "unpicklable_error": error_of(fail_with_something_that_cannot_be_pickled),
        "has_unpicklable_value_error": error_of(lambda: lambda: None) is not None,
        "on_every": run_on_every_process(lambda: process_index() * 10),
        "error_of_the_second": error_of(lambda: fail_on(1, ValueError("wrong")), run_on_every_process),
        "awkward_error_of_the_second": error_of(lambda: fail_on(1, AwkwardError("wrong", 3)), run_on_every_process),
        "in_step_afterwards": gather_objects(process_index()),
        "read": read_with_own_generators(),
        "rows": [gather_on_cpu(make_rows(), chunk=chunk).tolist() for chunk in (None, 1, 2, 4)],
    }
    return {**answers, "acted": acted}


def main() -> None:
    """Answer, and write before leaving: a gloo process may abort at interpreter exit."""
    dist.init_process_group("gloo")
    write_and_leave(answer(), sys.argv[1])


if __name__ == "__main__":
    main()
