"""Leaves samples that cannot be read out of their batches, so that every process knows what is left.

The order of the others does not change. A batch of which nothing is left is a round in which its process has no part,
as at the end of an epoch; the other processes have to know that before they reduce gradients with it. So in training
they add up, in each round, who has a batch, how many samples, and how many were left out. In evaluations, where
processes need not keep in step, each counts its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from accmt.data.batches import Round
from accmt.data.options import LoaderOptions
from accmt.errors import DataError, explain
from accmt.processes import num_processes, sum_over_processes

_TOO_MANY = 100


def without_bad_samples(
    rounds: Iterator[Round], options: LoaderOptions, *, is_whole_epoch: bool, knows_samples: bool
) -> Iterator[Round]:
    """Take what was left out from the batches of rounds, and set what the rounds tell of their samples.

    Processes: collective in each round where they are to agree.

    Args:
        rounds: Rounds whose batches are `Kept`.
        options: Sharing, and where to agree.
        is_whole_epoch: Whether an epoch begins with these rounds.
        knows_samples: Whether a batch is known to hold all the samples that were read for it.

    Raises:
        DataError: No sample of an epoch, or none of a hundred in a row, could be read: then it is no matter of samples.
    """
    unread, has_any = 0, not is_whole_epoch
    for round_ in rounds:
        _take_bad(round_)
        num_read = _count(round_, options)
        round_.num_samples = num_read if knows_samples else None
        has_any |= num_read != 0
        unread = 0 if num_read != 0 else unread + round_.num_bad
        if unread >= _TOO_MANY or (round_.is_last and not has_any):
            raise _nothing_is_read(options, unread, round_)
        yield round_


def _take_bad(round_: Round) -> None:
    if round_.batch is not None:
        round_.batch, bad = round_.batch
        round_.bad = tuple(bad)  # a list, where batches are pinned
    read = (round_.own_samples or 0) - len(round_.bad)
    round_.own_samples = 0 if round_.batch is None else read


def _count(round_: Round, options: LoaderOptions) -> int | None:
    """Set what the processes agree on, and return how many samples they read; None where each counts its own."""
    if options.agree_on is not None:
        own = float(round_.batch is not None), float(round_.own_samples or 0), float(len(round_.bad))
        present, samples, bad = map(int, sum_over_processes(own, options.agree_on))
        round_.is_partial, round_.num_bad = present < num_processes(), bad
        return samples
    round_.num_bad = len(round_.bad)
    round_.is_partial |= round_.batch is None
    return round_.own_samples if options.share.count == 1 else None


def _nothing_is_read(options: LoaderOptions, unread: int, round_: Round) -> DataError:
    last = f"; the last is sample {round_.bad[-1].index}: {round_.bad[-1].error}" if round_.bad else ""
    got = f"{unread} samples in a row that cannot be read{last}"
    expected = 'single samples that cannot be read, which on_bad_sample="skip" leaves out'
    do = "look at the path, at the disk, or at the dataset's __getitem__"
    return DataError(explain(f"the {options.kind} data", got, expected, do))
