import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from accmt.checkpoint.state_dicts import decode, encode
from accmt.data import Shard, SourceOptions, build_source
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each


class Augmented:
    """Samples with a draw of each generator."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.read.append(index)
        draws = [torch.rand(1).item(), float(np.random.rand()), random.random()]
        return torch.tensor([index, *draws], dtype=torch.float64)


def by_shuffling_loader(length):
    return DataLoader(Augmented(length), batch_size=3, shuffle=True)


def by_loader_with_workers(length):
    return DataLoader(Augmented(length), batch_size=3, shuffle=True, num_workers=2)


def by_loader_with_generator(length):
    sampler = RandomSampler(range(length), generator=torch.Generator().manual_seed(8))
    return DataLoader(Augmented(length), batch_sampler=BatchSampler(sampler, 3, drop_last=True))


def options(**settings):
    return SourceOptions(**{"purpose": "train", "batch_size": 2, "seed": 3, "shuffle": True, **settings})


def build_all(make, count, **settings):
    return [build_source(make(), options(shard=Shard(index, count), **settings)) for index in range(count)]


def stored(position):
    """Return a position as a checkpoint gives it back."""
    return decode(encode(position))


def read(loaders, epoch, first, last=None):
    """Read micro-batches of all processes side by side; return each micro-batch's samples in the global order."""
    of_all = [[] for _ in loaders]
    for taken, loader in zip(of_all, loaders, strict=True):
        for micro_batch in loader.micro_batches(epoch, first):
            taken.append(micro_batch)
            torch.manual_seed(len(taken))  # what training does in between
            random.seed(len(taken))
            if last is not None and micro_batch.index == last - 1:
                break
    return [join(micro_batches, loaders[0]) for micro_batches in zip(*of_all, strict=True)]


def join(micro_batches, loader):
    batches = [r.batch for r in micro_batches if r.batch is not None]
    assert (
        {r.num_samples for r in micro_batches}
        == {sum(map(len, batches))}
        == {loader.samples_in(micro_batches[0].index, micro_batches[0].index + 1)}
    )
    assert {r.is_last for r in micro_batches} == {micro_batches[0].index == loader.num_micro_batches - 1}
    return micro_batches[0].index, torch.cat(batches)


def continue_on(loaders, epoch, first, position):
    for loader in loaders:
        loader.resume_from(epoch, first, stored(position))
    return loaders


def samples_of(micro_batches):
    return [int(sample) for _, batch in micro_batches for sample in batch[:, 0]]


def same(micro_batches, others):
    return [i for i, _ in micro_batches] == [i for i, _ in others] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(micro_batches, others, strict=True)
    )


@pytest.mark.parametrize("length", [1, 7, 23])
def test_an_epoch_goes_on_with_any_other_number_of_processes_and_size_of_batch(length):
    for before, after in [(1, 2), (2, 1), (4, 3), (3, 4), (2, 2)]:
        for batch_size in (1, 3):
            whole = samples_of(read(build_all(lambda: Augmented(length), before), 1, 0))
            for num_micro_batches in range(build_all(lambda: Augmented(length), before)[0].num_micro_batches + 1):
                loaders = build_all(lambda: Augmented(length), before)
                done = samples_of(read(loaders, 1, 0, num_micro_batches)) if num_micro_batches else []
                position = loaders[0].position(1, num_micro_batches)
                assert all(loader.position(1, num_micro_batches) == position for loader in loaders)
                others = build_all(lambda: Augmented(length), after, batch_size=batch_size)
                continue_on(others, 1, num_micro_batches, position)
                left = length - len(done)
                assert others[0].num_micro_batches == num_micro_batches + -(-left // (batch_size * after))
                assert others[0].samples_in(num_micro_batches, others[0].num_micro_batches) == left
                rest = read(others, 1, num_micro_batches)
                assert [index for index, _ in rest] == list(range(num_micro_batches, others[0].num_micro_batches))
                assert done + samples_of(rest) == whole
                assert sorted(whole) == list(range(length))


@pytest.mark.parametrize("make", [Augmented, by_shuffling_loader, by_loader_with_generator])
def test_an_epoch_interrupted_again_and_again_on_4_then_2_then_3_then_1_processes_has_each_sample_once(make):
    whole = samples_of(read(build_all(lambda: make(71), 1), 2, 0))
    samples, first, position = [], 0, build_all(lambda: make(71), 1)[0].position(2, 0)
    for count, num_micro_batches in [(4, 2), (2, 3), (3, 2), (1, None)]:
        loaders = continue_on(build_all(lambda: make(71), count), 2, first, position)
        last = None if num_micro_batches is None else first + num_micro_batches
        micro_batches = read(loaders, 2, first, last)
        samples += samples_of(micro_batches)
        first = micro_batches[-1][0] + 1
        position = loaders[0].position(2, first)
    assert samples == whole
    assert first == loaders[0].num_micro_batches


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (Augmented, {}),
        (Augmented, {"drop_last": True}),
        (Augmented, {"limit": 0.6}),
        (Augmented, {"limit": 3}),
        (Augmented, {"micro_batches_per_batch": 2, "drop_last": True}),
        (Augmented, {"micro_batches_per_batch": 2, "limit": 2}),
        (Augmented, {"sampler": RandomSampler(range(30), replacement=True)}),
        (Augmented, {"batch_sampler": BatchSampler(RandomSampler(range(30)), 4, drop_last=False)}),
        (by_shuffling_loader, {}),
        (by_shuffling_loader, {"limit": 0.5}),
        (by_loader_with_generator, {}),
    ],
)
def test_the_same_launch_resumes_as_if_it_had_never_stopped(make, settings, count):
    unbroken = build_all(lambda: make(31), count, **settings)
    epochs = [read(unbroken, epoch, 0) for epoch in (0, 1, 2)]
    num_micro_batches = unbroken[0].num_micro_batches
    for first in (0, 2, num_micro_batches // 2 // 2 * 2, num_micro_batches):
        stopped = build_all(lambda: make(31), count, **settings)
        read(stopped, 0, 0)
        assert not first or same(read(stopped, 1, 0, first), epochs[1][:first])
        others = continue_on(build_all(lambda: make(31), count, **settings), 1, first, stopped[0].position(1, first))
        assert others[0].num_micro_batches == num_micro_batches
        assert same(read(others, 1, first), epochs[1][first:])
        assert same(read(others, 2, 0), epochs[2])  # the epochs after it begin as ever
        assert others[0].num_micro_batches == num_micro_batches


@pytest.mark.parametrize(("make", "settings"), [(Augmented, {"num_workers": 2}), (by_loader_with_workers, {})])
def test_workers_fetch_what_an_unbroken_epoch_would_have(make, settings):
    unbroken = build_all(lambda: make(17), 1, **settings)
    epochs = [read(unbroken, epoch, 0) for epoch in (0, 1)]
    others = continue_on(build_all(lambda: make(17), 1, **settings), 0, 2, unbroken[0].position(0, 2))
    assert same(read(others, 0, 2), epochs[0][2:])
    assert same(read(others, 1, 0), epochs[1])
    if make is Augmented:
        inline = continue_on(build_all(lambda: make(17), 1), 0, 2, unbroken[0].position(0, 2))
        assert same(read(inline, 0, 2), epochs[0][2:])


@pytest.mark.usefixtures("without_fingerprints")
@pytest.mark.parametrize("make", [lambda data: data, lambda data: DataLoader(data, batch_size=2, shuffle=True)])
def test_what_is_skipped_is_never_read(make):
    data = Augmented(40)
    whole = samples_of(read([build_source(make(data), options())], 0, 0))
    data.read.clear()
    loader = build_source(make(data), options())
    loader.resume_from(0, 17, loader.position(0, 17))
    assert samples_of(read([loader], 0, 17)) == data.read == whole[34:]


@pytest.mark.usefixtures("without_fingerprints")
def test_of_a_million_samples_skipped_none_is_read():
    class Large(Augmented):
        def __getitem__(self, index):
            self.read.append(index)
            return torch.tensor([index])

    data = Large(1_000_100)
    position = build_source(data, options(batch_size=10)).position(3, 100_000)
    assert position["samples"] == 1_000_000
    loader = build_source(data, options(batch_size=10))
    loader.resume_from(3, 50_000, position)
    first = next(loader.micro_batches(3, first=50_000))
    assert first.index == 50_000
    assert data.read == first.batch[:, 0].tolist()
    assert len(data.read) == 10


@each(
    ("settings", "micro_batches"),
    [
        ({"limit": 5}, 2),  # 5 batches of 6 are 30 samples, 20 of which are passed
        ({"limit": 0.6}, 1),  # 4 of 7 batches
        ({"limit": 3}, 0),
        ({"limit": 2}, 0),
        ({"drop_last": True}, 2),  # 36 samples are whole batches
        ({"drop_last": True, "micro_batches_per_batch": 2}, 2),
        ({"drop_last": True, "limit": 5}, 1),
        ({}, 4),
    ],
)
def test_limits_and_drop_last_count_from_the_beginning_of_the_epoch(settings, micro_batches):
    position = build_source(Augmented(40), options()).position(0, 10)
    assert position["samples"] == 20
    loader = build_source(Augmented(40), options(batch_size=6, **settings))
    loader.resume_from(0, 10, position)
    found = list(loader.micro_batches(0, first=10))
    assert loader.num_micro_batches == 10 + micro_batches
    assert [r.index for r in found] == list(range(10, 10 + micro_batches))
    if settings.get("drop_last"):
        assert all(r.num_samples == 6 for r in found)
    assert loader.position(0, 10) == position


def test_at_the_beginning_of_an_epoch_there_is_nothing_to_fit():
    for make in (Augmented, by_shuffling_loader):
        (loader,) = build_all(lambda: make(8), 1)  # noqa: B023
        for position in ({}, loader.position(1, 0), {"kind": "stream", "samples": 0}, {"kind": "?", "of": 9}):
            loader.resume_from(1, 0, position)
            assert sorted(samples_of(read([loader], 1, 0))) == list(range(8))


def test_data_of_another_length_cannot_resume():
    (loader,) = build_all(lambda: Augmented(40), 1)
    position = loader.position(0, 5)
    (other,) = build_all(lambda: Augmented(41), 1)
    with raises_at(DataError, "of a resumed epoch", "41 samples", expected="(10 already"):
        other.resume_from(0, 5, position)
    with raises_at(DataError, "of a resumed epoch", "39 samples", expected="40 samples"):
        build_source(Augmented(40), options(sampler=range(39))).resume_from(0, 5, position)
    (given,) = build_all(lambda: by_shuffling_loader(40), 1)
    (other_given,) = build_all(lambda: by_shuffling_loader(30), 1)
    with raises_at(DataError, "of a resumed epoch", "10 batches", expected="14 batches"):
        other_given.resume_from(0, 5, given.position(0, 5))


def test_the_length_that_counts_is_that_of_the_epoch():
    class Growing:
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter(range(4 * self.epoch + 4))

    loaders = [build_source(Augmented(40), options(sampler=Growing())) for _ in range(2)]
    read(loaders[:1], 2, 0, 3)
    position = loaders[0].position(2, 3)
    assert (position["samples"], position["of"]) == (6, 12)
    loaders[1].resume_from(2, 3, loaders[0].position(2, 3))
    assert samples_of(read(loaders[1:], 2, 3)) == list(range(6, 12))


def test_a_position_of_another_kind_is_rejected():
    with raises_at(DataError, "of a resumed epoch", "a stream", expected="dataset with a length"):
        build_source(Augmented(8), options()).resume_from(0, 1, {"kind": "stream", "samples": 2})
    by_loader = build_source(by_shuffling_loader(8), options())
    with raises_at(DataError, "of a resumed epoch", "dataset with a length", expected="DataLoader"):
        by_loader.resume_from(0, 1, {"kind": "dataset with a length", "samples": 2, "of": 8})


def test_a_dataset_is_told_the_epoch_in_which_it_goes_on():
    class Scheduled(Augmented):
        def set_epoch(self, epoch):
            self.epoch = epoch

    data = Scheduled(8)
    build_source(data, options()).resume_from(5, 1, build_source(Augmented(8), options()).position(5, 1))
    assert data.epoch == 5


def test_a_distributed_sampler_goes_on_for_each_process():
    seen = []
    for rank in range(2):

        def make(rank=rank):
            sampler = DistributedSampler(range(16), num_replicas=2, rank=rank)
            return build_source(Augmented(16), options(shard=Shard(rank, 2), sampler=sampler))

        loader, other = make(), make()
        seen += samples_of(read([loader], 1, 0, 2))
        other.resume_from(1, 2, loader.position(1, 2))
        seen += samples_of(read([other], 1, 2))
    assert sorted(seen) == list(range(16))


@pytest.mark.parametrize("changed", [{"seed": 4}, {"shuffle": False}])
def test_an_epoch_in_another_order_than_it_began_is_refused(changed):
    (loader,) = build_all(lambda: Augmented(23), 1)
    position = stored(loader.position(1, 3))
    with raises_at(DataError, "of a resumed epoch", "order"):
        build_source(Augmented(23), options(**changed)).resume_from(1, 3, position)
