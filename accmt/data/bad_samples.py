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


def without_bad_samples(rounds: Iterator[Round], options: LoaderOptions, *, is_whole_epoch: bool) -> Iterator[Round]:
    """Take what was left out from the batches of rounds, and set what the rounds tell of their samples.

    Processes: collective in each round where they are to agree.

    Args:
        rounds: Rounds whose batches are `Kept`.
        options: Sharing, and where to agree.
        is_whole_epoch: Whether an epoch begins with these rounds.

    Raises:
        DataError: No sample of an epoch, or none of a hundred in a row, could be read: then it is no matter of samples.
    """
    unread, has_any = 0, not is_whole_epoch
    for round_ in rounds:
        _take_bad(round_)
        _count(round_, options)
        has_any |= round_.num_samples != 0
        unread = 0 if round_.num_samples != 0 else unread + round_.num_bad
        if unread >= _TOO_MANY or (round_.is_last and not has_any):
            raise _nothing_is_read(options, unread, round_)
        yield round_


def _take_bad(round_: Round) -> None:
    if round_.batch is not None:
        round_.batch, bad = round_.batch
        round_.bad = tuple(bad)  # a list, where batches are pinned
    round_.own_samples = (round_.own_samples or 0) - len(round_.bad)


def _count(round_: Round, options: LoaderOptions) -> None:
    if options.agree_on is not None:
        own = float(round_.batch is not None), float(round_.own_samples or 0), float(len(round_.bad))
        present, samples, bad = map(int, sum_over_processes(own, options.agree_on))
        round_.is_partial, round_.num_samples, round_.num_bad = present < num_processes(), samples, bad
        return
    is_alone = options.share.count == 1
    round_.num_samples, round_.num_bad = (round_.own_samples if is_alone else None), len(round_.bad)
    round_.is_partial |= round_.batch is None


def _nothing_is_read(options: LoaderOptions, unread: int, round_: Round) -> DataError:
    last = f"; the last is sample {round_.bad[-1].index}: {round_.bad[-1].error}" if round_.bad else ""
    got = f"{unread} samples in a row that cannot be read{last}"
    expected = 'single samples that cannot be read, which on_bad_sample="skip" leaves out'
    do = "look at the path, at the disk, or at the dataset's __getitem__"
    return DataError(explain(f"the {options.kind} data", got, expected, do))
