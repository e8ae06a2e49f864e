import random

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from accmt.data import Shard, set_seed
from accmt.data.samplers import GlobalBatchSampler, Order, Plan, UserBatches
from tests.tables import each


class Told:
    """A sampler that remembers the epochs that were set."""

    def __init__(self, indices):
        self.indices = indices
        self.epochs = []

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


class ShuffledBy(Told):
    """A sampler that shuffles with one of the global generators."""

    def __init__(self, shuffle):
        super().__init__(list(range(20)))
        self.shuffle = shuffle

    def __iter__(self):
        indices = list(self.indices)
        self.shuffle(indices)
        return iter(indices)


def read_indices(sampler: GlobalBatchSampler) -> list[list[int]]:
    return [batch.indices for batch in sampler]


def shuffle_by_torch(indices):
    indices[:] = torch.tensor(indices)[torch.randperm(len(indices))].tolist()


def global_draws():
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_the_order_is_a_permutation_of_its_own_in_each_epoch_and_repeats_with_the_seed():
    orders = [Order(50, 1, shuffle=True).at(epoch).tolist() for epoch in range(5)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert orders == [Order(50, 1, shuffle=True).at(epoch).tolist() for epoch in range(5)]
    assert Order(50, 2, shuffle=True).at(0).tolist() != orders[0]


@pytest.mark.parametrize(
    "sampler", [None, ShuffledBy(random.shuffle), RandomSampler(range(20))], ids=lambda value: type(value).__name__
)
def test_drawing_an_order_leaves_the_global_generators_alone(sampler):
    set_seed(3)
    expected = global_draws()
    set_seed(3)
    Order(20, 1, shuffle=True, sampler=sampler).at(0)
    assert global_draws() == expected


@each("indices", [[4, 1, 1], (4, 1, 1), np.array([4, 1, 1]), torch.tensor([4, 1, 1]), Told([4, 1, 1])])
def test_a_sampler_or_a_list_of_indices_is_the_order(indices):
    order = Order(5, 1, shuffle=True, sampler=indices)
    assert order.at(0).tolist() == [4, 1, 1]
    assert order.size(0) == 3


@pytest.mark.parametrize(
    "shuffle", [shuffle_by_torch, np.random.shuffle, random.shuffle], ids=["torch", "numpy", "random"]
)
def test_a_sampler_that_draws_from_a_global_generator_depends_on_seed_and_epoch_only(shuffle):
    orders = []
    for process in range(3):
        set_seed(process)  # each process stands elsewhere
        order = Order(20, 7, sampler=ShuffledBy(shuffle))
        orders.append([order.at(epoch).tolist() for epoch in (0, 1)])
    assert orders[0] == orders[1] == orders[2]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == list(range(20))


@pytest.mark.parametrize(
    "make",
    [
        lambda g: RandomSampler(range(20), generator=g),
        lambda g: RandomSampler(range(20), replacement=True, generator=g),
        lambda g: SubsetRandomSampler(range(20), generator=g),
        lambda g: WeightedRandomSampler([1.0] * 20, 20, generator=g),
    ],
)
def test_a_users_generator_decides_the_order_and_is_left_as_it_was(make):
    def draw(users_seed, runs_seed, epoch):
        return Order(20, runs_seed, sampler=make(torch.Generator().manual_seed(users_seed))).at(epoch).tolist()

    assert draw(1, 5, 0) == draw(1, 6, 0)
    assert draw(1, 5, 0) != draw(2, 5, 0)
    assert draw(1, 5, 0) != draw(1, 5, 1)
    generator = torch.Generator().manual_seed(1)
    torch.rand(3, generator=generator)
    before = generator.get_state()
    order = Order(20, 5, sampler=make(generator))
    assert [order.at(1).tolist(), order.at(0).tolist()] == [draw(1, 5, 1), draw(1, 5, 0)]
    assert torch.equal(generator.get_state(), before)
    assert generator.initial_seed() == 1


def test_a_sampler_is_told_the_epoch_and_drawn_once_in_it():
    sampler = Told([1, 2])
    order = Order(5, 1, sampler=sampler)
    for epoch in (2, 2, 3):
        order.size(epoch)
        order.at(epoch)
    assert sampler.epochs == [2, 3]


def test_the_global_order_does_not_depend_on_the_number_of_processes():
    def read(count):
        of_all = []
        for index in range(count):
            plan = Plan(23, 2, Shard(index, count))
            sampler = GlobalBatchSampler(Order(23, 5, shuffle=True), seed=5, purpose="train")
            sampler.start_at(1, plan, 0)
            batches = read_indices(sampler)
            assert len(batches) == len(sampler)
            of_all.append(batches)
        micro_batches = max(map(len, of_all))
        return [i for r in range(micro_batches) for batches in of_all if r < len(batches) for i in batches[r]]

    assert read(1) == read(2) == read(3) == read(4) == Order(23, 5, shuffle=True).at(1).tolist()


def test_each_fetch_has_a_seed_of_its_own_over_batches_epochs_processes_and_purposes():
    seeds = []
    for purpose in ("train", "validate"):
        for index in range(2):
            plan = Plan(12, 2, Shard(index, 2))
            sampler = GlobalBatchSampler(Order(12, 5), seed=5, purpose=purpose)
            for epoch in range(3):
                sampler.start_at(epoch, plan, 0)
                seeds += [batch.seed for batch in sampler]
    assert len(set(seeds)) == len(seeds) == 2 * 2 * 3 * 3


def test_a_global_batch_sampler_starts_and_ends_where_it_is_told():
    plan = Plan(5, 2, Shard(1, 2))
    sampler = GlobalBatchSampler(Order(5, 1), seed=1, purpose="train")
    sampler.start_at(0, plan, 0)
    assert read_indices(sampler) == [[2, 3]]
    assert len(sampler) == 1
    sampler.start_at(0, plan, 1)
    assert read_indices(sampler) == []
    assert len(sampler) == 0


def test_batch_i_goes_to_process_i_mod_processes():
    batches = [[0, 1], [2], [3, 4, 5], [6, 7], [8]]
    shards = [GlobalBatchSampler(UserBatches(batches, 1), seed=1, purpose="train") for _ in range(2)]
    plans = [Plan(5, 1, Shard(index, 2)) for index in range(2)]
    for shard, plan in zip(shards, plans, strict=True):
        shard.start_at(0, plan, 0)
    assert list(map(read_indices, shards)) == [[[0, 1], [3, 4, 5], [8]], [[2], [6, 7]]]
    assert [len(shard) for shard in shards] == [3, 2]
    order = UserBatches(batches, 1)
    assert [order.num_samples(0, range(i, i + 1)) for i in range(order.size(0))] == [2, 1, 3, 2, 1]
    assert order.num_samples(None, range(2)) is None  # before an epoch has begun
    for shard, plan in zip(shards, plans, strict=True):
        shard.start_at(0, plan, 1)
    assert list(map(read_indices, shards)) == [[[3, 4, 5], [8]], [[6, 7]]]


def test_batches_that_are_drawn_as_they_come_are_the_same_on_every_process():
    class Balanced:
        """Draws each batch when it is asked for, from numpy's generator."""

        def __iter__(self):
            for _ in range(6):
                yield np.random.choice(100, 3, replace=False)

        def __len__(self):
            return 6

    def read(index, interference):
        shard = GlobalBatchSampler(UserBatches(Balanced(), 1), seed=1, purpose="train")
        shard.start_at(0, Plan(6, 1, Shard(index, 2)), 0)
        batches = []
        for batch in shard:
            batches.append([int(i) for i in batch.indices])
            np.random.seed(interference)  # what the training of a process does in between
        return batches, UserBatches(Balanced(), 1).num_samples(0, range(6))

    whole = GlobalBatchSampler(UserBatches(Balanced(), 1), seed=1, purpose="train")
    whole.start_at(0, Plan(6, 1, Shard()), 0)
    whole = [[int(i) for i in batch] for batch in read_indices(whole)]
    (first, num_samples), (second, _) = read(0, 1), read(1, 2)
    assert [first[0], second[0], first[1], second[1], first[2], second[2]] == whole
    assert num_samples == 6 * 3


def test_each_of_a_users_batches_has_a_seed_of_its_own_and_the_same_on_any_number_of_processes():
    def seeds(count):
        found = {}
        for index in range(count):
            shard = GlobalBatchSampler(UserBatches([[i] for i in range(6)], 1), seed=1, purpose="train")
            plan = Plan(6, 1, Shard(index, count))
            for epoch in (0, 1):
                shard.start_at(epoch, plan, 0)
                found |= {(epoch, batch.indices[0]): batch.seed for batch in shard}
        return found

    assert seeds(1) == seeds(2) == seeds(3)
    assert len(set(seeds(1).values())) == 12
