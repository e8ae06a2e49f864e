import shutil
from pathlib import Path

import pytest

from accmt.files import format_bytes, free_space, staging_folder
from tests.tables import each


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_a_killed_process_left_is_removed_first(tmp_path):
    leftover = tmp_path / ".tmp-weights" / "deep"
    leftover.mkdir(parents=True)
    (leftover / "half").write_text("half a file")
    with staging_folder(tmp_path, "weights") as staged:
        assert names_in(staged) == []


def test_staging_folder_is_removed_after_an_error(tmp_path):
    def fail_half_way():
        with staging_folder(tmp_path, "weights") as staged:
            (staged / "half").write_text("half a file")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_half_way()
    assert names_in(tmp_path) == []


@each(
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
