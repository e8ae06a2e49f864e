"""The processes that load data: how one starts and ends, and what an error says when one has died."""

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
from torch.utils.data import DataLoader, IterableDataset

from accmt.data.fetching import SeededDataset
from accmt.data.own_generators import find_generators, reseed, user_seed
from accmt.data.seeding import derive_seed
from accmt.errors import explain
from accmt.libraries.private_names import shut_down_workers, workers_of
from accmt.libraries.versions import may_deadlock_in_forks

_LEAVE_S = 30.0
_DIE_S = 1.0
_THREADS_S = 0.002  # for threads of torch to finish with the last collective
_DEAD = explain(
    "a process that loads data",
    "it exited without an error message: the system kills a process when memory, or space in /dev/shm, runs out",
    "all of them alive as long as the run",
    "check `dmesg` and `df /dev/shm`; fewer dataloader_num_workers, or smaller batches, need less of both",
)


def start_reading(dataloader: DataLoader[Any]) -> Iterator[Any]:
    """Return the DataLoader's iterator; its workers are forked while no other thread is in the interpreter.

    Just after a collective, a thread of torch may take the GIL to release the tensors. Before CPython 3.11.8, a process
    that is forked at that moment waits for ever for a lock that the thread held (python/cpython#112275), and so does
    whoever waits for its batches.
    """
    if dataloader.num_workers and may_deadlock_in_forks():
        _wait_at_each_fork()
        time.sleep(_THREADS_S)
    return iter(dataloader)


@cache
def _wait_at_each_fork() -> None:
    # The call takes and releases the lock on the list of threads, so each fork first waits for whoever holds it.
    os.register_at_fork(before=sys._current_frames)


def leave_signals_to_parent() -> None:
    """Let a worker continue when a signal asks the whole job to end: its parent still finishes the current step.

    A worker that its parent ends by SIGTERM exits too: half a minute later, or when SIGTERM is sent again.
    """
    signal.set_wakeup_fd(-1)  # inherited; a worker's signals are not for its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_later)


def _leave_later(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LEAVE_S)


def end_workers(dataloader: DataLoader[Any], batches: Any) -> None:
    """End the processes that load data for an iterator.

    torch ends them when nothing refers to the iterator any more; until then they would wait for another epoch, or live
    as long as the traceback of an error that ended the run.
    """
    shut_down_workers(dataloader, batches)


@dataclass(frozen=True)
class WorkerStart:
    """Starts a worker, with the user's `worker_init_fn`; `get_worker_info().dataset` is the user's, not our wrapper."""

    user_function: Callable[[int], Any] | None = None

    def __call__(self, worker_id: int) -> None:
        leave_signals_to_parent()
        info = torch.utils.data.get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo rejects assignment
        if info is not None and isinstance(info.dataset, IterableDataset):
            for generator in find_generators(info.dataset, through_streams=True):
                reseed(generator, derive_seed(info.seed, "generator", user_seed(generator)))
        if self.user_function is not None:
            self.user_function(worker_id)


def note_dead_worker(error: BaseException, batches: Any = None) -> None:
    """Add to an error that a worker's death has caused what may have killed it; other errors are left as they are.

    torch raises an error of its own wherever the main thread is at that moment; while it receives data from the worker,
    it may be the system's error about the connection instead.

    Source: `_error_if_any_worker_fails` in torch/csrc/DataLoader.cpp.
    """
    workers = {worker.sentinel: worker for worker in workers_of(batches)}
    if workers and isinstance(error, ConnectionError | EOFError):
        for sentinel in wait(workers, timeout=_DIE_S):
            workers[sentinel].join()
    is_from_torch = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
    is_dead = is_from_torch or any(worker.exitcode for worker in workers.values())
    if is_dead and _DEAD not in getattr(error, "__notes__", ()):
        error.add_note(_DEAD)
