"""The samples of an optimizer step, cut into micro-batches by a budget of tokens."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch

from accmt.addons.token_batches.budget import TokenBudget, cut_by_tokens, padded_tokens
from accmt.addons.token_batches.lengths import find_length
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each


def lengths_of_texts(number: int, seed: int) -> list[int]:
    """Return lengths as those of paragraphs: most short, a few long."""
    draw = random.Random(seed)
    return [min(512, max(5, int(draw.lognormvariate(4.2, 0.75)))) for _ in range(number)]


def tokens_of(own: list[list[int]], lengths: list[int]) -> int:
    return sum(padded_tokens(group, lengths) for group in own)


@each("processes", [1, 2, 3, 8])
@each("number", [1, 2, 7, 33, 128, 256])
@each("max_samples", [5, 10**6])
def test_every_sample_is_in_one_micro_batch_within_the_budget(processes: int, number: int, max_samples: int) -> None:
    for seed in range(5):
        lengths = lengths_of_texts(number, seed)
        cut = cut_by_tokens(lengths, TokenBudget(1024, max_samples), processes)
        groups = list(chain(*cut))
        assert len(cut) == processes
        assert sorted(chain(*groups)) == list(range(number))
        assert all(1 <= len(group) <= max_samples for group in groups)
        assert all(padded_tokens(group, lengths) <= 1024 for group in groups)


@each("processes", [1, 2, 3, 8])
def test_processes_have_equally_many_micro_batches_if_there_are_samples_enough(processes: int) -> None:
    for number in (processes, 16 * processes, 50 * processes + 1):
        lengths = lengths_of_texts(number, seed=number)
        cut = cut_by_tokens(lengths, TokenBudget(2048, 10**6), processes)
        assert len({len(own) for own in cut}) == 1


@pytest.mark.parametrize("max_tokens", [1024, 2048])
@pytest.mark.parametrize("processes", [2, 3, 4, 8])
def test_tokens_are_balanced_over_processes(processes: int, max_tokens: int) -> None:
    for seed in range(8):
        lengths = lengths_of_texts(128 * processes, seed)
        every = [tokens_of(own, lengths) for own in cut_by_tokens(lengths, TokenBudget(max_tokens, 10**6), processes)]
        assert max(every) - min(every) <= 0.05 * max(every)


def test_fewer_samples_than_processes_leave_some_without_a_batch() -> None:
    assert cut_by_tokens([9, 3], TokenBudget(100, 10), 3) == [[[0]], [[1]], []]
    assert cut_by_tokens([], TokenBudget(100, 10), 2) == [[], []]


def test_like_lengths_are_together_and_no_micro_batch_is_spent_in_vain() -> None:
    lengths = [100, 1, 100, 1, 100, 1, 100, 1]
    assert cut_by_tokens(lengths, TokenBudget(400, 100)) == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    assert cut_by_tokens(lengths, TokenBudget(800, 100)) == [[[0, 2, 4, 6, 1, 3, 5, 7]]]


def test_a_sample_longer_than_the_budget_is_a_micro_batch_of_its_own() -> None:
    [own] = cut_by_tokens([50, 10, 10, 70, 10], TokenBudget(30, 100))
    assert sorted(map(sorted, own)) == [[0], [1, 2, 4], [3]]


@each(
    ("sample", "length"),
    [
        ({"input_ids": [1, 2, 3]}, 3),
        ({"input_ids": torch.ones(1, 4)}, 4),
        ({"length": 7, "input_ids": [1]}, 7),
        ({"length": torch.tensor(2)}, 2),
        (({"input_ids": []}, 1), 0),
    ],
)
def test_the_length_is_looked_up_in_the_sample(sample: Any, length: int) -> None:
    assert find_length(sample) == find_length(sample, lambda sample: None) == length


def test_the_module_says_the_length_first() -> None:
    assert find_length({"input_ids": [1]}, lambda sample: 5) == 5


@each("sample", [[1, 2], (), {"tokens": [1]}, "text"])
def test_a_sample_without_a_length_is_an_error_that_says_what_to_define(sample: Any) -> None:
    with raises_at(DataError, "the length of a sample", do="def length_of(self, sample)"):
        find_length(sample)


@each("length", [-1, 2.5, "3", True])
def test_a_length_that_is_no_number_from_0_is_an_error(length: Any) -> None:
    with raises_at(DataError, "the length of a sample", repr(length)):
        find_length({"length": length})
