"""Documents are packed into rows within a budget of tokens, alike for all processes, and made into one row each."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import torch

from accmt.addons.token_batches.budget import TokenBudget
from accmt.addons.token_batches.packing import DocumentPacker, count_targets, pack_by_tokens
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each


def draw_lengths(number: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice([0, 1, rng.randrange(1, 30), rng.randrange(1, 120)]) for _ in range(number)]


@each("processes", [1, 2, 3])
@each("number", [1, 2, 7, 64, 301])
@each("budget", [TokenBudget(128, 10**6), TokenBudget(64, 3), TokenBudget(1, 10**6)])
def test_each_sample_is_in_one_row_within_the_budget_and_processes_have_alike_rows(
    processes: int, number: int, budget: TokenBudget
) -> None:
    for seed in range(5):
        lengths = draw_lengths(number, seed)
        cut = pack_by_tokens(lengths, budget, processes)
        assert sorted(chain(*chain(*cut))) == list(range(number))
        rows = [sum(max(lengths[position], 1) for position in row) for row in chain(*cut)]
        sizes = [len(row) for row in chain(*cut)]
        assert all(tokens <= budget.max_tokens or size == 1 for tokens, size in zip(rows, sizes, strict=True))
        assert max(sizes) <= budget.max_samples
        numbers = list(map(len, cut))
        assert max(numbers) - min(numbers) <= (sum(numbers) == number)
        assert cut == pack_by_tokens(lengths, budget, processes)


def test_rows_are_few_and_processes_get_alike_tokens() -> None:
    for seed in range(10):
        lengths = [random.Random(seed * 1000 + index).randrange(5, 120) for index in range(256)]
        fewest = -(-sum(lengths) // 512)
        for processes in (1, 2, 4):
            cut = pack_by_tokens(lengths, TokenBudget(512, 10**6), processes)
            assert sum(map(len, cut)) <= -(-(fewest + 1) // processes) * processes
            tokens = [sum(lengths[position] for row in own for position in row) for own in cut]
            assert max(tokens) - min(tokens) <= 0.05 * max(tokens)


SAMPLES = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1], "length": 3, "kind": [0, 0, 1]},
    {"input_ids": np.array([8]), "labels": np.array([8]), "kind": [1]},
    {"input_ids": torch.tensor([9, 3]), "labels": torch.tensor([9, 3]), "kind": [2, 2]},
]


def test_a_row_has_the_samples_end_to_end_and_no_label_of_a_first_token() -> None:
    row = DocumentPacker()(SAMPLES)
    assert {name: values.tolist() for name, values in row.items()} == {
        "input_ids": [[5, 6, 7, 8, 9, 3]],
        "labels": [[-100, 6, 7, -100, -100, 3]],
        "kind": [[0, 0, 1, 1, 2, 2]],
        "position_ids": [[0, 1, 2, 0, 0, 1]],
    }
    assert count_targets(row) == 3
    assert SAMPLES[2]["labels"].tolist() == [9, 3]  # which stays the user's
    bounds = DocumentPacker(gives_bounds=True)(SAMPLES)
    assert bounds["cu_seq_lens_q"].tolist() == bounds["cu_seq_lens_k"].tolist() == [0, 3, 4, 6]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["max_length_q"] == bounds["max_length_k"] == 3


def test_samples_without_labels_are_their_own_and_empty_ones_leave_nothing() -> None:
    row = DocumentPacker()([{"input_ids": [4, 5]}, {"input_ids": []}, {"input_ids": [6, 7]}])
    assert row["labels"].tolist() == [[-100, 5, -100, 7]]
    assert row["position_ids"].tolist() == [[0, 1, 0, 1]]


@each(
    ("sample", "fault"),
    [
        ([1, 2], "list"),
        ({"text": "a"}, "['text']"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "a padded sample"),
        ({"input_ids": [1, 2], "text": "ab"}, "'text': a str, in a sample of 2 tokens"),
        ({"input_ids": [1, 2], "texts": ["a", "b"]}, "'texts': a list, in a sample of 2 tokens"),
        ({"input_ids": [1, 2], "labels": 1}, "'labels': a int, in a sample of 2 tokens"),
        ({"input_ids": [1, 2], "labels": [1]}, "'labels': a list, in a sample of 2 tokens"),
        ({"input_ids": torch.ones(1, 2)}, "'input_ids': a Tensor of shape [1, 2]"),
        ({"input_ids": [[1, 2], [1, 3]]}, "samples of several sequences, such as two answers"),
        ({"input_ids": []}, "a row with only empty samples"),
    ],
)
def test_samples_that_cannot_be_packed_are_named(sample: Any, fault: str) -> None:
    with raises_at(DataError, "packing in the hyper-parameters", fault):
        DocumentPacker()([sample])


def test_samples_with_and_without_labels_are_an_error() -> None:
    with raises_at(DataError, "packing in the hyper-parameters", "'more'"):
        DocumentPacker()([{"input_ids": [1], "more": [1]}, {"input_ids": [1]}])
