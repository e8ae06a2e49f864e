"""What is one set and what is several, and data that can be read only once."""

from __future__ import annotations

from collections import UserDict, namedtuple

import numpy as np
import torch
from torch.utils.data import Subset

from accmt.errors import DataError
from accmt.loaders import name_sets
from tests.raising import raises_at
from tests.tables import each
from tests.toys import Numbers, Scripted, make_trainer


class Plain:
    """A dataset without a base class."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> float:
        return float(index)


class Lengthless:
    """A loader without a length."""

    def __iter__(self):
        return iter(torch.tensor([0.0, 1.0, 2.0]))


class Graph:
    """A sample with a length, read by key."""

    def keys(self):
        return ["nodes"]

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: str) -> float:
        return 0.0


@each("sets", [[Plain(2), Plain(1)], (Plain(2), Subset(Numbers(4), [0, 1])), [Numbers(2), Plain(3)]])
def test_a_list_of_datasets_is_several_sets(sets):
    assert name_sets(sets) == {"0": sets[0], "1": sets[1]}
    module, validated = Scripted(), sum(len(one) for one in sets)
    make_trainer(num_sanity_val_steps=0).fit(module, Numbers(2), sets)
    assert sum(map(len, module.validated)) == validated


_Pair = namedtuple("_Pair", "x y")


@each(
    "samples",
    [
        [1.0, 2.0],
        ["a", b"b"],
        [torch.ones(2)],
        [np.ones(2), torch.ones(2)],
        [{"x": 1}, UserDict(x=1)],
        [_Pair(1, 2)],
        [[1, 2], (1, 2)],
        [range(2)],
        [Graph()],
        [],
    ],
)
def test_a_list_of_samples_is_one_set(samples):
    assert name_sets(samples) == {"": samples}


@each("mixed", [[Plain(2), [1.0, 2.0]], [Numbers(2), torch.ones(2)]])
def test_a_list_of_both_is_rejected(mixed):
    with raises_at(DataError, "the sets to evaluate", "a list of ", do='{"first": '):
        make_trainer().fit(Scripted(), Numbers(2), mixed)


@each("data", [np.arange(3.0), torch.arange(3.0), Plain(3), Lengthless(), [0.0, 1.0, 2.0]])
def test_data_of_any_kind_are_validated_tested_and_predicted(data):
    class Predicting(Scripted):
        test_step = Scripted.validation_step

        def predict_step(self, batch):
            return batch

    module = Predicting()
    trainer = make_trainer({"batch_size": [1, 3, 3]})
    trainer.fit(module, Numbers(2), data)
    assert trainer.state.metrics["val_loss"] == 1.0
    assert trainer.test(module, data)["test_loss"] == 1.0
    assert [float(one) for one in trainer.predict(module, data)] == [0.0, 1.0, 2.0]


@each("sets", [iter([0.0, 1.0]), {"first": [0.0], "second": (number for number in (0.0, 1.0))}])
def test_validation_data_that_can_be_read_only_once_are_rejected_before_training(sets):
    module = Scripted()
    with raises_at(DataError, "the validation data", "an iterator"):
        make_trainer().fit(module, Numbers(2), sets)
    assert not module.seen
    assert not module.validated


def test_an_evaluation_of_its_own_reads_an_iterator():
    trainer = make_trainer()
    assert trainer.validate(Scripted(), iter([0.0, 1.0, 2.0]))["val_loss"] == 1.0
