from collections import UserDict, namedtuple

import numpy as np
import pytest
import torch

from accmt.data import Round, find_batch_size

Pair = namedtuple("Pair", ["inputs", "labels"])

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
}


@pytest.mark.feature("T22")
@pytest.mark.parametrize("form", FORMS)
def test_the_number_of_samples_is_found_in_each_form_of_batch(form):
    batch, size = FORMS[form]
    assert find_batch_size(batch) == size


@pytest.mark.feature("T22")
@pytest.mark.parametrize("batch", [torch.tensor(1.0), 3, "text", b"bytes", None, {}, [], {"x": 3}, object()])
def test_a_batch_that_does_not_tell_its_samples_gives_none(batch):
    assert find_batch_size(batch) is None


def test_a_round_knows_nothing_that_it_was_not_told():
    round_ = Round(3, "batch")
    assert (round_.num_samples, round_.own_samples, round_.is_last, round_.is_partial) == (None, None, False, False)
