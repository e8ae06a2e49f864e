import logging

import pytest
import torch
from torch.utils.data import DataLoader

from accmt.data import SourceOptions, build_source
from accmt.errors import DataError
from accmt.messages import speaking
from tests.raising import raises_at
from tests.toys import Stream


class Numbers:
    """Numbers of which some cannot be read."""

    def __init__(self, length, bad=()):
        self.length = length
        self.bad = set(bad)

    def __getitem__(self, index):
        if index in self.bad:
            raise ValueError(f"no number {index}")
        return torch.tensor(index)

    def __len__(self):
        return self.length


def options(**settings):
    return SourceOptions(**{"purpose": "train", "batch_size": 3, "seed": 3, "skips_bad": True, **settings})


def read(data, epoch=0, first=0, **settings):
    loader = build_source(data, options(**settings))
    micro_batches = list(loader.micro_batches(epoch, first))
    loader.end_workers()
    return micro_batches


def numbers_of(micro_batches):
    return [None if micro_batch.batch is None else micro_batch.batch.tolist() for micro_batch in micro_batches]


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out_and_the_others_keep_their_places(workers):
    micro_batches = read(Numbers(11, {1, 3, 4, 5, 10}), num_workers=workers)
    assert numbers_of(micro_batches) == [[0, 2], None, [6, 7, 8], [9]]
    assert [micro_batch.own_samples for micro_batch in micro_batches] == [2, 0, 3, 1]
    assert [micro_batch.num_samples for micro_batch in micro_batches] == [2, 0, 3, 1]
    assert [micro_batch.num_bad for micro_batch in micro_batches] == [1, 3, 0, 1]
    assert [[bad.index for bad in micro_batch.bad] for micro_batch in micro_batches] == [[1], [3, 4, 5], [], [10]]
    assert micro_batches[0].bad[0].error == "ValueError: no number 1"
    assert [micro_batch.is_partial for micro_batch in micro_batches] == [False, True, False, False]
    assert [micro_batch.is_last for micro_batch in micro_batches] == [False, False, False, True]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_has_the_order_that_it_has_without_bad_samples(workers):
    whole = read(Numbers(20), shuffle=True, num_workers=workers)
    left = read(Numbers(20, {2, 11}), shuffle=True, num_workers=workers)
    for all_of_it, micro_batch in zip(whole, left, strict=True):
        assert [n for n in all_of_it.batch.tolist() if n not in {2, 11}] == micro_batch.batch.tolist()


def test_an_epoch_goes_on_behind_bad_samples_as_if_it_had_not_been_interrupted():
    data = Numbers(20, {2, 11, 12})
    loader = build_source(data, options(shuffle=True))
    micro_batches = list(loader.micro_batches(1))
    other = build_source(data, options(shuffle=True))
    other.resume_from(1, 3, loader.position(1, 3))
    assert numbers_of(other.micro_batches(1, 3)) == numbers_of(micro_batches[3:])


def test_batches_of_a_users_loader_are_counted_without_what_is_skipped():
    micro_batches = read(DataLoader(Numbers(10, {4, 9}), batch_size=4))
    assert numbers_of(micro_batches) == [[0, 1, 2, 3], [5, 6, 7], [8]]
    assert [micro_batch.own_samples for micro_batch in micro_batches] == [4, 3, 1]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_far_more_than_a_hundred_in_all_that_are_not_in_a_row_are_skipped(batch_size):
    bad = [index for index in range(400) if index % 3 != 1] if batch_size == 1 else range(0, 400, 3)
    micro_batches = read(Numbers(400, bad), batch_size=batch_size)
    assert sum(micro_batch.num_bad for micro_batch in micro_batches) == len(bad) > 100
    assert sum(micro_batch.own_samples for micro_batch in micro_batches) == 400 - len(bad)


def test_a_hundred_are_counted_from_the_last_that_could_be_read():
    """Ninety-nine, one that can be read, and ninety-nine more."""
    assert len(read(Numbers(200, {*range(99), *range(100, 199)}), batch_size=1)) == 200
    with raises_at(DataError, "the training data", "100 unreadable"):
        read(Numbers(201, {*range(99), *range(100, 200)}), batch_size=1)


def test_a_stream_says_that_it_cannot_skip(caplog):
    with caplog.at_level(logging.WARNING), speaking(verbose=False):
        build_source(Stream(4), options())
        build_source(Stream(4), options())
    (record,) = caplog.records
    assert 'failures={"on_bad_sample": "skip"} has no effect on the training data' in record.message
    assert "catch errors where they are raised" in record.message
