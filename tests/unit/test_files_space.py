"""Room on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from accmt.files import format_bytes, free_space


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 KB"), (1234567, "1.23 MB"), (7 * 10**9, "7 GB"), (5 * 10**15, "5e+03 TB")],
)
def test_sizes_are_written_as_people_read_them(number, text):
    assert format_bytes(number) == text


def test_a_folder_that_is_not_there_yet_has_the_room_of_its_disk(monkeypatch, tmp_path):
    asked = []
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage._replace(free=5))
    assert free_space(tmp_path / "not" / "there") == 5
    assert free_space(Path("neither")) == 5
    assert asked == [tmp_path, Path.cwd()]
