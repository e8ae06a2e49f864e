"""The largest micro-batch that data can bring: no step has one that is much larger."""

from __future__ import annotations

import random

import numpy as np

from accmt.addons.token_batches.budget import TokenBudget, cut_by_tokens, padded_tokens
from accmt.addons.token_batches.lengths import find_largest
from accmt.addons.token_batches.packing import pack_by_tokens, packed_tokens
from tests.tables import each

STEP = 32


def draw_lengths(seed: int) -> np.ndarray:
    rng = random.Random(seed)
    return np.array([int(rng.lognormvariate(3, 1)) for _ in range(300)])


@each("packs", [False, True])
@each("max_tokens", [40, 256, 1000, 10**6])
def test_no_step_has_a_micro_batch_that_is_much_larger(packs: bool, max_tokens: int) -> None:
    tokens_of, cut = (packed_tokens, pack_by_tokens) if packs else (padded_tokens, cut_by_tokens)
    for seed in range(5):
        lengths, budget = draw_lengths(seed), TokenBudget(max_tokens, 20)
        indices = find_largest(lengths, STEP, budget, packs=packs)
        assert len(set(indices)) == len(indices) <= 20
        tried = tokens_of(indices, lengths)
        assert tried <= max(max_tokens, lengths.max())
        rng = np.random.default_rng(seed)
        for _ in range(20):
            of_step = rng.permutation(lengths)[:STEP].tolist()
            largest = max(tokens_of(group, of_step) for own in cut(of_step, budget) for group in own)
            assert largest <= 1.15 * tried


def test_of_batches_that_are_about_as_large_it_is_the_one_of_the_longest_samples() -> None:
    lengths = np.array([10] * 50 + [100] * 5)
    assert find_largest(lengths, STEP, TokenBudget(320, 99)) == [50, 51, 52]
    assert find_largest(lengths, STEP, TokenBudget(190, 99)) == list(range(19))  # one of 100 is far smaller
    assert find_largest(lengths, STEP, TokenBudget(50, 99)) == [50]  # longer than the budget
    assert find_largest(lengths, 4) == [50, 51, 52, 53]
    assert find_largest(lengths, 4, TokenBudget(130, 99), packs=True) == [50, 0, 1, 2]
    assert find_largest(np.array([0, 0]), 4, TokenBudget(130, 99)) == [0, 1]
