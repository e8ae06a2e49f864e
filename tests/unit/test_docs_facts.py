"""Numbers and names that the docs state are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from accmt import Handler
from accmt.cli.strats import STRATEGIES
from accmt.libraries.versions import FLOORS
from accmt.registry import find, is_built_in, names
from tests.e2e.markdown import read_section, read_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TRACKERS = [find("accmt.trackers", name) for name in names("accmt.trackers") if is_built_in("accmt.trackers", name)]


def names_of(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([\w-]+)`", cell)}


def test_the_page_of_trackers_has_every_tracker() -> None:
    classes = {tracker.__name__ for tracker in TRACKERS}
    text = (DOCS / "trackers.md").read_text(encoding="utf-8")
    assert names_of([row[0] for row in read_table(text)]) == classes


def test_the_command_line_lists_every_strategy() -> None:
    rows = read_table(read_section(DOCS / "command-line.md", "`accmt launch`"))
    assert names_of([row[0] for row in rows]) == set(STRATEGIES)


def test_the_page_of_versions_has_the_floors() -> None:
    text = (DOCS / "versions.md").read_text(encoding="utf-8")
    stated = {
        name: floor
        for row in read_table(text)
        for name, floor in zip(row[0].split(", "), row[1].split(", "), strict=True)
    }
    for name, floor in FLOORS.items():
        assert stated[name.replace("_", "-")] == floor


def test_the_page_of_failures_has_every_handler() -> None:
    rows = read_table(read_section(DOCS / "failures.md", "Handlers"))
    assert {row[0] for row in rows} == {f"`Handler.{handler.name}`" for handler in Handler}
