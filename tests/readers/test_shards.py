"""Shards of MosaicML Streaming, LitData and WebDataset: the same rows on any launch, resumed bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import read_files
from accmt.errors import ArgumentError, DataError
from tests.files_of_rows import (
    _write_litdata,
    _write_mds,
    check_processes,
    check_resume,
    make_rows,
    read,
    stand_in_for_torchvision,
    train,
    write,
)

stand_in_for_torchvision()
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
KINDS = ("mds", "litdata", "tar")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return json.loads(row["json"]) if "json" in row else {**row, "id": int(row["id"])}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_was_written_in_any_order(kind: str):
    folder, rows = write(kind, Path.cwd()), make_rows()
    data = read_files(folder)
    assert [plain(row) for row in data] == rows
    order = data.shuffle_rows(torch.Generator().manual_seed(0)).tolist()
    assert sorted(order) == list(range(38))
    assert [plain(row) for row in pickle.loads(pickle.dumps(data)).__getitems__(order)] == [rows[at] for at in order]
    with pytest.raises(ArgumentError, match="columns="):
        read_files(folder, columns=["id"])
    if kind == "tar":
        assert data[3]["txt"] == b"row 3"
        assert data[3]["__key__"] == "0003"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumes_bit_for_bit(kind: str, workers: int):
    check_resume(kind, workers)


def test_two_processes_train_on_the_rows_of_one_and_resume_bit_for_bit(tmp_path: Path):
    check_processes(KINDS, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_epoch_names_a_shard_that_has_changed(kind: str):
    folder = write(kind, Path.cwd())
    train("run", read(folder), stop=3)
    path = sorted(path for path in folder.iterdir() if path.suffix != ".json")[1]
    content = path.read_bytes()
    path.write_bytes(content.replace(b"row 1", b"row X").replace(b"row 6", b"row X").replace(b"row 7", b"row X"))
    assert path.read_bytes() != content
    with pytest.raises(DataError, match=f"changed: {path.name}"):
        train("run", read(folder), resume=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_that_is_missing_or_torn_is_named(kind: str):
    folder = write(kind, Path.cwd())
    path = sorted(path for path in folder.iterdir() if path.suffix != ".json")[1]
    content = path.read_bytes()
    end = content.rstrip(bytes(1)) if kind == "tar" else content
    for torn in (end[: len(end) // 2], end[:-3], end[:700]):
        path.write_bytes(torn)
        with pytest.raises(DataError, match=rf"{path.name}\n  got: "):
            read_files(folder)
    path.unlink()
    if kind != "tar":
        with pytest.raises(
            DataError, match=rf"{path.name}\n  got: no such file\n  expected: the shard that index.json"
        ):
            read_files(folder)
        (folder / "index.json").write_text("{")
        with pytest.raises(DataError, match="expected: an index of shards"):
            read_files(folder)


def test_what_cannot_be_read_by_index_is_refused():
    _write_mds(Path("packed"), make_rows(), compression="zstd")
    _write_litdata(Path("squeezed"), make_rows())
    index = Path("squeezed/index.json")
    index.write_text(index.read_text().replace('"compression": null', '"compression": "zstd"'))
    for folder in ("packed", "squeezed"):
        with pytest.raises(DataError, match="shards with zstd\n  expected: shards whose samples can be read one by"):
            read_files(folder)
    from streaming import MDSWriter

    with MDSWriter(out="pickled", columns={"id": "pkl"}) as writer:
        writer.write({"id": 1})
    with pytest.raises(DataError, match="expected: columns that can be read safely"):
        read_files("pickled")
    folder = write("tar", Path.cwd())
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.put(str(folder), "/tars", recursive=True)
    with pytest.raises(DataError, match="a tar file in a bucket"):
        read_files("memory://tars/*.tar")
    fs.rm("/tars", recursive=True)


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_streams_whose_order_depends_on_the_launch_are_refused(kind: str):
    folder = str(write(kind, Path.cwd()))
    if kind == "mds":
        from streaming import StreamingDataset

        data = StreamingDataset(local=folder, batch_size=6)
    else:
        from litdata import StreamingDataset

        data = StreamingDataset(folder)
    for one in (data, torch.utils.data.DataLoader(data, batch_size=6)):
        with pytest.raises(DataError) as raised:
            train("run", one)
        assert f"accmt.read_files({folder!r})" in str(raised.value)
