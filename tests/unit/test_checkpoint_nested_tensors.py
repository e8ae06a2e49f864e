"""Splitting a state into tensors and the rest, and joining them again."""

from __future__ import annotations

import torch
from torch import nn

from accmt.checkpoint.state_dicts import (
    decode,
    encode,
    join_tensors,
    referred_tensors,
    split_tensors,
)
from tests.tables import each


def same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


STATES = [
    {},
    [],
    {"empty": {"dict": {}, "list": [], "tuple": ()}, "none": None},
    torch.arange(3),
    {"step": torch.tensor(3.0), "count": torch.tensor(7, dtype=torch.int32), "flag": torch.tensor(True)},
    {"nothing": torch.zeros(0, 4)},
    {"list": [torch.ones(2), 1, (torch.zeros(1), None)]},
    {0: {"exp_avg": torch.ones(2)}, 1: {}},
    {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(2), "a.b~2": torch.zeros(3)},
    {"layers": [torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64)]},
]


@each("state", STATES)
def test_joining_is_the_inverse_of_splitting(state):
    tensors, rest = split_tensors(state)
    assert same(join_tensors(tensors, decode(encode(rest))), state)
    assert referred_tensors(rest) == tensors.keys()


def test_tied_weights_are_taken_once_and_tied_again():
    head, embedding = nn.Linear(3, 5, bias=False), nn.Embedding(5, 3)
    head.weight = embedding.weight
    state = {"embedding": embedding.state_dict(), "head": head.state_dict()}
    tensors, rest = split_tensors(state)
    assert list(tensors) == ["embedding.weight"]
    joined = join_tensors(tensors, rest)
    assert joined["embedding"]["weight"] is joined["head"]["weight"]


def test_views_of_one_memory_with_different_content_stay_apart():
    whole = torch.arange(8.0)
    square = whole[:4].view(2, 2)
    state = {"whole": whole, "head": whole[:4], "tail": whole[4:], "square": square, "turned": square.T}
    tensors, rest = split_tensors(state)
    assert len(tensors) == 5
    assert same(join_tensors(tensors, rest), state)
