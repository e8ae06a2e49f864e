"""Windows that end where a function of another package says: `Trainer(grad_accumulation_steps="name")`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch

from accmt.data import MicroBatch, Source, Window
from accmt.errors import DataError, fail
from accmt.processes import each_once, gather_objects
from accmt.state import TrainingState


class WindowSoFar(NamedTuple):
    """What a window maker of another package sees of an accumulation window; the same on every process.

    Attributes:
        num_batches: Batches of the requested size that each process has read for it.
        num_samples: Samples in them, over all processes; None if only the batches show their number.
        num_tokens: Tokens in them, over all processes, without padding: those of `input_ids` that `attention_mask` does
            not mask, or with `max_tokens` the lengths of the samples. None for data without `input_ids`.
    """

    num_batches: int
    num_samples: int | None
    num_tokens: int | None


IsFull: TypeAlias = Callable[[WindowSoFar, TrainingState], bool]
"""A window maker of another package: returns whether the window is complete, given the state before it."""


class ByFunction:
    """Makes windows that end where a function of another package says, which is asked after each batch.

    A window is read whole before the first of its micro-batches is trained on. So its number of samples is known, the
    last micro-batch is known to be the last, and the function depends on nothing that training on the window changes.

    Args:
        name: The name under which the package registered the function.
        is_full: The function.
        state: The run's state.
        count_tokens: Counts the tokens of this process's batch; None if it shows none.
    """

    keeps_batches = True

    def __init__(
        self, name: str, is_full: IsFull, state: TrainingState, count_tokens: Callable[[Any], int | None] | None = None
    ) -> None:
        self._name = name
        self._is_full = is_full
        self._state = state
        self._count_tokens = count_tokens or _tokens_in

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        per_batch = source.micro_batches_per_batch
        for group in self.groups(source.micro_batches(epoch, first), epoch, per_batch=per_batch):
            yield Window(group, len(group), _samples_in(group))

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each optimizer step.

        Processes: collective.
        """
        group: list[MicroBatch] = []
        num_tokens: int | None = None
        for batch in batches:
            group.append(batch)
            own = None if batch.batch is None else self._count_tokens(batch.batch)
            found = [tokens for tokens in self._exchange(group, own, is_end=False) if tokens is not None]
            num_tokens = sum(found, num_tokens or 0) if found else num_tokens
            if not batch.is_last:
                if len(group) % per_batch:
                    continue  # a part of a batch: windows are the same with smaller micro-batches
                if not self._is_full(WindowSoFar(len(group) // per_batch, _samples_in(group), num_tokens), self._state):
                    continue
            self._exchange(group, None, is_end=True)
            yield group
            group, num_tokens = [], None

    def _exchange(self, group: list[MicroBatch], own_tokens: int | None, *, is_end: bool) -> list[int | None]:
        """Return the tokens in each process's batch, and check that the window has the same end on all processes.

        Processes: collective.

        Raises:
            DataError: It has ended on some processes only.
        """
        every = gather_objects((is_end, len(group) - 1 + is_end, own_tokens))
        numbers = [number for has_ended, number, _ in every if has_ended]
        if numbers and len(numbers) < len(every):
            here = [index for index, (has_ended, _, _) in enumerate(every) if has_ended]
            got = f"a window that ends after {min(numbers)} micro-batches on process {here[0]}, but not on all others"
            expected = "the same decision on every process"
            do = "decide from the arguments alone, which are the same on every process: not from random numbers, time, "
            do += "or anything that only this process has"
            raise fail(DataError, f"the window maker {self._name!r}", got=got, expected=expected, do=do)
        return each_once([tokens for _, _, tokens in every])


def _samples_in(group: Iterable[MicroBatch]) -> int | None:
    total = 0
    for micro_batch in group:
        if micro_batch.num_samples is None:
            return None
        total += micro_batch.num_samples
    return total


def _tokens_in(batch: Any) -> int | None:
    ids, mask = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "attention_mask"))
    if not isinstance(ids, torch.Tensor):
        return None
    return int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.shape == ids.shape else ids.numel()
