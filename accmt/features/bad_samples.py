"""What is counted and said of samples that could not be read, where the failure setting `on_bad_sample` is "skip"."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from accmt.data import BadSample, MicroBatch
from accmt.data.bad_samples import MAX_NAMED, BadSamples
from accmt.errors import DataError, explain
from accmt.features.hooks import Feature
from accmt.messages import warn, warn_once
from accmt.processes import gather_from_data
from accmt.run import EvaluationRun


class BadSampleCounts(Feature):
    """Counts the samples that could not be read, of training and of each set that is evaluated, and warns of them."""

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
        """Count what was left out of a micro-batch of training."""
        if micro_batch.num_bad:
            self._run.state.count_bad_samples(micro_batch.num_bad)
            self._of_training.add(micro_batch.num_bad, micro_batch.bad)

    def before_row(self) -> None:
        """Warn of what was left out of training since the last row.

        Processes: collective.
        """
        bad = self._of_training.take()
        if bad.count:
            warn(_describe("training", bad.count, gather_from_data(bad.first)))

    def add_to_row(self, row: dict[str, float]) -> None:
        if self._run.state.bad_samples:
            row["bad_samples"] = self._run.state.bad_samples

    def before_set(self) -> None:
        self._of_set = BadSamples()

    def before_set_batch(self, micro_batch: MicroBatch) -> None:
        self._of_set.add(len(micro_batch.bad), micro_batch.bad)

    def after_set(self, key: str, *, has_batch: bool) -> None:
        """Warn of what was left out of a set, the first time, and log how many samples it was.

        Processes: collective.

        Raises:
            DataError: Nothing is left of the set.
        """
        if not self._skips:
            return
        run = self._run
        every = gather_from_data((self._of_set.count, self._of_set.first, has_batch))
        count = sum(count for count, _, _ in every)
        if not count:
            return
        stage = run.state.stage
        what = (stage if stage in ("test", "predict") else "validation") + (f" set {key!r}" if key else "")
        message = _describe(what, count, [first for _, first, _ in every])
        if not any(has_batch for _, _, has_batch in every):
            do = "look at the path, at the disk, or at the dataset's __getitem__"
            raise DataError(explain(f"the {what} data", message, "a set of which something can be read", do))
        warn_once(f"{message}; results are those of the others", about=f"bad samples: {what}")
        if run.state.fn == "fit" and stage == "validate":
            name = "val_bad_samples" + (f"__{key}" if key else "")
            for hook in run.hooks.on_log:
                hook(values={name: count}, step=run.state.global_step)


def _describe(what: str, count: int, first: Iterable[Iterable[BadSample]]) -> str:
    named = [f"{bad.index} ({bad.error})" for bad in chain.from_iterable(first)]
    more = ", ..." if count > len(named[:MAX_NAMED]) else ""
    counted = "1 sample" if count == 1 else f"{count} samples"
    return f"{counted} of the {what} data could not be read and left out: {', '.join(named[:MAX_NAMED])}{more}"
