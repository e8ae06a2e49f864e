"""The processes that load data beside training: how one starts, and what is said when one is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader

from accmt.data.fetching import SeededDataset
from accmt.errors import explain

_LEAVE_S = 30.0
_DIE_S = 1.0
_THREADS_S = 0.002  # for threads of torch to finish with the collective before
_DEAD = explain(
    "a process that loads data",
    "it exited without an error message: the system ends a process so when memory, or room in /dev/shm, is used up",
    "all of them alive as long as the run",
    "look at `dmesg` and `df /dev/shm`; fewer dataloader_num_workers, or smaller batches, need less of both",
)


def start_reading(dataloader: DataLoader[Any]) -> Iterator[Any]:
    """Return the DataLoader's iterator; its workers are forked while no other thread enters the interpreter.

    Just after a collective, a thread of torch may take the GIL to release the tensors. Before CPython 3.11.8, a process
    that is forked at that moment waits for ever for a lock that the thread held (python/cpython#112275), and so does
    whoever waits for its batches.
    """
    if dataloader.num_workers and sys.version_info < (3, 12):
        _wait_at_each_fork()
        time.sleep(_THREADS_S)
    return iter(dataloader)


@cache
def _wait_at_each_fork() -> None:
    """Let each fork wait first for whoever holds the lock on the list of threads, which the call takes and releases."""
    os.register_at_fork(before=sys._current_frames)


def leave_signals_to_parent() -> None:
    """Let a worker go on when a signal asks the whole job to end: its parent still finishes the update in work.

    A worker that its parent has to end by SIGTERM goes too: half a minute later, or when it is sent again.
    """
    signal.set_wakeup_fd(-1)  # inherited; what a worker hears is not for its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_later)


def _leave_later(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LEAVE_S)


def end_workers(dataloader: DataLoader[Any], batches: Any) -> None:
    """End the processes that load data.

    They would wait for another epoch, or live as long as the traceback of an error that ended the run: torch ends them
    when nobody holds the iterator any more.

    Args:
        dataloader: The DataLoader.
        batches: What iterates over it.
    """
    shut_down = getattr(batches, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()
    dataloader._iterator = None


@dataclass(frozen=True)
class WorkerStart:
    """Starts a loader's worker so that `get_worker_info().dataset` is the user's dataset, not our wrapper.

    Attributes:
        own: The user's `worker_init_fn`.
    """

    own: Callable[[int], Any] | None = None

    def __call__(self, worker_id: int) -> None:
        """Run in the worker, before its first fetch."""
        leave_signals_to_parent()
        info = torch.utils.data.get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo refuses ordinary assignment
        if self.own is not None:
            self.own(worker_id)


def note_dead_worker(error: BaseException, batches: Any = None) -> None:
    """Say, with an error that a worker's death has caused, what may have ended it.

    torch raises one of its own wherever the main thread is at that moment; where it is receiving what the worker sent,
    it may be the system's error about the connection instead.

    Args:
        error: The error; one of another cause is left as it is.
        batches: What iterates over the DataLoader.

    Source: `_error_if_any_worker_fails` in torch/csrc/DataLoader.cpp.
    """
    workers = {worker.sentinel: worker for worker in getattr(batches, "_workers", ())}
    if workers and isinstance(error, ConnectionError | EOFError):
        for sentinel in wait(workers, timeout=_DIE_S):
            workers[sentinel].join()
    is_from_torch = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
    is_dead = is_from_torch or any(worker.exitcode for worker in workers.values())
    if is_dead and _DEAD not in getattr(error, "__notes__", ()):
        error.add_note(_DEAD)
