"""Which source each position of a run is taken from: pure functions of the weights.

At every position, the number of samples from each source is within one sample of its share. This is Tijdeman's
solution of the chairman assignment problem: of the sources that lag behind their share far enough, the one is taken
that would be the first to lag too far behind. The weights are whole parts of a period, after which the sequence starts
again, so that any position is found without computing those before it.

Source: R. Tijdeman 1980, "The chairman assignment problem", Discrete Mathematics 32, theorem 1: with k sources, no
count differs from its share by more than 1 - 1 / (2 k - 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import Any, NamedTuple

import numpy as np

_LONGEST_PERIOD = 100_000

Array = np.ndarray[Any, Any]


def whole_parts(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return weights as whole parts of their sum: exact if a sum of up to 100,000 allows it, else rounded to that."""
    total = sum(weights)
    shares = [weight / total for weight in weights]
    period = lcm(*(share.denominator for share in shares))
    if period <= _LONGEST_PERIOD:
        return tuple(int(share * period) for share in shares)
    parts = [max(int(share * _LONGEST_PERIOD), share > 0) for share in shares]
    # What rounding down left over goes to those that lost the most; a tiny share that got a part takes it from them.
    by_loss = sorted(range(len(shares)), key=lambda index: parts[index] - shares[index] * _LONGEST_PERIOD)
    missing = _LONGEST_PERIOD - sum(parts)
    for index in by_loss[:missing] if missing > 0 else ():
        parts[index] += 1
    parts[max(range(len(parts)), key=parts.__getitem__)] += min(missing, 0)
    return tuple(parts)


@lru_cache(maxsize=128)  # one for each time that weights change or a source is exhausted
def spread(parts: tuple[int, ...]) -> Array:
    """Return the source of each position of a period, as evenly spread as possible."""
    drawn = [(source, part) for source, part in enumerate(parts) if part]
    if len(drawn) == 1:
        return np.array([drawn[0][0]], np.int16)
    period, scale = sum(parts), 2 * (len(drawn) - 1)
    pattern = np.empty(period, np.int16)
    lag = [0] * len(parts)  # of each source behind its share, in 1 / (period * scale) of a sample
    for position in range(period):
        chosen, earliest = -1, period * scale
        for source, part in drawn:
            lag[source] += part * scale
            if lag[source] >= period:
                deadline = ((scale - 1) * period - lag[source]) // (part * scale)
                if deadline < earliest:
                    chosen, earliest = source, deadline
        lag[chosen] -= period * scale
        pattern[position] = chosen
    return pattern


class Stretch(NamedTuple):
    """Positions with the same weights, up to the next stretch."""

    start: int
    parts: tuple[int, ...]


class Interleaving:
    """The sources of all positions of a run.

    Args:
        stretches: The weights, by the position from which they apply.
        limits: The number of samples after which a source is exhausted; None for no limit. The others then share its
            part.
        limited_from: The start of the stretch from which the limits apply: earlier samples were trained on already.

    Attributes:
        end: The position at which all sources are exhausted; None if that never happens.
        stretches: The weights without those of exhausted sources.
    """

    def __init__(self, stretches: Sequence[Stretch], limits: Sequence[int | None], *, limited_from: int = 0) -> None:
        self.end: int | None = None
        self.stretches: list[Stretch] = []
        self._counts: list[Array] = []  # before each stretch
        waiting = list(stretches)
        while waiting:
            start, parts = waiting.pop(0)
            counts = self.counts(start) if self.stretches else np.zeros(len(limits), np.int64)
            if start >= limited_from:
                is_left = [limit is None or limit > count for limit, count in zip(limits, counts, strict=True)]
                parts = tuple(part if left else 0 for part, left in zip(parts, is_left, strict=True))
            if not any(parts):
                self.end = start
                return
            self.stretches.append(Stretch(start, parts))
            self._counts.append(counts)
            if start < limited_from:
                continue
            found = (self.position_of(source, limit) for source, limit in enumerate(limits) if limit and parts[source])
            exhausted = min((end for end in found if end is not None), default=None)
            if exhausted is not None and (not waiting or exhausted < waiting[0].start):
                waiting.insert(0, Stretch(exhausted, parts))

    def counts(self, position: int) -> Array:
        """Return the number of samples from each source before a position."""
        index = self._at(position)
        start, parts = self.stretches[index]
        pattern = spread(parts)
        periods, rest = divmod(position - start, len(pattern))
        of_period, of_rest = (np.bincount(part, minlength=len(parts)) for part in (pattern, pattern[:rest]))
        counts: Array = self._counts[index] + periods * of_period + of_rest
        return counts

    def sources(self, begin: int, end: int) -> Array:
        """Return the source of each position in [begin, end)."""
        found = []
        while begin < end:
            index = self._at(begin)
            stop = min([end, *(stretch.start for stretch in self.stretches[index + 1 : index + 2])])
            start, parts = self.stretches[index]
            pattern = spread(parts)
            first = (begin - start) % len(pattern)
            periods = -(-(first + stop - begin) // len(pattern))
            found.append(np.tile(pattern, periods)[first : first + stop - begin])
            begin = stop
        return np.concatenate(found) if found else np.empty(0, np.int16)

    def share_of(self, source: int, count: int) -> int:
        """Return the first position at which the share of a source amounts to `count` samples, or the end."""
        for index, (start, parts) in enumerate(self.stretches):
            missing = count - int(self._counts[index][source])
            if parts[source]:
                position = start + max(0, -(-missing * sum(parts) // parts[source]))
                if index + 1 == len(self.stretches) or position <= self.stretches[index + 1].start:
                    return position if self.end is None else min(position, self.end)
        return self.stretches[-1].start if self.end is None else self.end

    def position_of(self, source: int, count: int) -> int | None:
        """Return the first position before which there are `count` samples from a source; None if there never are."""
        for index, (start, parts) in enumerate(self.stretches):
            before = int(self._counts[index][source])
            if count <= before:
                return start
            if not parts[source]:
                continue
            pattern = spread(parts)
            places = np.flatnonzero(pattern == source)
            periods, rest = divmod(count - before - 1, len(places))
            position = start + periods * len(pattern) + int(places[rest]) + 1
            if index + 1 == len(self.stretches) or position <= self.stretches[index + 1].start:
                return position
        return None

    def _at(self, position: int) -> int:
        """Return the index of the stretch that a position is in."""
        return max(index for index, stretch in enumerate(self.stretches) if stretch.start <= position)
