"""The pages of recipes: their pictures are drawn by the commands beside them, and scripts print what they show."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.e2e.markdown import ROOT, read_blocks

JOBS = sorted((ROOT / "docs" / "recipes").glob("*.md"))
PAGES = [ROOT / "docs" / "recipes.md", *JOBS]
SVG = "{http://www.w3.org/2000/svg}"
MOST_BYTES = 12_000


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "draw_curves.py"))


def read_commands() -> dict[str, list[str]]:
    """Return the values that are drawn, by picture."""
    blocks = [block for page in PAGES for block in read_blocks(page, "bash")]
    texts = [block.text.replace("\\\n", "") for block in blocks if "draw_curves.py" in block.text]
    return {picture: names for _, _, _, picture, *names in map(shlex.split, texts)}


def texts_of(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]  # noqa: S314 - ours


def test_each_picture_has_its_command_and_shows_the_curves_that_it_names():
    commands = read_commands()
    shown = {
        (page.parent / link).resolve().relative_to(ROOT).as_posix()
        for page in PAGES
        for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    }
    assert (
        shown
        == commands.keys()
        == set(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs" / "images").glob("curve-*.svg"))
    )
    for picture, names in commands.items():
        svg = (ROOT / picture).read_text(encoding="utf-8")
        assert len(svg) < MOST_BYTES, picture
        labels = {text.split()[0] for text in texts_of(svg)}
        assert labels >= set(names), picture


def test_the_curves_of_a_history_are_averages_of_neighbours_and_end_with_the_last_value(script: dict[str, Any]):
    rows: list[dict[str, Any]] = [{"config": {}}, {"step": 3, "values": {"accuracy": 0.25}}]
    rows += [{"step": step, "values": {"loss": 1000.0 - step}} for step in range(1, 801)]
    svg = script["draw_run"](rows, ["loss", "accuracy"])
    assert {"loss 200", "accuracy 0.25"} <= set(texts_of(svg))
    lines = [element.get("points").split() for element in ElementTree.fromstring(svg).iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [40, 1]
    titles = [element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert titles[0] == "loss 989.5 at step 10"


@pytest.mark.parametrize("page", [page for page in JOBS if page.name != "index.md"], ids=lambda page: page.stem)
def test_a_recipe_shows_what_its_script_prints(page: Path):
    (script,) = set(re.findall(r"^python (examples/\w+\.py)", page.read_text(encoding="utf-8"), re.MULTILINE))
    source = (ROOT / script).read_text(encoding="utf-8")
    (printed,) = read_blocks(page, "text")
    labels = {re.split(r"  | [\d+-]|:", line)[0] for line in printed.text.splitlines() if not line.startswith(" ")}
    assert len(labels) > 1
    assert not [label for label in labels if label not in source]
