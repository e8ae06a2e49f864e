"""Classes drawn by temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from accmt import TemperatureSampler
from accmt.data import Shard, SourceOptions, build_source
from accmt.data.samplers import Order
from accmt.errors import ArgumentError, DataError
from tests.raising import raises_at
from tests.resume.unbroken import Augmented, assert_same, state_of, train
from tests.tables import each
from tests.toys import Numbers, Scripted, make_trainer

COUNTS = [700, 200, 90, 10]
LABELS = [label for label, count in enumerate(COUNTS) for _ in range(count)]


def draw_classes(temperature: float, num_samples: int = 40_000) -> torch.Tensor:
    """Return how many samples of each class an epoch has."""
    indices = Order(len(LABELS), 3, sampler=TemperatureSampler(LABELS, temperature, num_samples)).at(0)
    return torch.tensor(LABELS)[indices].bincount(minlength=len(COUNTS))


@each("temperature", [0.5, 1, 3.0, 100.0, 1e9, math.inf])
def test_classes_are_drawn_in_proportion_to_the_power_of_their_part(temperature):
    powers = [(count / 1000) ** (1 / temperature) for count in COUNTS]
    expected = torch.tensor([power / sum(powers) for power in powers], dtype=torch.float64) * 40_000
    found = draw_classes(temperature)
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 16.27  # 3 degrees of freedom: more than this once in a thousand fair draws; the seed is fixed


def test_the_samples_of_a_class_are_drawn_evenly():
    order = Order(1000, 3, sampler=TemperatureSampler(LABELS, math.inf, 80_000)).at(0)
    of_last = order[order >= 990].bincount(minlength=1000)[990:]
    expected = of_last.sum() / 10
    assert of_last.sum() == pytest.approx(20_000, rel=0.05)
    assert ((of_last - expected) ** 2 / expected).sum() < 27.88  # 9 degrees of freedom, one in a thousand


@each(
    "labels",
    [
        ["b", "a", "b", "b"],
        [None, 3, None, None],
        (2, 1, 2, 2),
        torch.tensor([2, 1, 2, 2]),
        np.array([2, 1, 2, 2]),
        np.array(["b", "a", "b", "b"]),
        iter([2, 1, 2, 2]),
    ],
)
def test_labels_may_be_of_any_kind_and_in_any_order(labels):
    order = Order(4, 0, sampler=TemperatureSampler(labels, math.inf, 6000)).at(0)
    assert order.bincount(minlength=4).tolist() == pytest.approx([1000, 3000, 1000, 1000], rel=0.1)
    assert len(TemperatureSampler([2, 1, 2, 2])) == 4


def test_labels_may_be_a_column_of_a_datasets_dataset():
    from datasets import Dataset

    data = Dataset.from_dict({"label": [0] * 9 + [1], "text": list("abcdefghij")})
    assert TemperatureSampler(data["label"], 1).probabilities.tolist() == pytest.approx([0.9, 0.1])
    module = Scripted()
    numbers = data.map(lambda row: {"number": float(row["label"])}).select_columns("number")

    def collate(rows):
        return torch.tensor([row["number"] for row in rows])

    def sampler(dataset):
        return TemperatureSampler(dataset["number"], math.inf, 200)

    make_trainer({"batch_size": 200}, sampler=sampler, collate_fn=collate).fit(module, numbers)
    assert sum(module.seen[0]) == pytest.approx(100, abs=30)


def test_the_order_follows_from_seed_and_epoch_alone():
    def draw(seed, epoch):
        torch.rand(seed + epoch + 1)  # where the generator stands is no matter
        return Order(1000, seed, sampler=TemperatureSampler(LABELS, 3)).at(epoch).tolist()

    assert draw(1, 0) == draw(1, 0)
    assert draw(1, 0) != draw(1, 1)
    assert draw(1, 0) != draw(2, 0)
    assert draw(1, 0) == [*iter_under_the_seed(1)]


def iter_under_the_seed(seed: int) -> list[int]:
    """Return what torch's own iteration of the sampler gives under the seed of an epoch."""
    from accmt.data.seeding import derive_seed

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "order", 0))
        return list(TemperatureSampler(LABELS, 3))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_processes_has_the_same_global_order(count):
    labels = [index % 5 == 0 for index in range(23)]
    expected = Order(23, 4, sampler=TemperatureSampler(labels, 5)).at(1).tolist()
    options = [
        SourceOptions(
            purpose="train", batch_size=2, shard=Shard(i, count), seed=4, sampler=TemperatureSampler(labels, 5)
        )
        for i in range(count)
    ]
    micro_batches = zip(*(build_source(Numbers(23), one).micro_batches(1) for one in options), strict=True)
    read = [
        value for parts in micro_batches for part in parts if part.batch is not None for value in part.batch.tolist()
    ]
    assert read == expected


def test_a_run_continues_within_an_epoch_bit_for_bit(tmp_path):
    def run(path, **settings):
        labels = [index < 3 for index in range(22)]
        return train(str(tmp_path / path), data=Augmented(), sampler=TemperatureSampler(labels, 4.0), **settings)

    unbroken = state_of(*run("unbroken/model"))
    run("broken/model", stop=9)
    continued = state_of(*run("broken/model", resume=True))
    assert_same(unbroken, continued)


@each("temperature", [0, -1.0, math.nan, "2", None, True])
def test_a_temperature_that_is_not_above_0_is_rejected(temperature):
    with raises_at(ArgumentError, "TemperatureSampler(temperature=...)"):
        TemperatureSampler(LABELS, temperature)


@each("num_samples", [0, -1, 2.0, True])
def test_a_number_of_samples_that_cannot_be_is_rejected(num_samples):
    with raises_at(ArgumentError, "TemperatureSampler(num_samples=...)"):
        TemperatureSampler(LABELS, 1, num_samples)


@pytest.mark.parametrize("labels", [[], torch.tensor([]), iter(())])
def test_no_labels_are_rejected(labels):
    with raises_at(DataError, "TemperatureSampler(labels=...)", "no labels"):
        TemperatureSampler(labels, 1)


@each("labels", [[[0, 1], [1, 0]], torch.eye(2), [(0, 1)], [0, [1]]])
def test_several_labels_of_a_sample_are_rejected(labels):
    with raises_at(DataError, "TemperatureSampler(labels=...)", "a label of type "):
        TemperatureSampler(labels, 1)


@pytest.mark.parametrize("length", [7, 9])
def test_labels_of_other_data_are_rejected_before_the_first_batch(length):
    sampler, module = TemperatureSampler([0, 1] * 4), Scripted()
    with raises_at(DataError, "TemperatureSampler", "8 labels", expected=f"{length} labels"):
        make_trainer(sampler=sampler).fit(module, Numbers(length))
    with raises_at(DataError, "TemperatureSampler", "8 labels", expected=f"{length} labels"):
        make_trainer().fit(module, DataLoader(Numbers(length), sampler=sampler))
    assert module.seen == []
