"""Numbers and names that the docs state are those of the code."""

from __future__ import annotations

from pathlib import Path

from accmt.libraries.versions import FLOORS
from tests.e2e.markdown import read_table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_page_of_versions_has_the_floors() -> None:
    text = (DOCS / "versions.md").read_text(encoding="utf-8")
    stated = {
        name: floor
        for row in read_table(text)
        for name, floor in zip(row[0].split(", "), row[1].split(", "), strict=True)
    }
    for name, floor in FLOORS.items():
        assert stated[name.replace("_", "-")] == floor
