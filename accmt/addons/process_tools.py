"""Small tools for scripts on several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from os import environ
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from accmt.processes import launched_rank, run_where

P = ParamSpec("P")
T = TypeVar("T")


def on_process(process_index: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Run a function only on one process; otherwise like `on_main_process`.

    Args:
        process_index: The rank of the process.

    Examples:
        >>> @on_process(1)
        ... def name():
        ...     return "the second process"
        >>> name()  # here, there is only one
    """
    return lambda function: run_where(function, lambda: launched_rank() == process_index)


def on_local_process(local_process_index: int) -> Callable[[Callable[P, T]], Callable[P, T | None]]:
    """Run a function only on one process of each machine; otherwise like `on_main_process`.

    Args:
        local_process_index: The rank of the process on its machine.
    """
    return lambda function: run_where(function, lambda: int(environ.get("LOCAL_RANK", 0)) == local_process_index)


def dist_breakpoint(*ranks: int) -> None:
    """Call `breakpoint()` on one process after the other, while all others wait.

    In the debugger, `up` goes to the caller, and `c` continues with the next process.

    Processes: all.

    Args:
        ranks: The processes to stop on; none means all.
    """
    if not dist.is_initialized():
        breakpoint()  # noqa: T100 - what the function is for
        return
    group = dist.new_group(
        backend="gloo", timeout=timedelta(days=7)
    )  # people take longer than the default of 30 minutes
    for rank in ranks or range(dist.get_world_size()):
        if rank == dist.get_rank():
            breakpoint()  # noqa: T100
        dist.barrier(group)
    dist.destroy_process_group(group)


def iterbatch(data: Any, size: int) -> Iterator[Any]:
    """Yield slices of `size` entries; the last one may be shorter.

    Args:
        data: A list, a tensor, an array or anything else with a length and slices.
        size: The entries of a slice.

    Examples:
        >>> list(iterbatch([1, 2, 3], 2))
        [[1, 2], [3]]
    """
    for start in range(0, len(data), size):
        yield data[start : start + size]
