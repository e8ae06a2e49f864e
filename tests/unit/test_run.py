"""A run is what the rooms around it work with: it imports none of them, types included."""

from __future__ import annotations

import ast
from pathlib import Path

import accmt.run


def test_run_imports_nothing_that_imports_it() -> None:
    package = Path(accmt.run.__file__).parent
    tree = ast.parse(Path(accmt.run.__file__).read_text(encoding="utf-8"))
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own = [module for module in modules if module.startswith("accmt.")]
    assert own
    for module in own:
        path = package.parent / Path(*module.split("."))
        source = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
        assert "from accmt.run import" not in source.read_text(encoding="utf-8"), module
