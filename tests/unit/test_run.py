"""A run is what the rooms around it work with: it imports none of them, except for type checkers."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from accmt import DataOptions
from accmt.run import EvaluationRun


@dataclass(frozen=True)
class _Pair:
    inputs: torch.Tensor
    others: dict[str, Any]


def test_a_dataclass_is_placed_field_by_field():
    class OnDevice(EvaluationRun):
        device = torch.device("meta")
        settings = SimpleNamespace(data=SimpleNamespace(data_options=DataOptions()))

    batch = _Pair(torch.ones(2), {"targets": [torch.ones(3)], "name": "x"})
    placed = object.__new__(OnDevice).place(batch)
    assert placed.inputs.is_meta
    assert placed.others["targets"][0].is_meta
    assert placed.others["name"] == "x"
    assert not batch.inputs.is_meta
