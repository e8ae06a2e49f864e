"""Fetches and collates the samples of a batch; errors name the bad samples, or the samples are skipped.

Errors keep their type and traceback, so you can catch them. A note adds where they happened; the traceback shows it
even if a worker read the sample.

Source: `ExceptionWrapper` in torch/_utils.py, which sends an error of a worker as its type and printed traceback.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.connection import wait
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate, get_worker_info

from accmt.data.seeding import (
    BatchIndices,
    call_first,
    derive_seed,
    find_generators,
    reseed,
    seed_generators,
    user_seed,
)
from accmt.errors import AccmtError, ArgumentError, DataError, explain, is_out_of_memory
from accmt.libraries.private_names import shut_down_workers, stacks_tensors_as_torch, workers_of
from accmt.libraries.versions import may_deadlock_in_forks, require
from accmt.options.checks import find_returns_of_none

_MAX_NAMED = 16
_MAX_TEXT = 200
_SKIP = 'Trainer(failures={"on_bad_sample": "skip"}) skips unreadable samples'


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read: its index in the dataset and the error."""

    index: int
    error: str


class Kept(NamedTuple):
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
        self._fetch_many = getattr(dataset, "__getitems__", None)
        self._only_holds = only_holds(dataset)
        self._is_first = True

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: BatchIndices) -> Fetched:
        """Fetch one batch; torch's loader calls this where it exists."""
        if self._only_holds:  # nothing draws before collating, which then sets the seed
            fetched = self._fetch(indices)
            fetched.seed = indices.seed
            return fetched
        seed_generators(indices.seed)
        if self._is_first:
            self._is_first = False
            return call_first(self._fetch, indices, self.dataset)
        return self._fetch(indices)

    def _fetch(self, indices: BatchIndices) -> Fetched:
        if self._fetch_many is None:
            return self._fetch_each(indices, self.dataset.__getitem__)
        try:
            return Fetched(self._fetch_many(list(indices)), indices)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            # Read one by one, as the batch was read, to find the bad ones.
            fetch_many: Callable[[list[int]], list[Any]] = self.dataset.__getitems__
            alone = SeededDataset(self.dataset, skips_bad=True)
            seed_generators(indices.seed)
            found = alone._fetch_each(indices, lambda index: fetch_many([index])[0])
            if self._skips_bad:
                return found
            self._note(error, [bad.index for bad in found.bad] or indices)
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
                if _is_out_of_memory(error):
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
    """Collates the samples of a batch: to a batch, or to `Kept` if bad samples are skipped."""

    collate: Callable[[Any], Any]
    skips_bad: bool = False
    _is_first: bool = field(default=True, init=False)

    def __call__(self, fetched: Fetched) -> Any:
        batch, samples = None, fetched.samples
        try:
            if fetched.seed is not None and self.collate is collate_or_explain and samples:
                batch = stack_tuples(samples)
            if batch is None and (samples or not self.skips_bad):
                if fetched.seed is not None:
                    seed_generators(fetched.seed)
                is_first, self._is_first = self._is_first, False
                batch = call_first(self.collate, samples, self.collate) if is_first else self.collate(samples)
            return Kept(batch, fetched.bad) if self.skips_bad else batch
        except Exception as error:
            if not _is_out_of_memory(error):
                skipped = {bad.index for bad in fetched.bad}
                indices = [index for index in fetched.indices if index not in skipped]
                self._note(error, indices, fetched.samples)
            raise

    def _note(self, error: Exception, indices: Sequence[int], samples: Sequence[Any]) -> None:
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
        if str(getattr(self.collate, "__module__", "")).startswith("accmt."):
            name = "torch's default_collate"
        expected, do = f"samples that {name} can collate", "check these samples, or pass a different collate_fn"
        first = next((sample for sample in samples if isinstance(sample, Mapping)), {})
        texts = [name for name, value in first.items() if isinstance(value, str)]
        if texts:  # such as the text that was tokenized
            expected = "numbers only: strings cannot become tensors"
            do = f"remove {', '.join(texts)} from the dataset; with `datasets`: dataset.remove_columns({texts})"
        error.add_note(explain(where, _describe(error), expected, do))


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the host or a device ran out of memory, which is not an error of a sample."""
    return isinstance(error, MemoryError) or is_out_of_memory(error)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_TEXT]


def _name(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"sample {indices[0]}"
    more = ", ..." if len(indices) > _MAX_NAMED else ""
    return f"the samples [{', '.join(map(str, indices[:_MAX_NAMED]))}{more}]"


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
    return iter(dataloader)


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


def end_workers(dataloader: DataLoader[Any], batches: Any) -> None:
    """Stop the workers of an iterator.

    torch stops them once nothing refers to the iterator; until then they would wait for another epoch, or live as long
    as the traceback of an error that ended the run.
    """
    shut_down_workers(dataloader, batches)


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
            for generator in find_generators(info.dataset, through_streams=True):
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
    if is_dead and _DEAD not in getattr(error, "__notes__", ()):
        error.add_note(_DEAD)


# ---- Collate functions: how one is chosen, combined, and padded to a multiple.


Collate = Callable[[Any], Any]


class CollateChain:
    """Applies several collate functions in order, each to the result of the previous one."""

    def __init__(self, functions: Sequence[Collate]) -> None:
        self.functions = tuple(functions)

    def __call__(self, samples: Any) -> Any:
        for function in self.functions:
            samples = function(samples)
        return samples


class DataCollatorForLongestSequence:
    """Pads inputs to the longest of the batch, and stacks the targets.

    A sample is a pair `(inputs, target)`, or just the inputs. Inputs are token ids, or a dict with "input_ids", as a
    tokenizer returns. transformers' collate functions expect the target among the inputs instead.

    Shapes:
        `input_ids` and `attention_mask` `[samples, longest]`; targets `[samples, ...]`.

    Args:
        tokenizer: Defines the padding token and the padding side.
        torch_stack: Whether targets are stacked into tensors, which requires one shape; otherwise they stay a list.
    """

    def __init__(self, tokenizer: Any, *, torch_stack: bool = True) -> None:
        require("transformers", type(self).__name__)
        from transformers import DataCollatorWithPadding

        self.pad_to_multiple_of: int | None = None
        self._pad = DataCollatorWithPadding(tokenizer)
        self._stack = torch_stack

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return `(inputs, targets)`, or just the inputs if the samples have no targets."""
        self._pad.pad_to_multiple_of = self.pad_to_multiple_of
        if not isinstance(samples[0], tuple):
            return self._pad([_as_named(one) for one in samples])
        inputs, targets = map(list, zip(*samples, strict=True))
        return self._pad([_as_named(one) for one in inputs]), default_collate(targets) if self._stack else targets


def _as_named(inputs: Any) -> dict[str, Any]:
    return dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}


def keeps_number(collate: Collate) -> bool:
    """Return whether a collate function is known to keep the number of samples.

    Those of torch and transformers do, except the one that packs samples into one row. A custom one may drop or split
    samples.
    """
    if isinstance(collate, partial):
        return keeps_number(collate.func)
    if isinstance(collate, CollateChain):
        return all(map(keeps_number, collate.functions))
    kind = collate if isinstance(collate, FunctionType) else type(collate)
    is_known = kind.__module__.partition(".")[0] in ("torch", "transformers", "accmt")
    return is_known and kind.__name__ != "DataCollatorWithFlattening"


def build_collate(value: Any) -> Collate | None:
    """Return the collate function for the user's value: None, a function, or a list of functions."""
    if value is None:
        return None
    functions = list(value) if isinstance(value, list | tuple) else [value]
    if not functions or not all(callable(function) for function in functions):
        expected = "a function that takes a list of samples, or a list of such functions"
        raise ArgumentError(explain("Trainer(collate_fn=...)", repr(value), expected, "collate_fn=my_function"))
    return functions[0] if len(functions) == 1 else CollateChain(functions)


def require_batches(collate: Any) -> None:
    """Reject a collate function that returns nothing: all its batches would be skipped.

    One that returns None for some samples skips them on purpose.
    """
    if isinstance(collate, partial):
        require_batches(collate.func)
    elif isinstance(collate, CollateChain):
        for function in collate.functions:
            require_batches(function)
    elif callable(collate):
        is_function = hasattr(collate, "__code__") or hasattr(collate, "__wrapped__")
        nones = find_returns_of_none(collate if is_function else type(collate).__call__)
        if nones and all(nones):
            name = getattr(collate, "__qualname__", type(collate).__name__)
            got = f"{name}, which returns None for all samples: it has no `return batch`"
            raise DataError(explain("collate_fn", got, "a function that returns a batch", "return the batch"))


def collate_or_explain(samples: list[Any]) -> Any:
    """Stack samples as torch does, with a helpful error if their lengths differ."""
    try:
        stacked = stack_tuples(samples)
        return default_collate(samples) if stacked is None else stacked
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        expected = "samples of equal shape, or a collate function that pads them"
        # Samples with a label for each token need a function that pads the labels too.
        labels = samples[0].get("labels") if isinstance(samples[0], Mapping) else None
        has_label_lists = isinstance(labels, list) or getattr(labels, "ndim", 0) > 0
        collator = "DataCollatorForSeq2Seq" if has_label_lists else "DataCollatorWithPadding"
        do = f"Trainer(collate_fn={collator}(tokenizer)) for text, or your own function"
        raise DataError(explain("making a batch", str(error), expected, do)) from error


def stack_tuples(samples: list[Any]) -> list[torch.Tensor] | None:
    """Do what `default_collate` does with tuples of plain tensors, without inspecting each sample.

    Returns:
        The stacked tensors; None for other samples, or if a worker stacks them in shared memory.
    """
    if set(map(type, samples)) != {tuple} or len(set(map(len, samples))) != 1 or get_worker_info() is not None:
        return None
    if not stacks_tensors_as_torch():
        return None
    columns = list(zip(*samples, strict=True))
    for column in columns:
        if set(map(type, column)) != {torch.Tensor} or column[0].layout is not torch.strided or column[0].is_nested:
            return None
    try:
        return list(map(torch.stack, columns))
    except RuntimeError:  # e.g. unequal shapes: `default_collate` raises it again, with an explanation
        return None


# ---- Padding to a multiple, so that a compiled model sees few different lengths


def in_buckets(collate: Any, bucket: int) -> Collate:
    """Return a copy of a collate function that pads to multiples of a length.

    Args:
        collate: The user's function, with an attribute `pad_to_multiple_of`, as in transformers. None is torch's.
        bucket: The length.

    Raises:
        ArgumentError: It has no such attribute, or a different length.
    """
    if isinstance(collate, CollateChain):
        able = [one for one in collate.functions if hasattr(one, "pad_to_multiple_of")][:1]
        functions = [in_buckets(one, bucket) if one in able else one for one in collate.functions]
        return CollateChain(functions) if able else _reject("functions without `pad_to_multiple_of`", bucket)
    if not hasattr(collate, "pad_to_multiple_of"):
        name = "none" if collate is None else getattr(collate, "__qualname__", type(collate).__name__)
        return _reject(f"{name}, which has no `pad_to_multiple_of`", bucket)
    if collate.pad_to_multiple_of not in (None, bucket):
        return _reject(f"pad_to_multiple_of={collate.pad_to_multiple_of}", bucket)
    changed = copy.copy(collate)
    changed.pad_to_multiple_of = bucket
    rounded: Collate = changed
    return rounded


def _reject(got: str, bucket: int) -> Collate:
    where, expected = f'Trainer(compile={{"buckets": {bucket}}}): the collate function', "one that pads to a multiple"
    raise ArgumentError(explain(where, got, expected, "for example, collate_fn=DataCollatorWithPadding(tokenizer)"))
