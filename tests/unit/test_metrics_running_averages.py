"""Means of what is logged: exact over many values, and bounded in memory."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from accmt.addons.mix.sums import GroupedSum
from accmt.metrics import RunningAverages
from accmt.metrics.averages import _READ_AT, COMPACT_AT, WeightedSum, exact_sum

CPU = torch.device("cpu")


def values_and_weights(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, generator=generator), torch.randint(1, 9, (count,), generator=generator)


@pytest.mark.parametrize("count", [0, 1, 3, COMPACT_AT - 1, COMPACT_AT, COMPACT_AT + 1, 5 * COMPACT_AT + 7])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_sums_are_those_of_exact_arithmetic(count, as_tensor):
    values, weights = values_and_weights(count)
    weighted_sum = WeightedSum()
    for value, weight in zip(values, weights, strict=True):
        weighted_sum.add(value, weight if as_tensor else weight.item())
    total = sum((Fraction(v) * w for v, w in zip(values.tolist(), weights.tolist(), strict=True)), Fraction(0))
    assert [sum(map(Fraction, parts)) for parts in weighted_sum.take()] == [total, int(weights.sum())]
    assert [sum(parts) for parts in weighted_sum.take()] == [0.0, 0.0]


def test_many_small_values_are_not_lost_beside_a_large_one():
    weighted_sum = WeightedSum()
    weighted_sum.add(torch.tensor(2.0**24), 1.0)
    for _ in range(3 * COMPACT_AT):
        weighted_sum.add(torch.tensor(1.0), 1.0)
    assert sum(weighted_sum.take()[0]) == 2.0**24 + 3 * COMPACT_AT


@pytest.mark.parametrize("count", [1, COMPACT_AT, 2 * COMPACT_AT + 3])
def test_the_states_of_several_processes_add_up(count):
    values, weights = values_and_weights(3 * count)
    whole, own = WeightedSum(), WeightedSum()
    for part in range(3):
        process = WeightedSum()
        for value, weight in zip(values[part::3], weights[part::3], strict=True):
            process.add(value, weight.item())
            whole.add(value, weight.item())
        own.add_state(process.state_dict())
    assert own.take() == whole.take()


@pytest.mark.parametrize("count", [2, 2 * COMPACT_AT])
def test_a_value_of_weight_zero_counts_for_nothing(count):
    weighted_sum = WeightedSum()
    for index in range(count):
        weighted_sum.add(torch.tensor(math.nan if index % 2 else 3.0), 0.0 if index % 2 else 1.0)
    assert [sum(parts) for parts in weighted_sum.take()] == [3.0 * count / 2, count / 2]


@pytest.mark.parametrize("count", [1, 2 * COMPACT_AT])
def test_a_value_that_is_not_finite_shows_in_the_sum(count):
    weighted_sum = WeightedSum()
    for _ in range(count):
        weighted_sum.add(torch.tensor(1.0), 1.0)
    weighted_sum.add(torch.tensor(math.nan), 1.0)
    assert math.isnan(sum(weighted_sum.take()[0]))


def test_memory_stays_bounded():
    weighted_sum = WeightedSum()
    value = torch.tensor(1.0)
    for _ in range(_READ_AT + 5):
        weighted_sum.add(value, 1.0)
    assert len(weighted_sum._values) == 5
    assert sum(weighted_sum.take()[0]) == _READ_AT + 5


def test_adding_does_not_wait_for_the_device():
    weighted_sum = WeightedSum()
    for _ in range(2 * COMPACT_AT):  # a meta tensor has no value that could be read
        weighted_sum.add(torch.empty((), device="meta"), torch.empty((), device="meta"))
    assert len(weighted_sum._values) == 2 * COMPACT_AT


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], 0.0), ([0.1] * 10, 1.0), ([math.inf, 1.0], math.inf), ([1e308, 1e308], math.inf), ([-1e308] * 2, -math.inf)],
)
def test_exact_sum_never_raises(values, expected):
    assert exact_sum(values) == expected
    assert math.isnan(exact_sum([math.inf, -math.inf]))


def window_of(*losses, others=None):
    averages = RunningAverages()
    for loss, weight in losses:
        averages.add(torch.tensor(loss), weight, others)
    return averages


def test_means_since_the_log_and_since_the_evaluation_are_independent():
    averages = window_of((1.0, 1.0), (3.0, 1.0))
    assert averages.take_row("loss") == {"loss": 2.0}
    averages.add(torch.tensor(5.0), 1.0)
    assert averages.take_since_evaluation() == 3.0
    averages.add(torch.tensor(9.0), 1.0)
    assert averages.take_row("loss") == {"loss": 7.0}
    assert averages.take_since_evaluation() == 9.0
    assert averages.take_since_evaluation() is None


def test_the_mean_of_an_epoch_goes_on_until_the_first_batch_of_the_next():
    averages = window_of((1.0, 1.0))
    assert averages.epoch_loss is None
    averages.take_row("loss")
    averages.add(torch.tensor(4.0), 2.0)
    averages.take_since_evaluation()
    assert averages.epoch_loss == 3.0
    averages.end_epoch()
    averages.take_row("loss")
    assert averages.epoch_loss == 3.0
    averages.add(torch.tensor(7.0), 1.0)
    averages.take_row("loss")
    assert averages.epoch_loss == 7.0


@pytest.mark.parametrize("ends_epoch", [True, False])
def test_the_mean_of_an_epoch_survives_in_the_state(ends_epoch):
    averages = window_of((1.0, 1.0), (4.0, 2.0))
    averages.take_row("loss")
    if ends_epoch:
        averages.end_epoch()
    averages.add(torch.tensor(0.1), 3.0)
    resumed = RunningAverages()
    resumed.load_state_dict(averages.state_dict())
    averages.take_row("loss")
    resumed.take_row("loss")
    assert resumed.epoch_loss == averages.epoch_loss == pytest.approx(0.1 if ends_epoch else 9.3 / 6)


# ---- Sums of groups


def sum_groups(batches, *, breaks=(), most_waiting=10**6):
    """Return the sums of batches `(samples, losses, weights)`; at `breaks`, they are copied or saved and continued."""
    sums = GroupedSum(["a", "b", "c"], lambda samples: np.searchsorted([10, 20, 30], samples, side="right"))
    sums.MOST_WAITING = most_waiting
    for number, batch in enumerate(batches):
        if number in breaks:
            kept, before = sums.copy(), sums
            state = kept.state_dict()
            sums = GroupedSum(["a", "b", "c"], before._find_groups)
            sums.MOST_WAITING = most_waiting
            sums.add_state(state)
        sums.add(*batch)
    return {name: (exact(total), exact(weight)) for name, (total, weight) in sums.take().items()}


def exact(parts):
    return None if parts is None else sum(map(Fraction, parts))


def batches_of(kind, count=60):
    rng = np.random.default_rng(0)
    for number in range(count):
        size = int(rng.integers(1, 6))
        samples = rng.integers(0, 30, size)
        losses = torch.from_numpy(rng.normal(size=size)).float()
        weights = torch.from_numpy(rng.integers(0, 4, size)).float()
        losses[weights == 0] = math.nan  # a sample without targets
        each = {
            "number": (samples, losses.nan_to_num(), float(size)),
            "scalar": (samples, losses.nan_to_num(), torch.tensor(2.5)),
            "each": (samples, losses, weights),
            "mixed": [
                (samples.tolist(), losses.nan_to_num(), 3.0),
                (samples, losses.bfloat16(), weights),
                (np.full(size, samples[0]), torch.tensor(0.25), 2.0),
            ][number % 3],
        }
        yield each[kind]


@pytest.mark.parametrize("kind", ["number", "scalar", "each", "mixed"])
def test_sums_of_groups_are_those_of_exact_arithmetic_whenever_they_are_computed(kind):
    names, expected = ["a", "b", "c"], {}
    for number, name in enumerate(names):
        pairs = []
        for samples, losses, weights in batches_of(kind):
            size = len(samples)
            of_all = torch.as_tensor(weights, dtype=torch.float64)
            shares = (of_all if of_all.ndim else of_all / size).expand(size).tolist()
            own = zip(samples, losses.double().expand(size).tolist(), shares, strict=True)
            pairs += [(loss, weight) for sample, loss, weight in own if sample // 10 == number]
        expected["samples__" + name] = len(pairs), None
        total = sum(Fraction(weight) for _, weight in pairs)
        lost = sum(Fraction(loss * weight) for loss, weight in pairs if weight)  # each product is rounded once
        expected["weight__" + name] = total, None
        expected["loss__" + name] = lost, total
    whole = sum_groups(batches_of(kind))
    assert whole == {**expected, "samples_of_unknown_loss": (0, None)}
    for breaks in ((1,), (0, 7, 30), range(60)):
        for most_waiting in (1, 4, 10**6):
            assert sum_groups(batches_of(kind), breaks=breaks, most_waiting=most_waiting) == whole, (breaks, kind)


def test_the_mean_loss_of_a_batch_is_that_of_a_group_if_all_its_samples_are_of_one():
    mean = torch.tensor(2.0)
    taken = sum_groups([([1, 2], mean, 4.0), ([11, 21], torch.tensor(9.0), 6.0), ([3], torch.tensor([5.0]), 1.0)])
    assert taken["loss__a"] == (13, 5)
    assert taken["loss__b"] == taken["loss__c"] == (0, 0)
    assert [taken[f"samples__{name}"] for name in "abc"] == [(3, None), (1, None), (1, None)]
    assert taken["samples_of_unknown_loss"] == (2, None)


def test_few_batches_wait_for_their_groups():
    calls = []

    def find(samples):
        calls.append(len(samples))
        return np.zeros(len(samples), np.int64)

    sums = GroupedSum(["a"], find)
    for _ in range(2 * GroupedSum.MOST_WAITING + 5):
        sums.add([1, 2], torch.ones(2), 2.0)
    assert calls == [2 * GroupedSum.MOST_WAITING] * 2
    assert len(sums._entries) == 5
    assert sum(sums.take()["loss__a"][1]) == 2.0 * (2 * GroupedSum.MOST_WAITING + 5)
    assert sums.is_empty
