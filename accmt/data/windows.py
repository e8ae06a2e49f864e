"""Training data as accumulation windows: what makes one optimizer step, on all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from accmt.data.batches import MicroBatch
from accmt.data.options import Loader, WrappedLoader


class Window(NamedTuple):
    """What makes one optimizer step, on all processes.

    Attributes:
        micro_batches: Read one by one, while they are iterated.
        num_micro_batches: How many each process has at most.
        num_samples: Samples over all processes; None where only the batches show it.
    """

    micro_batches: Iterable[MicroBatch]
    num_micro_batches: int
    num_samples: int | None


class WindowLoader(Loader, Protocol):
    """A loader of training data.

    Attributes:
        own: The loader that reads the data.
    """

    own: Loader

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch from that of micro-batch `first` on.

        Iterate the micro-batches of each before the next one.
        """


class CountedWindows(WrappedLoader):
    """Makes each window of a number of micro-batches.

    Args:
        own: The loader that reads the data.
        batches_per_step: How many batches, of the size that was asked for, make an optimizer step in an epoch. None
            where the module steps by itself: then each window is one micro-batch.
    """

    def __init__(self, own: Loader, batches_per_step: Callable[[int], int] | None) -> None:
        super().__init__(own)
        self._batches_per_step = batches_per_step

    def windows(self, epoch: int, first: int = 0) -> Iterator[Window]:
        own = self.own
        batches_per_step = self._batches_per_step
        number = 1 if batches_per_step is None else batches_per_step(epoch) * own.micro_batches_per_batch
        micro_batches = own.micro_batches(epoch, first)
        for begin in micro_batches:
            end = begin.index + number
            if own.num_micro_batches is not None:
                end = min(end, own.num_micro_batches)
            if number == 1 and begin.num_samples is not None:
                yield Window((begin,), 1, begin.num_samples)
            else:
                count = end - begin.index
                yield Window(_until_full(begin, micro_batches, count), count, own.samples_in(begin.index, end))


def _until_full(begin: MicroBatch, others: Iterator[MicroBatch], number: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a window; after its last, or the epoch's, nothing is read."""
    yield begin
    if begin.is_last:
        return
    for micro_batch in islice(others, number - 1):
        yield micro_batch
        if micro_batch.is_last:
            return
