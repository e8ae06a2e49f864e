"""Docs, messages and examples use the field's words: terms of an earlier dialect do not come back."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = (
    "held against",
    "as read",
    "lends?",
    "anew",
    "for good",
    "of one's own",
    "goes by",
    "going on and on",
    "no sign of life",
    "does not keep the contract",
    "a module that steps by itself",
    "samples of like length",
    "is used up",
    "passed over",
    "put through",
    "accumulation round",
)
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")


def test_texts_for_users_have_no_words_of_the_dialect() -> None:
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
    paths += (ROOT / "accmt").rglob("*.py")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word[0]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (word := FORBIDDEN.search(line)) is not None
    ]
    assert found == []
