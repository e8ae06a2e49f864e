"""Where in an epoch the data are, and how an epoch goes on from there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accmt.data.options import LoaderOptions, require_not_empty
from accmt.data.sharding import Plan
from accmt.errors import DataError, explain


@dataclass(frozen=True)
class EpochStart:
    """Where an epoch begins: at its first sample, or where it was interrupted.

    Attributes:
        epoch: The epoch that goes on; None for one that begins.
        micro_batch: Its first micro-batch.
        passed: Samples, or batches of the user's, over all processes, that were trained on before.
        position: All that a loader's `position` told; empty for an epoch that begins.
    """

    epoch: int | None = None
    micro_batch: int = 0
    passed: int = 0
    position: Mapping[str, Any] = field(default_factory=dict)

    def of(self, epoch: int, first_micro_batch: int) -> EpochStart:
        """Return where `epoch` begins to be read for its micro-batches from `first_micro_batch` on.

        Epochs that were not interrupted begin with their first sample, and so does that one when it is read anew.
        """
        return self if epoch == self.epoch and first_micro_batch >= self.micro_batch else EPOCH_START


EPOCH_START = EpochStart()


def read_start(
    epoch: int, first_micro_batch: int, position: Mapping[str, Any], *, kind: str, unit: str, options: LoaderOptions
) -> EpochStart:
    """Read where an epoch goes on.

    Args:
        epoch: The epoch.
        first_micro_batch: Its micro-batches that were trained on; with 0 the position may be of any data.
        position: What a loader's `position` returned.
        kind: The kind of position that these data have.
        unit: What it counts: "samples" or "batches".
        options: Whose data, for the message.

    Raises:
        DataError: The position is of another kind.
    """
    if first_micro_batch == 0:
        return EPOCH_START
    if position.get("kind") != kind:
        got = f"a position in a {position.get('kind')}"
        raise cannot_resume(options, got, f"one in a {kind}, as these data are")
    return EpochStart(epoch, first_micro_batch, position[unit], position)


def require_same_number(start: EpochStart, number: int, unit: str, options: LoaderOptions) -> None:
    """Check that an epoch has as much as when it began: with more or less, its order would be another.

    Raises:
        DataError: It has not.
    """
    if start.position and start.position["of"] != number:
        expected = f"the {start.position['of']} {unit} with which the epoch began, {start.passed} of them trained on"
        raise cannot_resume(options, f"{number} {unit}", expected)


def require_same_order(start: EpochStart, order: str, options: LoaderOptions) -> None:
    """Check that an epoch has the order with which it began: in another, samples would be repeated and left out.

    Raises:
        DataError: It has not.
    """
    if start.position["order"] != order:
        got = "another order than that in which the epoch began: another shuffling, sampler, seed of it, or batches"
        raise cannot_resume(options, got, f"that order, {start.passed} of {start.position['of']} trained on")


def cannot_resume(options: LoaderOptions, got: str, expected: str, do: str | None = None) -> DataError:
    """Return the error about data in which an interrupted epoch cannot go on."""
    do = do or "continue with the data, sampler and batches as they were, or begin a new run: resume=False"
    return DataError(explain(f"the {options.kind} data, within an epoch that goes on", got, expected, do))


def plan_epoch(num_samples: int, options: LoaderOptions, *, whole: int = 1, start: EpochStart = EPOCH_START) -> Plan:
    """Plan an epoch's micro-batches after `drop_last` and limits, which count from its beginning wherever it goes on.

    Args:
        num_samples: Samples of the whole epoch.
        options: Sizes, limit and sharing.
        whole: Samples that are all there or all left out at the end; 1 leaves none out.
        start: Where it begins.

    Raises:
        DataError: There is nothing in the whole epoch.
    """
    epoch = Plan(num_samples - num_samples % whole, options.batch_size, options.shard)
    require_not_empty(
        epoch.num_micro_batches, options, f"{num_samples} samples for batches of {epoch.global_batch_size}"
    )
    left = max(0, epoch.samples_before(options.limit_micro_batches(epoch.num_micro_batches)) - start.passed)
    if start.passed != epoch.samples_before(start.micro_batch):  # it was begun in batches of another size
        left -= left % whole
    return replace(
        epoch, num_samples=start.passed + left, first_micro_batch=start.micro_batch, first_sample=start.passed
    )
