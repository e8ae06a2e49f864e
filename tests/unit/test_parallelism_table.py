"""The table of promises and engines in tests/parallelism.md: every cell has a test that is there, or a reason."""

from __future__ import annotations

import re
from pathlib import Path

from tests.distributed import test_sharded
from tests.distributed.scripts.sharded import CASES
from tests.tables import each

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT, ROOT / "tests" / "distributed"]
PAGE = (ROOT / "tests" / "parallelism.md").read_text()
SECTION = PAGE.split("\n## Guarantees and their tests\n")[1].split("\n## ")[0]
TABLE = SECTION.split("\n\n|")[1].split("\n\n")[0]
ROWS = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in TABLE.splitlines()[2:]]
ENGINES = {1: "1", 2: "(2|3|ddp-2)", 3: "fsdp-[234]", 4: "hsdp-4", 5: "tp-2", 6: "tpfsdp-4"}


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def files_of(names: list[str]) -> list[Path]:
    """Return the files of tests among names, each of which has to be there."""
    found = {name: [folder / name for folder in FOLDERS if (folder / name).is_file()] for name in names}
    missing = [name for name, paths in found.items() if name.endswith(".py") and not paths]
    assert not missing
    return [paths[0] for paths in found.values() if paths]


def has_launch(launch: str, text: str) -> bool:
    """Return whether a test names a launch among those that it is run with."""
    return bool(re.search(rf"(?<![\w-]){launch}(?![\w-])" if launch.isdigit() else f'"{launch}"', text))


def test_every_row_has_a_cell_for_every_engine() -> None:
    assert len(ROWS) > 20
    assert {len(row) for row in ROWS} == {8}


@each("row", ROWS)
def test_every_cell_names_a_launch_of_a_test_that_is_there_or_says_why_not(row: list[str]) -> None:
    names = names_in(row[-1])
    files = files_of(names)
    assert files
    text = "\n".join(path.read_text() for path in files)
    cases = [name for name in names if name in CASES]
    others = [name for name in names if not name.endswith(".py") and name not in CASES]
    assert all(f"def {name}(" in text for name in others)
    for column, engine in ENGINES.items():
        cell, launches = row[column], [name for name in names_in(row[column]) if not name.endswith(".py")]
        assert launches or cell.startswith("no: ") or files_of(names_in(cell))
        for launch in [] if cell.startswith("no: ") else launches:
            assert re.fullmatch(engine, launch)
            assert launch == "1" or has_launch(launch, text)
            if len(others) == 0 and launch in test_sharded.LAUNCHES:
                assert set(cases) - set(test_sharded.LEFT_OUT) <= set(test_sharded.LAUNCHES[launch])
