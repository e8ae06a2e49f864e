"""`tests/features.md` names exactly the capabilities that tests show."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| ([A-Z]\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)


@cache
def marked_features() -> dict[str, set[str]]:
    """Return the ids that tests carry, with the files they stand in."""
    features: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.feature"):
                for argument in node.args:
                    features.setdefault(ast.literal_eval(argument), set()).add(path.name)
    return features


def listed_features() -> list[tuple[str, str, str]]:
    """Return the rows of the page: id, what it is, where it lives."""
    return ROW.findall((ROOT / "tests" / "features.md").read_text(encoding="utf-8"))


def test_the_page_lists_what_tests_show_and_nothing_else():
    listed, marked = {row[0] for row in listed_features()}, marked_features()
    assert {id_: marked[id_] for id_ in marked.keys() - listed} == {}, "shown by a test, missing from the page"
    assert listed - marked.keys() == set(), "on the page, shown by no test"


def test_each_capability_is_listed_once():
    ids = [row[0] for row in listed_features()]
    assert [id_ for id_ in set(ids) if ids.count(id_) > 1] == []


def test_ids_are_well_formed():
    assert [id_ for id_ in marked_features() if not re.fullmatch(r"[A-Z]\d\d+", id_)] == []


def test_where_a_capability_lives_exists():
    places = [
        (row[0], place) for row in listed_features() for place in re.findall(r"`([\w./]+\.\w+|[\w./]+/)`", row[2])
    ]
    assert [(id_, place) for id_, place in places if not (ROOT / place).exists()] == []
