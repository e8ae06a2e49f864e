"""Leaves out samples that cannot be read; every process knows what remains of a batch.

The order of the remaining samples does not change. If nothing remains of a process's batch, that process has no batch
in this micro-batch, as at the end of an epoch, and borrows another's. So the processes sum the batches, samples, and
skipped samples of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator

from accmt.data import MicroBatch, SourceOptions
from accmt.errors import DataError, fail
from accmt.processes import gather_objects, num_data_processes, num_processes, sum_over_data

_TOO_MANY = 100


def without_bad_samples(
    micro_batches: Iterator[MicroBatch], options: SourceOptions, *, is_whole_epoch: bool
) -> Iterator[MicroBatch]:
    """Unpack the `ReadableBatch` batches of micro-batches, and set the sample counts of the micro-batches.

    Processes: collective in each micro-batch, if they share the data.
    """
    unread, has_any = 0, not is_whole_epoch
    for micro_batch in micro_batches:
        if micro_batch.batch is not None:
            micro_batch.batch, bad = micro_batch.batch
            micro_batch.bad = tuple(bad)  # a list, where batches are pinned
        own_read = (micro_batch.own_samples or 0) - len(micro_batch.bad)
        micro_batch.own_samples = 0 if micro_batch.batch is None else own_read
        num_read = _count(micro_batch, options)
        micro_batch.num_samples = num_read
        has_any |= num_read != 0
        unread = 0 if num_read != 0 else unread + micro_batch.num_bad
        if unread >= _TOO_MANY or (not has_any and micro_batch.is_last):
            bad_here = micro_batch.bad
            last = f"; the last is sample {bad_here[-1].index}: {bad_here[-1].error}" if bad_here else ""
            got = f"{unread} unreadable samples in a row{last}"
            expected = 'only occasional unreadable samples, which failures={"on_bad_sample": "skip"} skips'
            do = "check the path, the disk, or the dataset's __getitem__"
            raise fail(DataError, f"the {options.kind} data", got=got, expected=expected, do=do)
        yield micro_batch


def _count(micro_batch: MicroBatch, options: SourceOptions) -> int:
    """Set the counts that processes share, and return the number of samples read."""
    if num_data_processes() < num_processes():
        # Processes that share a batch must have read the same samples.
        every = gather_objects([bad.index for bad in micro_batch.bad])
        size = num_processes() // num_data_processes()
        other = next((rank for rank, one in enumerate(every) if one != every[rank // size * size]), None)
        if other is not None:
            first = other // size * size
            got = f"samples {every[first]} could not be read on process {first}, and {every[other]} on process {other}"
            expected = "the same samples on both: they share one model and each of its batches"
            raise fail(
                DataError, "the data", got=got, expected=expected, do="check the disk or network the data is read from"
            )
    if options.shard.count > 1:
        own = float(micro_batch.batch is not None), float(micro_batch.own_samples or 0), float(len(micro_batch.bad))
        present, samples, bad = map(int, sum_over_data(own))
        micro_batch.is_partial, micro_batch.num_bad = present < num_data_processes(), bad
        return samples
    micro_batch.num_bad = len(micro_batch.bad)
    micro_batch.is_partial |= micro_batch.batch is None
    return micro_batch.own_samples or 0
