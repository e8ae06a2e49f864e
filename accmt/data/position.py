"""The position of the data in an epoch, and how an epoch resumes from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from accmt.data.fingerprints import Rows, compare
from accmt.data.options import SourceOptions, require_not_empty
from accmt.data.sharding import Plan
from accmt.errors import DataError, explain
from accmt.messages import say, say_once


@dataclass(frozen=True)
class EpochStart:
    """Where reading an epoch begins: at its first sample, or where it was interrupted.

    Attributes:
        epoch: The epoch that is resumed; None for one that begins.
        micro_batch: Its first micro-batch.
        consumed: Samples, or batches of the user's, over all processes, that were trained on before.
        position: What a loader's `position` returned; empty for an epoch that begins.
    """

    epoch: int | None = None
    micro_batch: int = 0
    consumed: int = 0
    position: Mapping[str, Any] = field(default_factory=dict)

    def of(self, epoch: int, first_micro_batch: int) -> EpochStart:
        """Return where reading begins: at the first sample in other epochs, and in this one when it is read again."""
        return self if epoch == self.epoch and first_micro_batch >= self.micro_batch else EPOCH_START


EPOCH_START = EpochStart()


def read_start(
    epoch: int, first_micro_batch: int, position: Mapping[str, Any], *, kind: str, unit: str, options: SourceOptions
) -> EpochStart:
    """Read where an epoch resumes; after 0 micro-batches any position will do."""
    if first_micro_batch == 0:
        return EPOCH_START
    if position.get("kind") != kind:
        got = f"a position saved for a {position.get('kind')}"
        raise cannot_resume(options, got, f"one for a {kind}, as these data are")
    if type(position.get(unit)) is not int:
        raise cannot_resume(options, f"{position.get(unit)!r} {unit} trained on", "a whole number")
    return EpochStart(epoch, first_micro_batch, position[unit], position)


def require_same_number(start: EpochStart, number: int, unit: str, options: SourceOptions) -> None:
    """Check that an epoch has as much as when it began; otherwise its order would differ."""
    if start.position and start.position["of"] != number:
        expected = f"the {start.position['of']} {unit} with which the epoch began, {start.consumed} of them trained on"
        raise cannot_resume(options, f"{number} {unit}", expected)


def require_same_order(start: EpochStart, order: str, options: SourceOptions) -> None:
    """Check that an epoch has the order with which it began; otherwise samples would be repeated and missed."""
    if start.position["order"] != order:
        got = "another order than the one in which the epoch began: shuffling, sampler, its seed, or batches changed"
        raise cannot_resume(options, got, f"that order, {start.consumed} of {start.position['of']} trained on")


def compare_rows(position: Mapping[str, Any], rows: Rows, options: SourceOptions, *, is_in_epoch: bool) -> None:
    """Check that an epoch continues with the samples with which it began, and say it where a later one has others."""
    result = compare(rows, position.get("rows", {}))
    if result == "different" and is_in_epoch:
        got = "other samples at the same indices: their order, or what is in them, has changed"
        do = (
            "read them in the order of before (os.listdir and set have none: sort them), or begin a new run: "
            "resume=False; data may change between two epochs"
        )
        raise cannot_resume(options, got, "the samples with which the epoch began", do)
    if result != "same":
        say(f"the {options.kind} data are not those of before the interruption: samples at the same indices differ")


def say_not_compared(options: SourceOptions) -> None:
    """Say of data that resume by their own state that nothing of them can be compared: nothing is read again."""
    kind = f"the {options.kind} data"
    say_once(
        f"{kind} resume by their own state_dict; whether they are those of before the interruption is not compared"
    )


def cannot_resume(options: SourceOptions, got: str, expected: str, do: str | None = None) -> DataError:
    """Return the error about data with which an interrupted epoch cannot be resumed."""
    do = do or "resume with the data, sampler and batches as they were, or begin a new run: resume=False"
    return DataError(explain(f"the {options.kind} data, in an epoch that is resumed", got, expected, do))


def plan_epoch(num_samples: int, options: SourceOptions, *, multiple: int = 1, start: EpochStart = EPOCH_START) -> Plan:
    """Plan an epoch's micro-batches after `drop_last` and limits, which count from its beginning also on a resume.

    Args:
        num_samples: Samples of the whole epoch.
        options: Sizes, limit and shard.
        multiple: At the end, samples beyond a multiple of this are dropped; 1 drops none.
        start: Where reading begins.
    """
    epoch = Plan(num_samples - num_samples % multiple, options.batch_size, options.shard)
    require_not_empty(
        epoch.num_micro_batches, options, f"{num_samples} samples for batches of {epoch.global_batch_size}"
    )
    left = max(0, epoch.samples_before(options.limit_micro_batches(epoch.num_micro_batches)) - start.consumed)
    if start.consumed != epoch.samples_before(start.micro_batch):  # it was begun in batches of another size
        left -= left % multiple
    return replace(
        epoch, num_samples=start.consumed + left, first_micro_batch=start.micro_batch, first_sample=start.consumed
    )
