"""Splits training data into accumulation windows, and evaluation data into micro-batches.

A source reads micro-batches as planned, of the requested size or smaller if memory requires it. A maker turns them into
windows of a number of micro-batches; add-ons make others, by a token budget or by another package's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

from accmt.data.base import Source
from accmt.data.batches import MicroBatch
from accmt.processes import broadcast_object, each_once, gather_numbers, num_processes


class Window(NamedTuple):
    """The accumulation window of one optimizer step on all processes.

    Attributes:
        units: Its micro-batches, equally many on every process; read lazily during iteration.
        num_units: Their maximum number.
        num_samples: Samples over all processes; None if only the batches show it.
    """

    units: Iterable[MicroBatch]
    num_units: int
    num_samples: int | None = None


class WindowMaker(Protocol):
    """Makes windows from a source.

    Attributes:
        keeps_batches: Whether micro-batches are those of the source.
    """

    keeps_batches: bool

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        """Yield the windows of an epoch, starting with that of micro-batch `first`.

        Processes: collective if samples are split.
        """


class Grouping(Protocol):
    """Decides which batches make an optimizer step."""

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each optimizer step.

        Args:
            batches: The micro-batches of an epoch, or of the rest of it.
            epoch: The epoch.
            per_batch: Micro-batches that make one batch of the requested size.
        """


class Loader:
    """Training or evaluation data: a source and a maker of windows.

    Args:
        source: Reads micro-batches.
        maker: Makes windows of them; None makes one of each micro-batch.
        through: A function applied to the micro-batches of an evaluation.
    """

    def __init__(
        self,
        source: Source,
        maker: WindowMaker | None = None,
        *,
        through: Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]] | None = None,
    ) -> None:
        self.source = source
        self.maker = ByCount() if maker is None else maker
        self._through = through

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch, starting with that of micro-batch `first`; iterate each before the next.

        Processes: collective in a micro-batch that does not reach all of them.
        """
        windows = self.maker.windows(self.source, epoch, first)
        if num_processes() == 1:  # no other process borrows
            return windows
        return (window._replace(units=lend_batches(window.units)) for window in windows)

    def micro_batches(self, epoch: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch.

        Processes: collective in a micro-batch that does not reach all of them.
        """
        if not self.maker.keeps_batches:
            micro_batches: Iterator[MicroBatch] = chain.from_iterable(window.units for window in self.windows(epoch))
        else:
            micro_batches = self.source.micro_batches(epoch)
            if num_processes() > 1:
                micro_batches = lend_batches(micro_batches)
        if self._through is not None:
            micro_batches = self._through(micro_batches)
        return micro_batches

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return this process's sample indices in a micro-batch of the current epoch; None if unknown."""
        if not self.maker.keeps_batches:  # a micro-batch then has samples of several batches of the source
            return None
        return self.source.samples_of(epoch, index)


def lend_batches(micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Lend each process without a batch that of the first process with one, so that every process runs every step.

    If no process has a batch, because none of its samples could be read, none gets one.

    Processes: collective in a micro-batch that does not reach all of them.
    """
    for micro_batch in micro_batches:
        if micro_batch.is_partial:
            has_batch = [bool(number) for (number,) in gather_numbers((micro_batch.batch is not None,))]
            micro_batch.num_lenders = sum(each_once(has_batch))
            if any(has_batch):
                sendable = replace(micro_batch, ending=False)  # a function could not be sent
                lent = broadcast_object(sendable, source=has_batch.index(True))
                if micro_batch.batch is None:
                    micro_batch.borrowed = lent
        yield micro_batch


class ByCount:
    """Makes windows of a fixed number of micro-batches.

    Args:
        batches_per_step: Returns the batches of the requested size per optimizer step, by epoch. None makes a window of
            each micro-batch.
    """

    keeps_batches = True

    def __init__(self, batches_per_step: Callable[[int], int | None] | None = None) -> None:
        self._batches_per_step = batches_per_step

    def windows(self, source: Source, epoch: int, first: int) -> Iterator[Window]:
        number = self._micro_batches_per_step(epoch, source.micro_batches_per_batch)
        micro_batches = source.micro_batches(epoch, first)
        for begin in micro_batches:
            end = begin.index + number
            if source.num_micro_batches is not None:  # the last window of an epoch may be short
                end = min(end, source.num_micro_batches)
            if number == 1 and begin.num_samples is not None:
                yield Window((begin,), 1, begin.num_samples)
            else:
                count = end - begin.index
                yield Window(_until_full(begin, micro_batches, count), count, source.samples_in(begin.index, end))

    def groups(self, batches: Iterable[MicroBatch], epoch: int, *, per_batch: int = 1) -> Iterator[list[MicroBatch]]:
        number = self._micro_batches_per_step(epoch, per_batch)
        group: list[MicroBatch] = []
        for batch in batches:
            group.append(batch)
            if len(group) == number or batch.is_last:
                yield group
                group = []

    def _micro_batches_per_step(self, epoch: int, per_batch: int) -> int:
        if self._batches_per_step is None:
            return 1
        return (self._batches_per_step(epoch) or 1) * per_batch


def _until_full(begin: MicroBatch, following: Iterator[MicroBatch], number: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a window; nothing is read after its last one, or the epoch's."""
    micro_batch = begin
    for num_remaining in reversed(range(number)):
        yield micro_batch
        if num_remaining == 0 or micro_batch.is_last:  # in this order: `is_last` may read on
            return
        micro_batch = next(following)
