"""Measures the source: files, lines and nodes by package, private functions used once, import cycles.

    python tests/benchmarks/measure_code.py

Imports for type checkers count too: a reader follows them.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
OUTSIDE_THE_CORE = ("addons", "cli")


def read_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by its dotted name."""
    files = sorted((ROOT / "accmt").rglob("*.py"))
    names = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files}
    return {names[file]: ast.parse(file.read_text()) for file in files}


def package_of(module: str) -> str:
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


def count_nodes(tree: ast.Module) -> int:
    """Count the nodes of the syntax tree without docstrings: neither dense nor airy lines change the number."""
    nodes = list(ast.walk(tree))
    strings = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    return len(nodes) - 2 * sum(isinstance(constant.value, str) for constant in strings)


def nodes_of_core() -> int:
    """Count the nodes of all packages but add-ons and the command line."""
    modules = read_modules().items()
    return sum(count_nodes(tree) for module, tree in modules if package_of(module) not in OUTSIDE_THE_CORE)


def cycles_of_packages() -> list[set[str]]:
    """Return the groups of packages that import one another."""
    modules = read_modules()
    imports: dict[str, set[str]] = defaultdict(set)
    for module, tree in modules.items():
        packages = set(map(package_of, imports_of(tree, modules)))
        imports[package_of(module)] |= packages - {package_of(module), "accmt"}
    del imports["accmt"]  # it only lists the public names
    return find_cycles(imports)


def imports_of(tree: ast.Module, modules: dict[str, ast.Module]) -> set[str]:
    """Return the modules of accmt that a module imports, anywhere and for whatever reason."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = {(node.module or "", alias.name) for node in nodes for alias in node.names}
    return {f"{module}.{name}" if f"{module}.{name}" in modules else module for module, name in names} & set(modules)


def find_cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that import one another, largest first."""
    imports, cycles = {module: set(others) for module, others in imports.items()}, {}
    while True:
        try:
            tuple(TopologicalSorter(imports).static_order())
        except CycleError as error:  # which names one way round; it becomes a single node, and we look again
            group = set(error.args[1])
            node = f"cycle {len(cycles)} of {min(group)}"
            cycles[node] = set().union(*(cycles.pop(member, {member}) for member in group))
            imports = {name: {node if other in group else other for other in imports[name]} for name in imports}
            imports[node] = set().union(*(imports.pop(member) for member in group)) - {node}
        else:
            return sorted(cycles.values(), key=len, reverse=True)


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def used_once(trees: Iterable[ast.Module]) -> tuple[int, int, int]:
    """Count the private functions that are used exactly once, those of them that are not called there, and all.

    What is not called is passed by name: an entry of a table, the target of a thread, a hook.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    uses = Counter(map(name_of, nodes))
    called = {name_of(node.func) for node in nodes if isinstance(node, ast.Call)}
    names = [node.name for node in nodes if isinstance(node, FUNCTIONS)]
    once = [name for name in names if name.startswith("_") and not name.startswith("__") and uses[name] == 1]
    return len(once), sum(name not in called for name in once), len(names)


def main() -> None:
    """Print the figures."""
    modules = read_modules()
    packages: dict[str, Counter[str]] = defaultdict(Counter)
    for module, tree in modules.items():
        packages[package_of(module)].update(
            files=1, lines=len(lines_of(module)), code=count_code(module, tree), nodes=count_nodes(tree)
        )
    total = sum(packages.values(), Counter())
    print("| package | files | lines | code | nodes |\n|---|---|---|---|---|")
    for package, counts in sorted(packages.items(), key=lambda item: -item[1]["lines"]):
        print(f"| {package} | {counts['files']} | {counts['lines']:,} | {counts['code']:,} | {counts['nodes']:,} |")
    print(f"| all | {total['files']} | {total['lines']:,} | {total['code']:,} | {total['nodes']:,} |\n")
    cycles = find_cycles({module: imports_of(tree, modules) - {module} for module, tree in modules.items()})
    once, passed, functions = used_once(modules.values())
    print(f"private functions used once: {once} of {functions} functions ({once / functions:.1%}), {passed} not called")
    print(f"import cycles: {[len(cycle) for cycle in cycles]} modules, {list(map(sorted, cycles_of_packages()))}")
    print(f"nodes of the core (without {' and '.join(OUTSIDE_THE_CORE)}): {nodes_of_core():,}")


if __name__ == "__main__":
    main()
