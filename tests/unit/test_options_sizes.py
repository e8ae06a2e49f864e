"""Sizes in bytes, as people write them."""

from __future__ import annotations

import pytest

from accmt import Trainer
from accmt.errors import ArgumentError
from accmt.options.units import read_size
from tests.raising import raises_at
from tests.toys import HPS


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1, 1),
        (10**12, 10**12),
        ("5GB", 5 * 10**9),
        (" 32 mb ", 32 * 10**6),
        ("1.5KB", 1500),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_are_bytes_or_text_with_a_unit(written, size):
    assert read_size("max_shard_size", written) == size


@pytest.mark.parametrize("written", [0, -1, True, 1.5, None, "", "5", "5 G", "GB", "-1GB", "1e3KB", "5 GiB"])
def test_everything_else_is_refused_with_the_name_of_the_argument(written):
    with raises_at(ArgumentError, "Trainer(gather_chunk_size=...)"):
        read_size("gather_chunk_size", written)


@pytest.mark.parametrize(("written", "size"), [("1KB", 1000), (7, 7), (None, None), ("32MB", 32_000_000)])
def test_the_trainer_gathers_in_chunks_of_the_size_it_was_told(written, size):
    assert (
        Trainer(
            HPS, "out/model", metric_options={"gather_chunk_size": written}
        ).settings.evaluation.metric_options.chunk_bytes
        == size
    )


def test_text_and_bytes_split_weights_alike():
    settings = [Trainer(HPS, "out/model", max_shard_size=size).settings.saving for size in ("1KB", 1000)]
    assert {read_size("max_shard_size", of_one.max_shard_size) for of_one in settings} == {1000}
