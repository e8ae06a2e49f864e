"""A run is what the rooms around it work with: it imports none of them, except for type checkers."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import accmt.run
from accmt import DataOptions
from accmt.run import EvaluationRun


def test_run_imports_nothing_that_imports_it() -> None:
    package = Path(accmt.run.__file__).parent
    tree = ast.parse(Path(accmt.run.__file__).read_text(encoding="utf-8"))
    at_run_time = [node for node in tree.body if not isinstance(node, ast.If)]  # without `if TYPE_CHECKING`
    nodes = [node for statement in at_run_time for node in ast.walk(statement)]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    own = [module for module in modules if module.startswith("accmt.")]
    assert own
    for module in own:
        path = package.parent / Path(*module.split("."))
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        assert "from accmt.run import" not in source.read_text(encoding="utf-8"), module


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
