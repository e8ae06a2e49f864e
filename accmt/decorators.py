"""Decorators for functions that run on one process only; each call decides, also before a run has begun."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

P = ParamSpec("P")
T = TypeVar("T")


def on_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function on the main process only; on the others it does nothing and returns None.

    It must not communicate with other processes: they would not answer.

    Example:
        >>> @on_main_process
        ... def name():
        ...     return "main"
        >>> name()
        'main'
    """
    return _run_where(function, lambda: _rank() == 0)


def on_local_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function on the first process of each machine only; otherwise as `on_main_process`."""
    return _run_where(function, lambda: int(os.environ.get("LOCAL_RANK", 0)) == 0)


def on_last_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function on the last process only; otherwise as `on_main_process`."""
    return _run_where(function, lambda: _rank() == _num_launched() - 1)


def _run_where(function: Callable[P, T], is_here: Callable[[], bool]) -> Callable[P, T | None]:
    @wraps(function)
    def act(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_here() else None

    return act


def _rank() -> int:
    return dist.get_rank() if _has_group() else int(os.environ.get("RANK", 0))


def _num_launched() -> int:
    return dist.get_world_size() if _has_group() else int(os.environ.get("WORLD_SIZE", 1))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
