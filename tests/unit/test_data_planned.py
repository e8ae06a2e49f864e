import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SubsetRandomSampler, TensorDataset

from accmt.data import Shard, SourceOptions, build_source
from accmt.data.planned import BatchesSource
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each


class Counted:
    """Numbers that remember which were read."""

    def __init__(self, length):
        self.length = length
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return index

    def __len__(self):
        return self.length


class Augmented:
    """Samples with a draw of each generator."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.tensor(
            [index, torch.rand(1).item(), float(np.random.rand()), random.random()], dtype=torch.float64
        )


class Scheduled(Augmented):
    """Samples that depend on the epoch."""

    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch


def options(**settings):
    return SourceOptions(**{"purpose": "train", "batch_size": 2, "seed": 3, **settings})


def build_all(make, count, **settings):
    return [build_source(make(), options(shard=Shard(index, count), **settings)) for index in range(count)]


def in_global_order(loaders, epoch=0, first=0):
    """Read all processes' loaders side by side and return samples, checking what each micro-batch says."""
    samples = []
    for micro_batches in zip(*(loader.micro_batches(epoch, first) for loader in loaders), strict=True):
        sizes = [0 if r.batch is None else len(r.batch) for r in micro_batches]
        assert [r.own_samples for r in micro_batches] == sizes
        assert {r.num_samples for r in micro_batches} == {sum(sizes)}
        assert {r.is_partial for r in micro_batches} == {0 in sizes}
        assert {r.is_last for r in micro_batches} == {micro_batches[0].index == loaders[0].num_micro_batches - 1}
        assert loaders[0].samples_in(micro_batches[0].index, micro_batches[0].index + 1) == sum(sizes)
        samples += [int(sample) for r in micro_batches if r.batch is not None for sample in r.batch]
    return samples


@each("drop_last", [False, True])
@each("count", [1, 2])
def test_the_batches_of_a_dataloader_are_those_that_torch_cuts(count, drop_last):
    for length in range(3, 11):
        given = DataLoader(Counted(length), batch_size=3, drop_last=drop_last)
        expected = [batch.tolist() for batch in given]
        loaders = build_all(lambda given=given: given, count)
        micro_batches = zip(*(loader.micro_batches(0) for loader in loaders), strict=True)
        found = [one.batch.tolist() for each in micro_batches for one in each if one.batch is not None]
        assert found == expected
        assert {loader.num_micro_batches for loader in loaders} == {-(-len(expected) // count)}


def test_every_sample_is_seen_once_over_all_processes_whatever_the_sizes():
    for length in (1, 2, 3, 7, 12, 40):
        expected = None
        for batch_size in (1, 3, 5):
            for count in (1, 2, 4):
                loaders = build_all(lambda: Counted(length), count, batch_size=batch_size, shuffle=True)  # noqa: B023
                samples = in_global_order(loaders)
                assert sorted(samples) == list(range(length))
                expected = expected or samples
                assert samples == expected  # one global order
                assert loaders[0].samples_in(0, loaders[0].num_micro_batches) == length


@each("count", [1, 2])
@each("sampler", [SubsetRandomSampler([1, 3]), [1, 3], lambda data: SubsetRandomSampler([1, len(data) - 5])])
def test_a_sampler_a_factory_or_a_list_decides_which_samples_are_seen(sampler, count):
    loaders = build_all(lambda: Counted(8), count, sampler=sampler, shuffle=True, batch_size=1)
    assert sorted(in_global_order(loaders)) == [1, 3]


@pytest.mark.parametrize(("count", "micro_batches"), [(1, 2), (2, 1)])
def test_drop_last_leaves_out_a_round_that_is_not_full(count, micro_batches):
    loaders = build_all(lambda: Counted(5), count, drop_last=True)
    assert loaders[0].num_micro_batches == micro_batches
    assert in_global_order(loaders) == list(range(4))
    assert build_all(lambda: Counted(5), count)[0].num_micro_batches == 3 - count // 2
    full = build_all(lambda: Counted(8), count, drop_last=True)
    assert in_global_order(full) == list(range(8))


def test_what_a_limit_leaves_out_is_not_even_prefetched():
    data = Counted(100)
    (loader,) = build_all(lambda: data, 1, limit=2)
    list(loader.micro_batches(0))
    assert data.read == [0, 1, 2, 3]
    assert len(loader.dataloader) == 2


def test_workers_change_neither_samples_nor_augmentation():
    def read(num_workers, epochs, first=0, count=1, index=0):
        loader = build_source(Augmented(), options(num_workers=num_workers, shard=Shard(index, count), shuffle=True))
        return [torch.cat([r.batch for r in loader.micro_batches(epoch, first)]) for epoch in epochs]

    inline, by_workers = read(0, (0, 1)), read(2, (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(inline, by_workers, strict=True))
    assert torch.equal(read(2, (1,), first=4)[0], inline[1][8:])  # also where a run goes on
    draws = torch.cat(inline)[:, 1:]
    assert len(torch.unique(draws, dim=0)) == 24  # other ones for each sample of each epoch
    assert all(len(torch.unique(column)) == 24 for column in draws.T)
    of_two = torch.cat([read(0, (0,), count=2, index=i)[0] for i in range(2)])
    assert len(torch.unique(of_two[:, 1:], dim=0)) == 12


def test_augmentation_is_another_with_another_seed_or_purpose_and_ignores_what_happens_in_between():
    def read(**settings):
        loader = build_source(Augmented(), options(**settings))
        batches = []
        for micro_batch in loader.micro_batches(0):
            batches.append(micro_batch.batch)
            torch.manual_seed(len(batches))
            random.seed(len(batches))
        return torch.cat(batches)

    first = read()
    torch.rand(100)
    assert torch.equal(read(), first)
    assert not torch.equal(read(seed=4)[:, 1:], first[:, 1:])
    assert not torch.equal(read(purpose="validate")[:, 1:], first[:, 1:])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_is_told_the_epoch_in_its_workers_too(num_workers):
    for data in (Scheduled(), DataLoader(Scheduled(), num_workers=num_workers, persistent_workers=num_workers > 0)):
        loader = build_source(data, options(num_workers=num_workers))
        for epoch in (0, 1):
            assert {int(sample) for r in loader.micro_batches(epoch) for sample in r.batch} == {epoch}


def test_anything_with_a_length_and_items_is_a_dataset():
    for data in ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7]), range(5, 8)):
        assert in_global_order(build_all(lambda: data, 2)) == [5, 6, 7]  # noqa: B023


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_datasets_dataset_is_one_with_whole_batches_fetched_at_once(num_workers):
    data = datasets.Dataset.from_dict({"number": list(range(7)), "text": list("abcdefg")}).with_format("torch")
    loaders = build_all(lambda: data, 2, num_workers=num_workers)
    micro_batches = [list(loader.micro_batches(0)) for loader in loaders]
    assert [r.batch["number"].tolist() for r in micro_batches[0]] == [[0, 1], [4, 5]]
    assert [r.batch["text"] for r in micro_batches[1]] == [["c", "d"], ["g"]]


def test_a_user_dataloader_keeps_batches_sampler_and_collate_function():
    data = TensorDataset(torch.arange(7))
    given = DataLoader(
        data, batch_size=3, sampler=[6, 5, 4, 3, 2, 1, 0], collate_fn=lambda rows: [int(r[0]) for r in rows]
    )
    loader = build_source(given, options(batch_size=99))
    assert isinstance(loader, BatchesSource)
    assert [r.batch for r in loader.micro_batches(0)] == [[6, 5, 4], [3, 2, 1], [0]]
    assert [r.own_samples for r in loader.micro_batches(0)] == [3, 3, 1]
    assert loader.num_micro_batches == 3


@pytest.mark.parametrize(("count", "num_workers"), [(1, 0), (2, 0), (3, 0), (5, 0), (2, 2)])
def test_a_user_dataloader_is_shared_without_loss_or_repetition(count, num_workers):
    def make():
        return DataLoader(range(11), batch_size=3, shuffle=True, num_workers=num_workers)

    whole = in_global_order(build_all(make, 1), epoch=1)
    assert sorted(whole) == list(range(11))
    assert in_global_order(build_all(make, count), epoch=1) == whole
    assert in_global_order(build_all(make, count), epoch=0) != whole
    loaders = build_all(make, count)
    assert loaders[0].num_micro_batches == -(-4 // count)
    assert loaders[0].samples_in(0, 1) is None  # which batches there are is known when the epoch begins
    tail = in_global_order(loaders, epoch=1, first=1)
    assert tail == whole[3 * count :]


def test_a_user_dataloaders_generator_is_respected_and_the_same_on_every_process():
    def make(seed):
        return DataLoader(range(10), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(seed))

    orders = {}
    for users_seed in (1, 2):
        whole = in_global_order(build_all(lambda: make(users_seed), 1))  # noqa: B023
        assert in_global_order(build_all(lambda: make(users_seed), 2)) == whole  # noqa: B023
        orders[users_seed] = whole
    assert orders[1] != orders[2]
    given = make(1)
    first = [in_global_order([build_source(given, options())], epoch) for epoch in (0, 1)]
    second = [in_global_order([build_source(given, options(seed=9))], epoch) for epoch in (0, 1)]
    assert first == second  # another run with the same loader, whatever the run's seed
    assert first[0] == orders[1]
    assert first[0] != first[1]


@pytest.mark.parametrize("nested", [False, True])
def test_a_dataloader_with_a_distributed_sampler_is_not_shared_twice(nested):
    seen, draws = [], []
    for rank in range(2):
        sampler = DistributedSampler(Augmented(), num_replicas=2, rank=rank, shuffle=True)
        how = (
            {"batch_sampler": BatchSampler(sampler, 2, drop_last=False)}
            if nested
            else {"sampler": sampler, "batch_size": 2}
        )
        loader = build_source(DataLoader(Augmented(), **how), options(shard=Shard(rank, 2)))
        assert loader.num_micro_batches == 3
        for epoch in (0, 1):
            samples = torch.cat([r.batch for r in loader.micro_batches(epoch)])
            assert sampler.epoch == epoch
            seen += [(epoch, int(i)) for i in samples[:, 0]]
            draws.append(samples[:, 1:])
    assert sorted(seen) == [(epoch, i) for epoch in (0, 1) for i in range(12)]
    assert len(torch.unique(torch.cat(draws), dim=0)) == 24


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_sampler_decides_the_batches(count):
    batches = [[0, 5], [3], [1, 2, 4]]
    loaders = build_all(lambda: Counted(6), count, batch_sampler=batches, shuffle=True)
    assert in_global_order(loaders) == [0, 5, 3, 1, 2, 4]
    assert loaders[0].num_micro_batches == -(-3 // count)


def test_a_batch_sampler_may_give_another_number_of_batches_than_its_length_says():
    class Estimating:
        def __len__(self):
            return 2

        def __iter__(self):
            return iter([[0], [1, 2], [3]])

    loaders = build_all(lambda: Counted(4), 2, batch_sampler=Estimating())
    assert loaders[0].num_micro_batches == 2  # as drawn for the first epoch, for by this the LR schedule is planned
    assert in_global_order(loaders) == [0, 1, 2, 3]


def test_options_of_a_user_dataloader_are_kept():
    given = DataLoader(
        range(4), num_workers=1, prefetch_factor=3, timeout=20, worker_init_fn=print, multiprocessing_context="fork"
    )
    kept = build_source(given, options()).dataloader
    assert (kept.num_workers, kept.prefetch_factor, kept.timeout, kept.worker_init_fn.user_function) == (
        1,
        3,
        20,
        print,
    )
    assert kept.multiprocessing_context.get_start_method() == "fork"


def test_no_samples_and_no_batches_are_errors():
    with raises_at(DataError, "the training data", "length 0"):
        build_source([], options())
    with raises_at(DataError, "the training data", "0 samples for batches of 2"):
        build_source([1, 2], options(sampler=[]))
    with raises_at(DataError, "the training data", "without batches"):
        build_source(DataLoader([1, 2], batch_size=3, drop_last=True), options())
    with raises_at(DataError, "the training data", "without batches"):
        build_source([1, 2], options(batch_sampler=[]))
