import os
from pathlib import Path

import pytest

from accmt.errors import SavingError
from accmt.files import follow_umask, replace_file, require_writable_folder, write_text
from tests.raising import raises_at


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_replace_file_keeps_old_content_and_leaves_nothing_behind_when_writing_fails(tmp_path):
    path = tmp_path / "weights.bin"
    path.write_bytes(b"old")

    def write_half(temporary: Path) -> None:
        temporary.write_bytes(b"ne")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, write_half)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["weights.bin"]


def test_content_is_durable_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        calls.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def record_replace(old, new):
        calls.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_text(tmp_path / "status.json", "{}")
    assert calls == [f".tmp-status.json-{os.getpid()}", "rename", tmp_path.name]


def test_a_file_gets_the_permissions_of_a_new_one(tmp_path):
    path = tmp_path / "weights"
    before = os.umask(0o027)
    try:
        path.touch(mode=0o600)
        follow_umask(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["weights"]


@pytest.mark.parametrize("below", ["", "model/best"])
def test_a_link_that_leads_nowhere_is_refused_before_anything_is_written(tmp_path, below):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with raises_at(SavingError, "Trainer(model_path=", f"{tmp_path / 'link'} is a link to {tmp_path / 'gone'}"):
        require_writable_folder(tmp_path / "link" / below, "model_path")
    (tmp_path / "gone").mkdir()
    require_writable_folder(tmp_path / "link" / below, "model_path")
