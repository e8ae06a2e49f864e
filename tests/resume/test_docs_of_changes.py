"""The page about checkpoints shows the rules as they are."""

from __future__ import annotations

from pathlib import Path

from accmt.options.changes import rules_table


def test_the_table_of_changed_settings_is_the_table_of_rules():
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    assert rules_table().strip() in page.read_text(encoding="utf-8")
