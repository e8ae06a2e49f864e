"""The size of the core is a budget: a figure may fall, never rise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"
sys.path.append(str(BENCHMARKS))
from measure_code import count_nodes, cycles_of_packages, find_cycles, nodes_of_core  # noqa: E402 - a script

BUDGET = {
    # Never raise a figure. Lower it as soon as the code is more than 1 % below it.
    "nodes of the core's syntax tree": 190_424,
    "functions in private_names.py": 40,
    "packages that import one another": 0,
    "lines of a first run": 4276,
    "files of a first run": 118,
    "lines of one later step": 398,
    "files of one later step": 25,
}


def functions_with_private_names() -> int:
    tree = ast.parse((ROOT / "accmt" / "libraries" / "private_names.py").read_text())
    return sum(isinstance(node, ast.FunctionDef) for node in tree.body)


def count_executed() -> dict[str, int]:
    """Return how many lines and files of accmt a first run and a later step execute, in a process without a past."""
    command = [sys.executable, str(BENCHMARKS / "count_executed.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    figures = re.findall(r"(a first run|one later step): ([\d,]+) lines in (\d+) files", printed)
    lines = {f"lines of {part}": int(count.replace(",", "")) for part, count, _ in figures}
    return lines | {f"files of {part}": int(count) for part, _, count in figures}


@pytest.fixture(scope="module")
def figures() -> dict[str, int]:
    return {
        "nodes of the core's syntax tree": nodes_of_core(),
        "functions in private_names.py": functions_with_private_names(),
        "packages that import one another": sum(map(len, cycles_of_packages())),
        **count_executed(),
    }


@pytest.mark.parametrize("name", BUDGET)
def test_the_core_does_not_grow(figures: dict[str, int], name: str) -> None:
    measured, budget = figures[name], BUDGET[name]
    assert measured <= budget, f"{name}: {measured:,}, and the budget is {budget:,}; make something else smaller"
    assert measured >= 0.99 * budget, f"{name}: only {measured:,} now; lower the budget of {budget:,} to this number"


def test_nodes_are_counted_without_docstrings() -> None:
    assert count_nodes(ast.parse("x = 1")) == count_nodes(ast.parse('"""A docstring."""\nx = 1')) == 5
    assert count_nodes(ast.parse("x = (\n    1\n)")) == 5


def test_cycles_of_packages_are_found() -> None:
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
