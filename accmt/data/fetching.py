"""Fetches and collates the samples of a batch; errors name the bad samples, or the samples are skipped.

Errors keep their type and traceback, so you can catch them. A note adds where they happened; the traceback shows it
even if a worker read the sample.

Source: `ExceptionWrapper` in torch/_utils.py, which sends an error of a worker as its type and printed traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from accmt.data.collate import collate_or_explain, stack_tuples
from accmt.data.seeding import (
    BatchIndices,
    derive_seed,
    find_generators,
    reseed,
    seed_generators,
    user_seed,
)
from accmt.errors import AccmtError, StoreError, explain, is_out_of_memory
from accmt.libraries.private_names import workers_of
from accmt.libraries.versions import may_deadlock_in_forks

_MAX_NAMED = 16
_MAX_TEXT = 200
_SKIP = 'Trainer(failures={"on_bad_sample": "skip"}) skips unreadable samples'


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read: its index in the dataset and the error."""

    index: int
    error: str


class ReadableBatch(NamedTuple):
    """A batch without its bad samples; a tuple, so that workers can send it.

    Attributes:
        batch: None if no sample is left.
    """

    batch: Any
    bad: tuple[BadSample, ...]


@dataclass(slots=True)
class Fetched:
    """The readable samples of one batch, the requested indices, and the bad samples."""

    samples: list[Any]
    indices: Sequence[int]
    bad: tuple[BadSample, ...] = ()
    seed: int | None = None  # the seed to set before collating; None if it was set before reading


def only_holds(dataset: Any) -> bool:
    """Return whether reading a sample runs no code of the user, who might draw random numbers there."""
    return type(dataset) in (list, tuple, TensorDataset) or getattr(dataset, "only_holds_samples", False) is True


class SeededDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset that fetches every batch under the seed in its indices."""

    def __init__(self, dataset: Any, *, skips_bad: bool = False) -> None:
        self.dataset = dataset
        self._skips_bad = skips_bad
        self._reads_together = hasattr(dataset, "__getitems__")
        self._only_holds = only_holds(dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: BatchIndices) -> Fetched:
        """Fetch one batch; torch's loader calls this where it exists."""
        if not self._only_holds:
            seed_generators(batch.seed)
        if self._reads_together:
            fetched = self._fetch_together(batch)
        else:
            fetched = self._fetch_each(batch.indices, self.dataset.__getitem__)
        if self._only_holds:  # nothing has drawn yet: collating sets the seed
            fetched.seed = batch.seed
        return fetched

    def _fetch_together(self, batch: BatchIndices) -> Fetched:
        indices = batch.indices
        try:
            return Fetched(self.dataset.__getitems__(list(indices)), indices)
        except Exception as error:
            if _is_of_no_sample(error):
                raise
            # The error of a whole batch does not name the bad sample, so read them one by one under the same seed.
            fetch_many: Callable[[list[int]], list[Any]] = self.dataset.__getitems__
            skipping = SeededDataset(self.dataset, skips_bad=True)
            seed_generators(batch.seed)
            fetched = skipping._fetch_each(indices, lambda index: fetch_many([index])[0])
            if self._skips_bad:
                return fetched
            # An error of the whole batch alone, such as a lost connection, has no bad sample to name.
            bad_indices = [bad.index for bad in fetched.bad]
            self._note(error, bad_indices or indices)
            raise

    def __len__(self) -> int:
        return len(self.dataset)

    def _fetch_each(self, indices: Sequence[int], fetch: Callable[[int], Any]) -> Fetched:
        samples: list[Any] = []
        bad: list[BadSample] = []
        for index in indices:
            try:
                samples.append(fetch(index))
            except Exception as error:
                if _is_of_no_sample(error):
                    raise
                if not self._skips_bad:
                    self._note(error, [index])
                    raise
                bad.append(BadSample(index, _describe(error)))
        return Fetched(samples, indices, tuple(bad))

    def _note(self, error: Exception, indices: Sequence[int]) -> None:
        where = f"reading {_name(indices)} of {type(self.dataset).__name__}"
        expected = f"a sample for every index below {len(self.dataset)}"
        error.add_note(explain(where, _describe(error), expected, f"fix or remove it; {_SKIP}"))


@dataclass
class CollateFetched:
    """Collates the samples of a batch: to a batch, or to `ReadableBatch` if bad samples are skipped."""

    collate: Callable[[Any], Any]
    skips_bad: bool = False

    def __call__(self, fetched: Fetched) -> Any:
        batch, samples = None, fetched.samples
        try:
            # Stacking draws nothing, so that a dataset in memory needs no seed: seeding costs more than stacking.
            if fetched.seed is not None and self.collate is collate_or_explain and samples:
                batch = stack_tuples(samples)
            if batch is None and (samples or not self.skips_bad):
                if fetched.seed is not None:
                    seed_generators(fetched.seed)
                batch = self.collate(samples)
            return ReadableBatch(batch, fetched.bad) if self.skips_bad else batch
        except Exception as error:
            if not _is_of_no_sample(error):
                skipped = {bad.index for bad in fetched.bad}
                indices = [index for index in fetched.indices if index not in skipped]
                self._note(error, indices, fetched.samples)
            raise

    def _note(self, error: Exception, indices: Sequence[int], samples: Sequence[Any]) -> None:
        # `return` was forgotten in a branch of __getitem__; the collate function's error does not say so.
        missing = [index for index, sample in zip(indices, samples, strict=False) if sample is None]
        if missing:
            where = f"making a batch with {_name(missing)}"
            got, do = "None from the dataset", f"remove it from the dataset, or raise an error in __getitem__: {_SKIP}"
            error.add_note(explain(where, got, "a sample", do))
            return
        where = f"making a batch of {_name(indices)}"
        if isinstance(error, AccmtError):  # its message has the rest
            error.add_note(where)
            return
        name = getattr(self.collate, "__qualname__", type(self.collate).__name__)
        if self.collate is collate_or_explain:
            name = "torch's default_collate"
        expected, do = f"samples that {name} can collate", "check these samples, or pass a different collate_fn"
        columns = self._find_failing(samples)
        if columns:
            shown, advice = [], []
            for column in columns:
                kinds = sorted({type(sample.get(column)).__name__ for sample in samples})
                shown.append(f"{column!r} ({' or '.join(kinds)})")
                advice.append(_advise(column, samples[0][column]))
            where += f", column {', '.join(shown)}"
            do = " and ".join(advice)
        error.add_note(explain(where, _describe(error), expected, do))

    def _find_failing(self, samples: Sequence[Any]) -> list[str]:
        """Return the columns without which a batch can be made: a single one, or all that cannot be collated."""
        if not samples or not all(isinstance(sample, Mapping) for sample in samples):
            return []
        names = list(samples[0])
        if self.collate is collate_or_explain:
            return [name for name in names if not self._can_collate(samples, [name])]
        # A collate function may need several columns, so leave out each of them alone, and then all texts.
        attempts = [[name] for name in names]
        attempts.append([name for name in names if isinstance(samples[0][name], str)])
        for omitted in attempts:
            remaining = [name for name in names if name not in omitted]
            if omitted and self._can_collate(samples, remaining):
                return omitted
        return []

    def _can_collate(self, samples: Sequence[Any], names: Sequence[str]) -> bool:
        try:
            parts = []
            for sample in samples:
                parts.append({name: sample[name] for name in names})
            self.collate(parts)
        except Exception:  # noqa: BLE001 - whatever it is, the error that is explained is another
            return False
        return True


def _advise(column: str, value: Any) -> str:
    is_text = isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    if not is_text:
        return f"return {column!r} as a number or tensor, leave it out, or pass a collate_fn for it"
    if column in ("label", "labels", "target", "targets"):
        return f"map {column!r} to numbers; with `datasets`: dataset.class_encode_column({column!r})"
    do = f"remove {column!r} from the dataset; with `datasets`: dataset.remove_columns([{column!r}])"
    return f"{do}; or map it to numbers if it is the label"


def _is_of_no_sample(error: Exception) -> bool:
    """Return whether memory ran out, or a file or store cannot be read: skipping samples would skip all that follow."""
    return isinstance(error, MemoryError | StoreError) or is_out_of_memory(error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_TEXT]


def _name(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"sample {indices[0]}"
    numbers = ", ".join(map(str, indices[:_MAX_NAMED]))
    if len(indices) > _MAX_NAMED:  # a batch may have thousands
        numbers += ", ..."
    return f"the samples [{numbers}]"


# ---- Loader workers


_LEAVE_S = 30.0
_DIE_S = 1.0
_THREADS_S = 0.002  # for threads of torch to finish with the last collective
_DEAD = explain(
    "a data loader worker",
    "the worker exited without an error message; the system kills processes when memory or space in /dev/shm runs out",
    "all workers alive during the run",
    "check `dmesg` and `df /dev/shm`; use fewer dataloader_num_workers or smaller batches to reduce both",
)


def start_reading(dataloader: DataLoader[Any]) -> Iterator[Any]:
    """Return the DataLoader's iterator; its workers are forked while no other thread is in the interpreter.

    Just after a collective, a torch thread may take the GIL to release tensors. Before CPython 3.11.8, a process forked
    at that moment waits forever for a lock that the thread held (python/cpython#112275), and so does the process that
    waits for its batches.
    """
    if dataloader.num_workers and may_deadlock_in_forks():
        _wait_at_each_fork()
        time.sleep(_THREADS_S)
    try:
        return iter(dataloader)
    except Exception as error:
        _note_unsendable(dataloader, error)
        raise


def _note_unsendable(dataloader: DataLoader[Any], error: Exception) -> None:
    """Name what cannot be sent to workers that are not forked: pickle's error has only a lambda without a name."""
    context = dataloader.multiprocessing_context or multiprocessing.get_context()
    if not dataloader.num_workers or context.get_start_method() == "fork":  # nothing is pickled
        return
    for name in ("collate_fn", "dataset", "worker_init_fn"):
        try:
            ForkingPickler.dumps(getattr(dataloader, name))
        except Exception:  # noqa: BLE001 - whatever the objects' own code raises
            where = f"the {name}, for loader workers started by {context.get_start_method()!r}"
            do = "write them with def or class at the top level of a module, not in a function or as a lambda; or pass "
            do += "dataloader_num_workers=0"
            error.add_note(explain(where, _describe(error), "functions and classes that pickle can send", do))


@cache
def _wait_at_each_fork() -> None:
    # The call acquires and releases the lock on the thread list, so each fork first waits for its holder.
    os.register_at_fork(before=sys._current_frames)


def leave_signals_to_parent() -> None:
    """Keep a worker running when a signal asks the job to end: its parent still finishes the current step.

    A worker that its parent stops with SIGTERM still exits: after half a minute, or on a second SIGTERM.
    """
    signal.set_wakeup_fd(-1)  # inherited; a worker's signals are not for its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_later)


def _leave_later(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _LEAVE_S)


@dataclass(frozen=True)
class WorkerStart:
    """Starts a worker with the user's `worker_init_fn`; `get_worker_info().dataset` is the user's, not the wrapper."""

    user_function: Callable[[int], Any] | None = None

    def __call__(self, worker_id: int) -> None:
        leave_signals_to_parent()
        info = torch.utils.data.get_worker_info()
        if info is not None and isinstance(info.dataset, SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo rejects assignment
        if info is not None and isinstance(info.dataset, IterableDataset):
            # The workers' copies would draw the same numbers: torch seeds only the global generators of a worker.
            for generator in find_generators(info.dataset):
                reseed(generator, derive_seed(info.seed, "generator", user_seed(generator)))
        if self.user_function is not None:
            self.user_function(worker_id)


def note_dead_worker(error: BaseException, batches: Any = None) -> None:
    """Add a note about likely causes to an error from a worker's death; other errors stay unchanged.

    torch raises its own error wherever the main thread is at that moment; while the thread receives data from the
    worker, it may be the system's connection error instead.

    Source: `_error_if_any_worker_fails` in torch/csrc/DataLoader.cpp.
    """
    workers = {worker.sentinel: worker for worker in workers_of(batches)}
    if workers and isinstance(error, ConnectionError | EOFError):
        for sentinel in wait(workers, timeout=_DIE_S):
            workers[sentinel].join()
    is_from_torch = isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")
    is_dead = is_from_torch or any(worker.exitcode for worker in workers.values())
    # The source adds the note first; `fit` passes every error of the run again.
    if is_dead and _DEAD not in getattr(error, "__notes__", ()):
        error.add_note(_DEAD)
