"""The layers, and what keeps the code readable, read from the source itself."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "accmt"
FILES = sorted(PACKAGE.rglob("*.py"))

LAYERS = [
    {"registry", "secrets", "sharded_tensors", "version"},
    {"errors", "state"},
    {"installation", "libraries", "processes"},
    {"messages", "precisions"},
    {"files"},
    {"options"},
    {"data", "optimization", "checkpoint", "saving", "metrics", "tracking", "failures", "callbacks"},
    {"without_trace"},
    {"engine"},
    {"huggingface"},
    {"module"},
    {"glances"},
    {"attributes"},
    {"cadence"},
    {"loaders"},
    {"run"},
    {"features"},
    {"loop"},
    {"setup"},
    {"checks"},
    {"trainer"},
    {"addons"},
    {"compat", "utils"},
    {"cli"},
]
"""Each package imports only from layers above its own in this list."""

LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def for_type_checkers(tree: ast.AST) -> set[ast.AST]:
    """Return every node under `if TYPE_CHECKING`."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imported_modules(tree: ast.AST) -> list[str]:
    """Return the dotted names of all modules imported at run time, those inside functions too."""
    aside = for_type_checkers(tree)
    modules = []
    for node in ast.walk(tree):
        if node in aside:
            continue
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "accmt":
            modules += [f"accmt.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            modules.append(node.module or "")
    return modules


def imported_rooms(tree: ast.AST) -> set[str]:
    return {module.split(".")[1] for module in imported_modules(tree) if module.startswith("accmt.")}


def may_import(importer: str, imported: str) -> bool:
    return importer == imported or LEVEL[imported] < LEVEL[importer]


def upward_imports(path: Path) -> list[str]:
    room = room_of(path)
    if room == "__init__":  # its functions may load any name
        return sorted(imported_rooms(ast.Module(early_imports(parse(path)), [])) - {"installation", "version"})
    if room not in LEVEL:
        return [f"{room} is in no layer"]
    return sorted(other for other in imported_rooms(parse(path)) if not may_import(room, other))


def offenders(look: Callable[[Path], Any]) -> dict[str, Any]:
    """Return what a check found, by file."""
    return {name_of(path): found for path in FILES if (found := look(path))}


def test_rooms_import_only_downward_and_every_folder_is_a_package() -> None:
    assert offenders(upward_imports) == {}
    assert [path for path in {path.parent for path in FILES} if not (path / "__init__.py").is_file()] == []


def test_each_package_is_in_one_layer() -> None:
    assert sorted(LEVEL) == sorted({room_of(path) for path in FILES} - {"__init__"})
    assert sum(map(len, LAYERS)) == len(LEVEL)


OUTSIDE_THE_CORE = {"addons", "compat", "utils"}


def early_extras(path: Path) -> set[str]:
    extras = imported_rooms(ast.Module(early_imports(parse(path)), [])) & OUTSIDE_THE_CORE
    return set() if room_of(path) in OUTSIDE_THE_CORE else extras


def test_what_is_not_core_is_imported_only_where_it_is_asked_for() -> None:
    assert offenders(early_extras) == {}


MODULES = {path: ".".join(("accmt", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in FILES}
BY_NAME = {name.removesuffix(".__init__"): path for path, name in MODULES.items()}


def every_import(path: Path) -> set[str]:
    """Return the modules of accmt that one imports anywhere, in functions and for type checkers too.

    For type checkers alone, `run.py` also imports the classes of its parts, whose methods take a run.
    """
    own = MODULES[path].removesuffix(".__init__")
    found = set()
    aside = for_type_checkers(parse(path)) if own == "accmt.run.run" else set()
    for node in ast.walk(parse(path)):
        if node in aside:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {
                full if (full := f"{node.module}.{alias.name}") in BY_NAME else node.module for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in BY_NAME and name != own}


def find_circles(imports: dict[str, set[str]]) -> set[str]:
    """Return what is in a circle, or only leads from one to another."""
    remaining = {name: set(others) for name, others in imports.items()}
    while True:
        done = {name for name, others in remaining.items() if not others & remaining.keys()}
        done |= remaining.keys() - {other for others in remaining.values() for other in others}
        if not done:
            return set(remaining)
        remaining = {name: others for name, others in remaining.items() if name not in done}


def test_imports_make_no_circle() -> None:
    names = {name: every_import(path) for name, path in BY_NAME.items() if name != "accmt"}
    assert find_circles(names) == set()


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)


def functions_of(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]


HEAVY = {"transformers", "datasets", "mlflow", "tensorboard", "torchmetrics", "pydantic"}


def early_imports(tree: ast.Module) -> list[ast.stmt]:
    """Return the imports that happen when a file is imported."""
    aside = for_type_checkers(tree) | {inner for function in functions_of(tree) for inner in ast.walk(function)}
    return [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom) and n not in aside]


def heavy_imports(path: Path) -> set[str]:
    modules = imported_modules(ast.Module(early_imports(parse(path)), []))
    return {module.split(".")[0] for module in modules} & HEAVY


def test_heavy_libraries_are_imported_only_where_they_are_used() -> None:
    assert offenders(heavy_imports) == {}


def depth_of(node: ast.AST) -> int:
    """Count how many blocks lie in each other at most; an `elif` is no deeper than its `if`."""
    deepest = 0
    for name, value in ast.iter_fields(node):
        children = [child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)]
        for child in children:
            is_elif = isinstance(node, ast.If) and name == "orelse" and isinstance(child, ast.If) and len(children) == 1
            if isinstance(child, FUNCTIONS):
                continue
            deepest = max(deepest, depth_of(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def too_deep(path: Path) -> list[str]:
    return [
        f"{function.name}: {depth_of(function)} deep"
        for function in functions_of(parse(path))
        if depth_of(function) > 4
    ]


def test_no_function_is_nested_too_deep() -> None:
    assert offenders(too_deep) == {}


def forbidden_in(tree: ast.AST) -> list[str]:
    """Return what has no place in a library: it talks, ends or hides instead of raising."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append(f"{node.lineno}: assert")
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"{node.lineno}: bare except")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"print", "exit", "quit", "sys.exit", "os._exit"}:
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.excepthook":
            found.append(f"{node.lineno}: sys.excepthook")
    return found


def test_the_library_neither_prints_nor_exits_nor_asserts() -> None:
    assert offenders(lambda path: room_of(path) != "cli" and forbidden_in(parse(path))) == {}


OF_AN_ENGINE = {
    *("is_sharded", "is_wrapped", "is_in_parts", "reduces_by_hand", "must_keep_in_step", "keeps_in_step"),
    *("needs_all", "_needs_all", "notes_trained", "is_fsdp2", "is_container", "is_by_fsdp"),
    *("is_dtensor", "DTensor", "DistributedDataParallel"),
}
QUESTIONS_LEFT = {
    # What is tried before training, or saved when others are gone, is another thing where a process cannot act alone.
    "loop/preflight.py": 3,
    "run/shutdown.py": 1,
    "addons/packing_check.py": 3,
    "addons/same_bits/engine.py": 1,
    "addons/same_bits/sums.py": 3,
    "run/trained_parameters.py": 1,
    # Of single tensors, in layers below the engine.
    "sharded_tensors.py": 5,
    "checkpoint/contents.py": 2,
    "checkpoint/state_dicts.py": 4,
    "optimization/stepper.py": 1,
    "precisions.py": 1,
    "addons/standalone_evaluation.py": 1,
    "addons/replicas.py": 1,
    "addons/tensor_parallel.py": 2,  # an engine itself
    "addons/flight_recorder/checksums.py": 1,
    "addons/flight_recorder/examiner.py": 1,
    "addons/flight_recorder/recorder.py": 2,
    "saving/weights.py": 3,  # of huggingface_hub: whether weights are in several files
}


def questions_about_the_engine(tree: ast.AST) -> int:
    """Count the conditions that ask how processes share a model."""
    conditions = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.IfExp | ast.While)]
    names = [
        {getattr(inner, "id", None) or getattr(inner, "attr", None) for inner in ast.walk(condition)}
        for condition in conditions
    ]
    return sum(bool(found & OF_AN_ENGINE) for found in names)


def test_only_the_engine_asks_how_processes_share_a_model() -> None:
    found = offenders(lambda path: room_of(path) != "engine" and questions_about_the_engine(parse(path)))
    assert {name: count for name, count in found.items() if count > QUESTIONS_LEFT.get(name, 0)} == {}
