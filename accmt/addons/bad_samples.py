"""Leaves out samples that cannot be read, counts and reports them; every process knows what remains of a batch.

The order of the remaining samples does not change. If nothing remains of a process's batch, that process has no batch
in this micro-batch, as at the end of an epoch, and borrows another's. So the processes sum the batches, samples, and
skipped samples of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from accmt.data import BadSample, MicroBatch, SourceOptions
from accmt.errors import DataError, fail
from accmt.messages import warn, warn_once
from accmt.processes import gather_from_data, gather_objects, num_data_processes, num_processes, sum_over_data
from accmt.run import EvaluationRun
from accmt.run.features import Feature

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


# ---- Counts and reports.


_MAX_NAMED = 5


@dataclass
class BadSamples:
    """The number of samples skipped since the last warning, and the first few on this process."""

    count: int = 0
    first: list[BadSample] = field(default_factory=list)

    def add(self, count: int, samples: Iterable[BadSample]) -> None:
        self.count += count
        self.first = [*self.first, *samples][:_MAX_NAMED]

    def take(self) -> BadSamples:
        """Return what was added, and reset."""
        taken = BadSamples(self.count, self.first)
        self.count, self.first = 0, []
        return taken


class BadSampleCounts(Feature):
    """Counts unreadable samples in training and in each evaluated set, and warns about them."""

    name = "bad_samples"

    def __init__(self, run: EvaluationRun) -> None:
        self._run = run
        self._of_training = BadSamples()  # since the last row
        self._of_set = BadSamples()

    @classmethod
    def for_run(cls, run: EvaluationRun) -> BadSampleCounts | None:
        return cls(run) if run.settings.handling.skips_bad_samples else None

    def before_batch(self, micro_batch: MicroBatch) -> None:
        """Count the skipped samples of a training micro-batch."""
        if micro_batch.num_bad:
            self._run.state.count_bad_samples(micro_batch.num_bad)
            self._of_training.add(micro_batch.num_bad, micro_batch.bad)

    def before_row(self) -> None:
        """Warn about training samples skipped since the last row.

        Processes: collective.
        """
        bad = self._of_training.take()
        if bad.count:
            warn(_describe("training", bad.count, bad.first))

    def add_to_row(self, row: dict[str, float]) -> None:
        if self._run.state.bad_samples:
            row["bad_samples"] = self._run.state.bad_samples

    def before_set(self) -> None:
        self._of_set = BadSamples()

    def before_set_batch(self, micro_batch: MicroBatch) -> None:
        self._of_set.add(len(micro_batch.bad), micro_batch.bad)

    def after_set(self, key: str, *, has_batch: bool) -> None:
        """Warn once about the skipped samples of a set, and log their number.

        Processes: collective.

        Raises:
            DataError: No sample of the set could be read.
        """
        run = self._run
        count, num_with_batch = map(int, sum_over_data((self._of_set.count, has_batch)))
        if not count:
            return
        stage = run.state.stage
        what = "validation"
        if stage in ("test", "predict"):
            what = stage
        if key:
            what = f"{what} set {key!r}"
        message = _describe(what, count, self._of_set.first)
        # Without samples there would be no results, and the error would come from the metrics.
        if not num_with_batch:
            do = "check the path, the disk, or the dataset's __getitem__"
            raise fail(DataError, f"the {what} data", got=message, expected="a set with readable samples", do=do)
        warn_once(f"{message}; results are computed without them", about=f"bad samples: {what}")
        if run.state.fn == "fit" and stage == "validate":
            name = "val_bad_samples"
            if key:
                name = f"{name}__{key}"
            for hook in run.hooks.on_log:
                hook(values={name: count}, step=run.state.global_step)


def _describe(what: str, count: int, first: list[BadSample]) -> str:
    """Describe skipped samples.

    Processes: collective.

    Args:
        what: The set.
        count: The number of skipped samples on all processes.
        first: The first ones on this process.
    """
    named = list(chain.from_iterable(gather_from_data(first)))
    listed = [f"{bad.index} ({bad.error})" for bad in named[:_MAX_NAMED]]
    if count > len(listed):
        listed.append("...")
    counted = "1 sample" if count == 1 else f"{count} samples"
    return f"{counted} of the {what} data could not be read, and skipped: {', '.join(listed)}"
