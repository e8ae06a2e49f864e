"""The site of `make docs`: its reference names what is public, its navigation leads to every page."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import accmt
from accmt import compat
from tests.e2e.markdown import PAGES, read_blocks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "site_hooks.py"))


def shown_on(page: Path) -> list[str]:
    return re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)


def used_in_the_documents() -> set[str]:
    """Return what code on a page or in an example imports from the submodules of accmt."""
    texts = [block.text for page in PAGES for block in read_blocks(page, "python") if block.is_run]
    texts += [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")]
    imports = [
        found for text in texts for found in re.findall(r"^\s*from (accmt\.[\w.]+) import ([\w, ]+)$", text, re.M)
    ]
    return {f"{module}.{name.strip()}" for module, names in imports for name in names.split(",")}


def test_the_reference_shows_every_public_name_once():
    shown = [name for page in REFERENCE.glob("*.md") for name in shown_on(page)]
    assert [name for name, count in Counter(shown).items() if count > 1] == []
    public = {f"accmt.{name}" for name in accmt.__all__ if name != "__version__"}
    public |= {f"accmt.compat.{name}" for name in compat.__all__}
    again = {f"accmt.{name.rpartition('.')[2]}" for name in used_in_the_documents()} & public
    elsewhere = {name for name in used_in_the_documents() if f"accmt.{name.rpartition('.')[2]}" not in again}
    assert public - set(shown) == set()
    assert elsewhere - set(shown) == set()


def pages_of(entries: Any) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    return [page for entry in (entries if isinstance(entries, list) else entries.values()) for page in pages_of(entry)]


def test_the_navigation_leads_to_every_page_once(hooks: dict[str, Any]):
    sections = hooks["read_sections"](DOCS / "index.md")
    assert [next(iter(section)) for section in sections] == ["Start", "Guides", "Recipes", "Reference", "Project"]
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {"index.md"}
    assert sorted(pages_of(sections)) == sorted(pages)


def test_a_link_to_a_file_of_the_repository_becomes_a_page_with_its_code(hooks: dict[str, Any], tmp_path: Path):
    linked = hooks["links_outside"](DOCS / "machines.md")
    assert ROOT / "examples" / "slurm" / "train.py" in linked
    assert hooks["page_of_source"](ROOT / "examples" / "digits.py") == "source/examples/digits.py.md"
    assert "``````python\n" in hooks["show_source"](ROOT / "examples" / "digits.py")


@pytest.mark.parametrize(
    ("html", "is_found"),
    [
        ('<script src="https://cdn.example/a.js">', True),
        ('<link rel="stylesheet" href="https://fonts.example/css">', True),
        ('<img alt="a" src="http://host.example/a.png">', True),
        ('<script src="assets/a.js"></script><a href="https://host.example/">', False),
    ],
)
def test_what_a_page_would_fetch_from_elsewhere_is_found(hooks: dict[str, Any], html: str, is_found: bool):
    assert bool(hooks["_FETCHED"].search(html)) is is_found
