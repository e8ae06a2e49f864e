"""What is counted and said of samples that could not be read, where the failure setting `on_bad_sample` is "skip"."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from accmt.data import BadSample, MicroBatch
from accmt.data.bad_samples import MAX_NAMED, BadSamples
from accmt.errors import DataError, explain
from accmt.messages import warn, warn_once
from accmt.processes import gather_from_data
from accmt.run import EvaluationRun, Run


def count_bad_samples(run: Run, micro_batch: MicroBatch) -> None:
    """Count what was left out of a micro-batch of training."""
    run.state.count_bad_samples(micro_batch.num_bad)
    run.bad_samples.add(micro_batch.num_bad, micro_batch.bad)


def warn_of_bad_samples(run: Run) -> None:
    """Warn of what was left out of training since the last call.

    Processes: collective.
    """
    bad = run.bad_samples.take()
    if bad.count:
        warn(_describe("training", bad.count, gather_from_data(bad.first)))


def report_bad_samples(run: EvaluationRun, key: str, bad: BadSamples, *, has_batch: bool) -> None:
    """Warn of what was left out of a set that was evaluated, the first time, and log how many samples it was.

    Processes: collective.

    Args:
        key: The name of the set.
        bad: What this process left out.
        has_batch: Whether this process had anything to evaluate.

    Raises:
        DataError: Nothing is left of the set.
    """
    if run.settings.failures.on_bad_sample != "skip":
        return
    every = gather_from_data((bad.count, bad.first, has_batch))
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
