"""The examples in docstrings, which the reference shows, do what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "accmt").rglob("*.py"))
    if ">>> " in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name: str):
    found = doctest.testmod(import_module(name), extraglobs={"torch": torch, "nn": torch.nn})
    assert found.attempted, "no example was found"
    assert not found.failed, f"{found.failed} of {found.attempted} failed: python -m doctest {name}"
