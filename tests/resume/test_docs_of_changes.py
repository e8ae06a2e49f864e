"""The page about checkpoints shows the rules as they are."""

from __future__ import annotations

from pathlib import Path

from accmt.options.changes import RULES


def rules_table() -> str:
    """Return the rules as a Markdown table for the documentation."""
    rules = {"apply": "applied", "reject": "rejected, unless `reset_optimizer_on_resume`"}
    rows = [f"| {_name_pattern(item.pattern)} | {rules.get(item.rule, item.rule)} | {item.why} |" for item in RULES]
    return "\n".join(["| key | effect of a change | explanation |", "|---|---|---|", *rows]) + "\n"


def _name_pattern(pattern: str) -> str:
    if pattern == "*":
        return "any other key"
    return f"other `{pattern}`" if pattern == "optim.*" else f"`{pattern}`"


def test_the_table_of_changed_settings_is_the_table_of_rules():
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    assert rules_table().strip() in page.read_text(encoding="utf-8")
