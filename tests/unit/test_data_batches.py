"""The number of samples in a batch: known from reading them, and confirmed by the batch."""

from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import torch

from accmt.data import count_samples, first_dimension
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each

Pair = namedtuple("Pair", ["inputs", "labels"])


@dataclass
class Fields:
    inputs: torch.Tensor
    labels: torch.Tensor


FORMS = {
    "a tensor": (torch.zeros(4, 2), 4),
    "an array": (np.zeros((4, 2)), 4),
    "a pair of tensors": ((torch.zeros(4, 2), torch.zeros(4)), 4),
    "a list of tensors": ([torch.zeros(3, 2), torch.zeros(3)], 3),
    "a named tuple": (Pair(torch.zeros(5, 2), torch.zeros(5)), 5),
    "a pair of arrays": ((np.zeros((4, 2)), np.zeros(4)), 4),
    "a dict of tensors": ({"input_ids": torch.zeros(6, 7), "labels": torch.zeros(6)}, 6),
    "a dict whose first value is no tensor": ({"name": "x", "inputs": torch.zeros(6, 7)}, 6),
    "a dict of another class": (UserDict({"input_ids": torch.zeros(2, 7)}), 2),
    "nested": ({"inputs": [{"ids": torch.zeros(3, 2)}], "labels": torch.zeros(3)}, 3),
    "a scalar before the first tensor with samples": ((torch.tensor(0.5), torch.zeros(4, 2)), 4),
    "a list of texts": (["one", "two", "three"], 3),
    "a dict of lists of texts": ({"text": ["one", "two"]}, 2),
    "texts beside tensors": ((["one", "two"], torch.zeros(2)), 2),
    "an empty batch of tensors": (torch.zeros(0, 2), 0),
    "fields of a dataclass": (Fields(torch.zeros(3, 2), torch.zeros(3)), 3),
    "weights of classes after the samples": ((torch.zeros(4, 2), torch.zeros(10)), 4),
}


@each("form", FORMS)
def test_the_first_tensor_or_list_of_each_form_of_batch_has_its_samples(form):
    batch, size = FORMS[form]
    assert first_dimension(batch) == count_samples(batch, size) == count_samples(batch, None) == size


@each("batch", [torch.tensor(1.0), 3, "text", b"bytes", None, {}, [], {"x": 3}, object()])
def test_a_batch_without_tensors_and_lists_is_an_error(batch):
    assert first_dimension(batch) is None
    for collated in (4, None):
        with raises_at(DataError, "the number of samples in a batch", "without tensors or lists"):
            count_samples(batch, collated)


def images(*channels):
    return [torch.zeros(count, 5, 5) for count in channels]


@each(
    "batch",
    [
        (torch.zeros(3, 9), torch.zeros(3)),  # one sample was dropped
        ([torch.zeros(1, 9), torch.zeros(1)]),
        {"x": torch.zeros(8, 9), "y": torch.zeros(8)},  # samples were split
        (torch.zeros(9, 4), torch.zeros(4)),  # time first
        {"input_ids": torch.zeros(1, 30), "labels": torch.zeros(1, 30)},  # one packed row
        images(3, 3, 3, 3),
        ["a", "b", "c"],
    ],
)
def test_a_batch_that_contradicts_what_was_collated_is_an_error_that_names_the_method_to_define(batch):
    with raises_at(DataError, "the number of samples in a batch", ", in a batch of 4 ", do="get_batch_size"):
        count_samples(batch, 4)
