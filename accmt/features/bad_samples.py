"""Counts and reports samples that could not be read, with `failures={"on_bad_sample": "skip"}`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from accmt.data import BadSample, MicroBatch
from accmt.errors import DataError, fail
from accmt.features.hooks import Feature
from accmt.messages import warn, warn_once
from accmt.processes import gather_from_data, sum_over_data
from accmt.run import EvaluationRun

MAX_NAMED = 5


@dataclass
class BadSamples:
    """The number of samples skipped since the last warning, and the first few on this process."""

    count: int = 0
    first: list[BadSample] = field(default_factory=list)

    def add(self, count: int, samples: Iterable[BadSample]) -> None:
        self.count += count
        self.first = [*self.first, *samples][:MAX_NAMED]

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
        self._skips = run.settings.failures.on_bad_sample == "skip"

    @classmethod
    def for_run(cls, run: EvaluationRun) -> BadSampleCounts | None:
        has_counted = run.state.bad_samples > 0  # before the run was interrupted
        return cls(run) if run.settings.failures.on_bad_sample == "skip" or has_counted else None

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
        if not self._skips:
            return
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
    listed = [f"{bad.index} ({bad.error})" for bad in named[:MAX_NAMED]]
    if count > len(listed):
        listed.append("...")
    counted = "1 sample" if count == 1 else f"{count} samples"
    return f"{counted} of the {what} data could not be read, and skipped: {', '.join(listed)}"
