"""Predictions kept on the CPU, and put together in every form a step may return them in."""

from __future__ import annotations

import math
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from accmt.errors import MetricError
from accmt.metrics.gathering import CHUNK_BYTES, _cut, to_cpu
from accmt.metrics.metric import _join
from tests.raising import raises_at

OWN = SimpleNamespace(name="own", padding=-100)


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([{"start": torch.tensor([1]), "id": ["a"]}, {"start": torch.tensor([2]), "id": ["b"]}],
         {"start": [1, 2], "id": ["a", "b"]}),
        ([{"start": torch.tensor([1]), "end": [3]}, {"end": [4], "start": torch.tensor([2])}],
         {"start": [1, 2], "end": [3, 4]}),
        ([[{"boxes": [1]}], [{"boxes": [2]}, {"boxes": []}]], [{"boxes": [1]}, {"boxes": [2]}, {"boxes": []}]),
        ([{"deep": {"x": torch.tensor([1])}}, {"deep": {"x": torch.tensor([2])}}], {"deep": {"x": [1, 2]}}),
        ([torch.tensor([1]), [2]], [torch.tensor([1]), 2]),
        (["one", "two"], ["one", "two"]),
    ],
    ids=["dicts", "another order of keys", "lists of dicts", "nested dicts", "mixed", "strings"],
)  # fmt: skip
def test_parts_of_any_kind_are_put_together(parts, expected):
    assert plain(_join(OWN, parts)) == expected


def test_dicts_with_other_keys_are_rejected():
    with raises_at(MetricError, "metric 'own'"):
        _join(OWN, [{"a": [1]}, {"b": [1]}])


def test_tensors_are_copied_wherever_they_stand():
    large = torch.zeros(1000, 2)
    kept = to_cpu({"views": [large[:, 0]], "pair": (large[0], "text"), "frozen": MappingProxyType({"x": large[1]})})
    large.fill_(1)
    assert kept["views"][0].untyped_storage().nbytes() == 4000
    assert kept["views"][0].sum() == kept["pair"][0].sum() == kept["frozen"]["x"].sum() == 0
    assert kept["pair"][1] == "text"


def test_tensors_lose_their_graph_and_arrays_become_tensors():
    assert not to_cpu([torch.ones(1, requires_grad=True) * 2])[0].requires_grad
    assert torch.equal(to_cpu(np.array([1.5])), torch.tensor([1.5], dtype=torch.float64))
    assert to_cpu(np.array(["a", "b"])) == ["a", "b"]


def test_chunks_are_bounded_in_bytes_and_lose_nothing():
    items = [(index, torch.zeros(CHUNK_BYTES // 40), {"text": ["word"]}) for index in range(25)]
    chunks = list(_cut(items, CHUNK_BYTES))
    assert [len(chunk) for chunk in chunks] == [10, 10, 5]
    assert [item[0] for chunk in chunks for item in chunk] == list(range(25))
    assert list(_cut([], CHUNK_BYTES)) == []
    assert [len(chunk) for chunk in _cut(items, 1)] == [1] * 25
    assert [len(chunk) for chunk in _cut(items, math.inf)] == [25]
