"""Splits the samples of an optimizer step by a token budget, into micro-batches of similar length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

Groups = list[list[int]]
"""Micro-batches of one process, each as positions of its samples."""

_SWEEPS = 8
_EXCHANGES = 16
_UNBALANCED = 0.05  # of the tokens of the busiest process
_AS_GOOD = 0.02


@dataclass(frozen=True)
class TokenBudget:
    """The limits of a micro-batch.

    Attributes:
        max_tokens: Maximum padded tokens: the length of the longest sample times the number of samples.
        max_samples: Maximum samples.
        bucket: Batches are padded to a multiple of this length.
    """

    max_tokens: int
    max_samples: int
    bucket: int = 1

    def widths(self, lengths: Sequence[int]) -> list[int]:
        """Return the lengths of samples after padding to a multiple."""
        return list(lengths) if self.bucket == 1 else [-(-length // self.bucket) * self.bucket for length in lengths]


def padded_tokens(group: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens of a micro-batch, including padding."""
    return max((lengths[position] for position in group), default=0) * len(group)


def cut_by_tokens(lengths: Sequence[int], budget: TokenBudget, num_processes: int = 1) -> list[Groups]:
    """Split the samples of one optimizer step into the micro-batches of each process.

    All processes get equally many micro-batches, if there are enough samples, and as few as the budget allows; their
    sizes are as even as possible. A sample longer than the budget gets a separate micro-batch.

    Args:
        lengths: The length of each sample.
        budget: The limits of a micro-batch.
        num_processes: Processes that share the samples.

    Returns:
        The micro-batches of each process, those with the most tokens first.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    even = _cut_evenly(order, lengths, budget, multiple=num_processes)
    room = -(-len(even) // num_processes)
    cuts: list[list[Groups]] = []
    for groups in (even, _with_less_padding(even, lengths, budget)):
        # Each group, the largest first, goes to the process with the fewest tokens and a free slot.
        assigned: list[Groups] = [[] for _ in range(num_processes)]
        tokens = [0] * num_processes
        for group in sorted(groups, key=lambda group: -padded_tokens(group, lengths)):
            process = min((p for p in range(num_processes) if len(assigned[p]) < room), key=tokens.__getitem__)
            assigned[process].append(group)
            tokens[process] += padded_tokens(group, lengths)
        cuts.append(assigned)
    if num_processes > 1:
        # Distribute the samples instead, and split those of each process: more even with few, large groups.
        shards: Groups = [[] for _ in range(num_processes)]
        for start in range(0, len(order), num_processes):
            shards.sort(key=lambda shard: sum(lengths[position] for position in shard))  # the smallest gets the longest
            for shard, position in zip(shards, order[start : start + num_processes], strict=False):
                shard.append(position)
        most = max(len(_cut_evenly(shard, lengths, budget)) for shard in shards)
        split = [_cut_evenly(shard, lengths, budget, fewest=most) for shard in shards]
        cuts += [split, [_with_less_padding(groups, lengths, budget) for groups in split]]

    for cut in cuts:
        _balance(cut, lengths, budget)
    best = _choose([_tokens_of(cut, lengths) for cut in cuts])
    return [sorted(own, key=lambda group: -padded_tokens(group, lengths)) for own in cuts[best]]


def _choose(tokens: list[list[int]]) -> int:
    """Return the split with the least work for the busiest process; among similar ones, prefer a balanced one."""
    busiest = [max(of_cut) for of_cut in tokens]
    good = [cut for cut, most in enumerate(busiest) if most <= (1 + _AS_GOOD) * min(busiest)]
    return min(good, key=lambda cut: (not _is_balanced(tokens[cut]), busiest[cut]))


def _is_balanced(tokens: list[int]) -> bool:
    return max(tokens) - min(tokens) <= _UNBALANCED * max(tokens)


def _tokens_of(cut: list[Groups], lengths: Sequence[int]) -> list[int]:
    return [sum(padded_tokens(group, lengths) for group in own) for own in cut]


def _cut_evenly(
    order: list[int], lengths: Sequence[int], budget: TokenBudget, *, multiple: int = 1, fewest: int = 0
) -> Groups:
    """Split sorted samples into groups of neighbors, with the largest group as small as possible.

    Args:
        order: Positions of samples, the longest first.
        multiple: The number of groups is a multiple of this, if there are enough samples.
        fewest: Minimum number of groups.
    """
    widths = [max(lengths[position], 1) for position in order]
    fewest = max(fewest, len(_fill(widths, budget.max_tokens, budget.max_samples)))
    wanted = min(-(-fewest // multiple) * multiple, len(order))
    # A smaller budget never needs fewer groups, so the smallest sufficient budget can be found by bisection.
    smallest = 1 + bisect_left(
        range(1, budget.max_tokens),
        True,  # noqa: FBT003 - the value that is looked for
        key=lambda tokens: len(_fill(widths, tokens, budget.max_samples)) <= wanted,
    )
    groups = [order[part.start : part.stop] for part in _fill(widths, smallest, budget.max_samples)]
    while len(groups) < wanted:
        largest = max((g for g in groups if len(g) > 1), key=lambda group: padded_tokens(group, lengths))
        at, middle = groups.index(largest), len(largest) // 2
        groups[at : at + 1] = [largest[:middle], largest[middle:]]
    return groups


def _fill(widths: list[int], max_tokens: int, max_samples: int) -> list[range]:
    """Split samples, the longest first, into the fewest groups of neighbors within the limits."""
    groups, start = [], 0
    while start < len(widths):
        count = max(1, min(max_tokens // widths[start], max_samples))
        groups.append(range(start, min(start + count, len(widths))))
        start += count
    return groups


def _balance(cut: list[Groups], lengths: Sequence[int], budget: TokenBudget) -> None:
    """Exchange samples between the process with the most tokens and others until all are about equal."""
    for _ in range(_EXCHANGES):
        tokens = _tokens_of(cut, lengths)
        if _is_balanced(tokens):
            return
        most = max(tokens)
        donor = cut[tokens.index(most)]
        for process in sorted(range(len(cut)), key=tokens.__getitem__)[:-1]:
            receiver = cut[process]
            found = _best_exchange(donor, receiver, lengths, budget, most=most, least=tokens[process])
            if found is not None:
                a, b, given, taken = found
                donor[a], receiver[b] = (
                    _replace(donor[a], given, taken, lengths),
                    _replace(receiver[b], taken, given, lengths),
                )
                break
        else:
            return


def _best_exchange(
    donor: Groups, receiver: Groups, lengths: Sequence[int], budget: TokenBudget, *, most: int, least: int
) -> tuple[int, int, int | None, int | None] | None:
    """Find the exchange that leaves the busier of two processes with the fewest tokens.

    A micro-batch exchanges its longest or its shortest sample for one of another micro-batch or for nothing.

    Returns:
        The two micro-batches, and the sample that each loses; None if no exchange helps.
    """
    best, found = most, None
    for (a, one), (b, other) in product(enumerate(donor), enumerate(receiver)):
        rest_one, rest_other = most - padded_tokens(one, lengths), least - padded_tokens(other, lengths)
        for given, taken in product((None, *_ends(one)), (None, *_ends(other))):
            new_one = _tokens_after(one, given, taken, lengths, budget)
            new_other = _tokens_after(other, taken, given, lengths, budget)
            if new_one is None or new_other is None:
                continue
            busier = max(rest_one + new_one, rest_other + new_other)
            if busier < best:
                best, found = busier, (a, b, given, taken)
    return found


def _ends(group: list[int]) -> list[int]:
    return group if len(group) == 1 else [group[0], group[-1]]


def _tokens_after(
    group: list[int], gone: int | None, come: int | None, lengths: Sequence[int], budget: TokenBudget
) -> int | None:
    """Return the padded tokens of a micro-batch after an exchange; None if it would be empty or too large."""
    count = len(group) - (gone is not None) + (come is not None)
    kept = group[1:2] if group[0] == gone else group[:1]
    width = max(lengths[kept[0]] if kept else 0, 0 if come is None else lengths[come])
    fits = count == 1 or (1 < count <= budget.max_samples and max(width, 1) * count <= budget.max_tokens)
    return width * count if fits else None


def _replace(group: list[int], gone: int | None, come: int | None, lengths: Sequence[int]) -> list[int]:
    kept = [position for position in group if position != gone]
    return sorted(kept if come is None else [*kept, come], key=lambda position: (-lengths[position], position))


def _with_less_padding(groups: Groups, lengths: Sequence[int], budget: TokenBudget) -> Groups:
    """Move the bounds between groups of sorted samples, each to its optimum while the others stay."""
    groups = list(groups)
    for _ in range(_SWEEPS):
        before = list(groups)
        for first in range(len(groups) - 1):
            both = groups[first] + groups[first + 1]
            widest, number, best, best_tokens = max(lengths[both[0]], 1), len(both), 0, 0
            most = max(1, min(budget.max_tokens // widest, budget.max_samples, number - 1))
            for middle in range(1, most + 1):  # at least one of which fits
                width, rest = max(lengths[both[middle]], 1), number - middle
                tokens = widest * middle + width * rest
                fits = rest == 1 or (rest <= budget.max_samples and width * rest <= budget.max_tokens)
                if fits and (best == 0 or tokens < best_tokens):
                    best, best_tokens = middle, tokens
            groups[first : first + 2] = [both[:best], both[best:]]
        if groups == before:
            break
    return groups
