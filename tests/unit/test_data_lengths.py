"""The lengths of samples that are known without reading them."""

from __future__ import annotations

from typing import Any

import datasets
import pytest
from torch.utils.data import Dataset, Subset

from accmt.addons.token_batches.lengths import known_lengths
from accmt.errors import DataError

ROWS = [{"input_ids": list(range(length)), "label": length % 2} for length in (3, 1, 0, 7, 2)]


class Unread(Dataset[Any]):
    """Fails when a sample is read."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError(index)

    def __len__(self) -> int:
        return len(ROWS)


class WithLengths(Unread):
    """Says its lengths."""

    def __init__(self) -> None:
        self.lengths = [3, 1, 0, 7, 2]


def known(data: Any, **others: Any) -> list[int] | None:
    lengths = known_lengths(data, **others)
    return None if lengths is None else lengths.tolist()


COLUMNS = datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    "make_data", [lambda: ROWS, lambda: COLUMNS, WithLengths], ids=["list", "columns", "attribute"]
)
def test_all_or_chosen_lengths_are_known(make_data: Any) -> None:
    data = make_data()
    assert known(data) == [3, 1, 0, 7, 2]
    assert known(data, indices=[3, 3, 0]) == [7, 7, 3]
    assert known(Subset(data, [4, 3])) == [2, 7]
    assert known(Subset(Subset(data, [4, 3, 1]), [2, 1]), indices=[1]) == [7]


def test_columns_are_read_as_the_dataset_orders_them() -> None:
    assert known(COLUMNS.select([4, 3, 0])) == [2, 7, 3]
    assert sorted(known(COLUMNS.shuffle(seed=1)) or []) == [0, 1, 2, 3, 7]
    assert known(datasets.concatenate_datasets([COLUMNS, COLUMNS])) == 2 * [3, 1, 0, 7, 2]
    assert known(COLUMNS.with_format("torch")) == [3, 1, 0, 7, 2]
    assert known(COLUMNS.select([])) == []


def test_a_column_of_lengths_comes_first_and_a_function_of_the_users_makes_them_unknown() -> None:
    with_length = COLUMNS.add_column("length", [9, 8, 7, 6, 5])
    assert known(with_length) == [9, 8, 7, 6, 5]
    assert known(with_length.with_transform(lambda rows: rows)) is None


@pytest.mark.parametrize("data", [Unread(), Subset(Unread(), [0]), COLUMNS.remove_columns("input_ids")])
def test_others_are_unknown(data: Any) -> None:
    assert known(data) is None


def test_a_modules_length_of_needs_the_samples() -> None:
    assert known(ROWS, length_of=lambda sample: 2 * len(sample["input_ids"])) == [6, 2, 0, 14, 4]
    assert known(WithLengths(), length_of=lambda sample: 1) is None


def test_a_list_of_samples_without_lengths_is_an_error() -> None:
    with pytest.raises(DataError, match="def length_of"):
        known([{"label": 1}])
