"""The largest micro-batch that some data can bring, by the lengths of their samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from accmt.data.token_cut import TokenBudget

_AS_LARGE = 0.9


class LargestBatch(NamedTuple):
    """The largest micro-batch that the data can bring, or one of about its size.

    Attributes:
        batch: The batch.
        num_samples: How many samples it has.
        longest: The length of the longest.
    """

    batch: Any
    num_samples: int
    longest: int


def find_largest(
    lengths: np.ndarray[Any, Any], size: int, budget: TokenBudget | None = None, *, packs: bool = False
) -> list[int]:
    """Return the samples of a micro-batch than which no other needs much more memory.

    Of micro-batches that have about as many tokens it is the one of the longest samples, whose attention is largest.

    Args:
        lengths: Of all samples.
        size: Samples of a micro-batch; with a budget those of an optimizer step.
        budget: What a micro-batch may hold; None is `size` samples.
        packs: Whether samples are packed instead of padded.
    """
    order = np.argsort(-lengths, kind="stable")
    widths = np.maximum(lengths[order], 1)
    if budget is None:
        return _as_list(order[:size])
    widths = np.asarray(budget.widths(widths.tolist()))
    most = min(size, budget.max_samples, len(order))
    if packs:
        return _as_list(order[_fill_row(widths, budget.max_tokens, most)])
    numbers = np.clip(budget.max_tokens // widths, 1, np.minimum(most, len(order) - np.arange(len(order))))
    tokens = numbers * widths
    first = int(np.argmax(tokens >= _AS_LARGE * tokens.max()))
    return _as_list(order[first : first + numbers[first]])


def _fill_row(widths: np.ndarray[Any, Any], max_tokens: int, most: int) -> list[int]:
    """Return the places of the samples of one row: the longest, then always the longest that still fits."""
    chosen, room = [0], max_tokens - int(widths[0])
    while len(chosen) < most:
        place = max(chosen[-1] + 1, int(np.searchsorted(-widths, -room)))
        if room < 1 or place >= len(widths):
            break
        chosen.append(place)
        room -= int(widths[place])
    return chosen


def _as_list(indices: np.ndarray[Any, Any]) -> list[int]:
    return [int(index) for index in indices]
