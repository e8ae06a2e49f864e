"""Measures the source: lines and files by room, large files and functions, circles of imports.

    python tests/benchmarks/measure_code.py

Imports for type checkers count too, for a reader follows them.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
LARGE_FILE, LONG_FUNCTION = 500, 40


def read_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its dotted name."""
    files = sorted((ROOT / "accmt").rglob("*.py"))
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    return {names[file]: ast.parse(file.read_text()) for file in files}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "accmt"


def lines_of(module: str) -> list[str]:
    file = ROOT / (module.replace(".", "/") + ".py")
    return (file if file.exists() else file.with_suffix("") / "__init__.py").read_text().splitlines()


def count_code(module: str, tree: ast.Module) -> int:
    """Count the lines that are neither blank, nor comment, nor docstring."""
    documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    docs = {line for node in documented for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)}
    lines = enumerate(lines_of(module), 1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and number not in docs for number, line in lines)


def imports_of(tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """Return the modules of accmt that a module imports, anywhere and for whatever reason."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {(node.module or "", alias.name) for node in nodes for alias in node.names}
    return {f"{module}.{name}" if f"{module}.{name}" in modules else module for module, name in names} & set(modules)


def find_circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import one another, largest first."""
    imports, circles = {module: set(others) for module, others in imports.items()}, {}
    while True:
        try:
            tuple(TopologicalSorter(imports).static_order())
        except CycleError as error:  # which names one way round; it becomes a single node, and we look again
            group = set(error.args[1])
            node = f"circle {len(circles)} of {min(group)}"
            circles[node] = set().union(*(circles.pop(member, {member}) for member in group))
            imports = {name: {node if other in group else other for other in imports[name]} for name in imports}
            imports[node] = set().union(*(imports.pop(member) for member in group)) - {node}
        else:
            return sorted(circles.values(), key=len, reverse=True)


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def main() -> None:
    """Print the figures."""
    modules = read_modules()
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for module, tree in modules.items():
        rooms[room_of(module)].update(files=1, lines=len(lines_of(module)), code=count_code(module, tree))
    total = sum(rooms.values(), Counter())
    print("| room | files | lines | code |\n|---|---|---|---|")
    for room, counts in sorted(rooms.items(), key=lambda item: -item[1]["lines"]):
        print(f"| {room} | {counts['files']} | {counts['lines']:,} | {counts['code']:,} |")
    print(f"| all | {total['files']} | {total['lines']:,} | {total['code']:,} |\n")
    largest = max(modules, key=lambda module: len(lines_of(module)))
    functions = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    names = Counter(file.name for file in (ROOT / "accmt").rglob("*.py") if file.stem != "__init__")
    circles = find_circles({module: imports_of(tree, modules) - {module} for module, tree in modules.items()})
    print(f"largest file: {largest}, {len(lines_of(largest))} lines")
    print(f"files over {LARGE_FILE} lines: {sum(len(lines_of(module)) > LARGE_FILE for module in modules)}")
    print(f"functions over {LONG_FUNCTION} lines: {sum(body_lines(node) > LONG_FUNCTION for node in functions)}")
    print(f"files that share their name: {sum(count for count in names.values() if count > 1)}")
    print(f"circles of imports: {[len(circle) for circle in circles]}")


if __name__ == "__main__":
    main()
