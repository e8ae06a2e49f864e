import re
from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from accmt.data import MicroBatch, find_batch_size
from accmt.errors import DataError
from accmt.messages import speaking
from tests.tables import each

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
@each("form", FORMS)
def test_the_number_of_samples_is_found_in_each_form_of_batch(form):
    batch, size = FORMS[form]
    assert find_batch_size(batch) == size


@pytest.mark.feature("T22")
@each("batch", [torch.tensor(1.0), 3, "text", b"bytes", None, {}, [], {"x": 3}, object()])
def test_a_batch_that_does_not_tell_its_samples_gives_none(batch):
    assert find_batch_size(batch) is None


def test_a_round_knows_nothing_that_it_was_not_told():
    micro_batch = MicroBatch(3, "batch")
    assert (micro_batch.num_samples, micro_batch.own_samples, micro_batch.is_last, micro_batch.is_partial) == (
        None,
        None,
        False,
        False,
    )


class Graphs:
    """A batch of a class of its own, as graph libraries have."""

    def __init__(self, **parts):
        self.__dict__.update(parts)


@dataclass
class Fields:
    inputs: torch.Tensor
    labels: torch.Tensor


def images(*channels):
    return [torch.zeros(count, 5, 5) for count in channels]


boxes = [{"boxes": torch.zeros(2, 4)}, {"boxes": torch.zeros(1, 4)}, {"boxes": torch.zeros(5, 4)}]
COLLATED = {
    "as many as were read": ((torch.zeros(4, 9), torch.zeros(4)), 4, 4),
    "time first, and the samples where they should be in the targets": ((torch.zeros(9, 4), torch.zeros(4)), 4, 4),
    "nodes of graphs, edges, and one target for each graph": (
        {"x": torch.zeros(30, 8), "edges": torch.zeros(2, 70), "y": torch.zeros(4)},
        4,
        4,
    ),
    "images and boxes in lists, as detection has them": ((tuple(images(3, 3, 3)), tuple(boxes)), 3, 3),
    "a list of samples": ([{"x": torch.zeros(2)}, {"x": torch.zeros(7)}, {"x": torch.zeros(2)}], 3, 3),
    "weights of classes beside samples": ((torch.zeros(4, 2), torch.zeros(10)), 4, 4),
    "one sample left out": ((torch.zeros(3, 9), torch.zeros(3)), 4, 3),
    "of two samples one left out, which no pair hides": ((torch.zeros(1, 9), torch.zeros(1)), 2, 1),
    "samples cut in two": ({"x": torch.zeros(8, 9), "y": torch.zeros(8)}, 4, 8),
    "sequences of unequal length in a list": ([torch.zeros(5, 2), torch.zeros(7, 2), torch.zeros(7, 2)], 3, 3),
    "a list of texts of which some are left out": (["a", "b"], 3, 2),
    "a dict of texts": ({"text": ["a", "b", "c"], "of": ["x", "y"]}, 2, 2),
    "fields of a dataclass": (Fields(torch.zeros(3, 2), torch.zeros(3)), 4, 3),
    "nothing that shows": (object(), 4, 4),
    "attributes, one sample left out": (Graphs(x=torch.zeros(3, 9), y=torch.zeros(3), of=Graphs(y=3)), 4, 3),
    "attributes of graphs": (Graphs(x=torch.zeros(30, 8), edges=torch.zeros(2, 70), y=torch.zeros(4)), 4, 4),
    "attributes that are lists": (Graphs(text=["a", "b", "c"]), 4, 3),
    "an object in an object": (Graphs(inner=Graphs(x=torch.zeros(3, 9))), 4, 4),
    "an empty batch": (torch.zeros(0, 2), 4, 0),
}


@pytest.mark.feature("T22")
@each("form", COLLATED)
def test_what_a_batch_holds_counts_and_what_was_collated_says_where_to_look(form):
    batch, collated, size = COLLATED[form]
    assert find_batch_size(batch, collated) == size


@pytest.mark.feature("T22")
@each(
    ("batch", "collated"),
    [
        ((torch.zeros(9, 3), torch.zeros(3)), 4),
        ((torch.zeros(9, 4), torch.zeros(9, 4)), 4),
        ({"input_ids": torch.zeros(1, 30), "labels": torch.zeros(1, 30)}, 4),
        (images(3, 3, 3, 3), 4),
        ((torch.zeros(9, 4), torch.zeros(4)), None),
        ({"x": torch.zeros(30, 8), "edges": torch.zeros(2, 70)}, 4),
    ],
)
def test_a_batch_that_contradicts_what_was_collated_is_an_error_with_its_shapes(batch, collated):
    with pytest.raises(DataError, match=r"a batch of shapes \[\d+, (.|\n)*define get_batch_size\(self, batch\)"):
        find_batch_size(batch, collated)


@pytest.mark.feature("T22")
@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (
            {"x": torch.zeros(3, 9), "y": torch.zeros(3), "weights": torch.zeros(4)},
            "although the batch has tensors(.*) 3;",
        ),
        (object(), "cannot be read from a batch(.*)here 4\\);"),
        ({"inner": Graphs(x=torch.zeros(3, 9))}, "cannot be read from a batch(.*)here 4\\);"),
    ],
    ids=["another first dimension", "nothing to look into", "an object in a dict"],
)
def test_the_number_that_was_collated_is_not_taken_in_silence_where_the_batch_does_not_show_it(batch, what, caplog):
    with speaking(verbose=True):
        assert [find_batch_size(batch, 4) for _ in range(2)] == [4, 4]
    assert len(re.findall(f"{what} if the collate function drops or adds samples", caplog.text)) == 1


@pytest.mark.feature("T22")
@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(9, 4), torch.zeros(4)),
        (tuple(images(3, 3, 3, 3)), (*boxes, {"boxes": torch.zeros(4, 4)})),
        [torch.zeros(4, 2), torch.zeros(5, 2), torch.zeros(4, 2), torch.zeros(1, 2)],
        torch.zeros(4, 2),
    ],
    ids=["time first", "detection", "a list of samples", "a tensor"],
)
def test_nothing_is_said_where_the_batch_shows_the_number_that_was_collated(batch, caplog):
    with speaking(verbose=True):
        assert find_batch_size(batch, 4) == 4
    assert not caplog.text
