"""Rows of files: the same by index in each format, resumed bit for bit, and errors that name the file."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from accmt import Callback, StepsCurriculum, Trainer, read_files
from accmt.addons.readers import places
from accmt.data.samplers import Order
from accmt.errors import ArgumentError, DataError, StoreError
from tests.files_of_rows import FILES, HPS, Points, check_resume, make_rows, read, to_sample, train, write
from tests.raising import raises_at
from tests.toys import make_trainer

KINDS = ("parquet", "jsonl", "file", "stream", "feather")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in row.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_was_written_in_any_order(kind: str):
    folder, rows = write(kind, Path.cwd()), make_rows()
    data = read_files(folder)
    assert [plain(row) for row in data] == rows
    order = torch.randperm(len(rows)).tolist()
    assert [plain(row) for row in data.__getitems__(order)] == [rows[index] for index in order]
    assert plain(data[-1]) == rows[-1]
    with pytest.raises(IndexError):
        data[38]
    copy = pickle.loads(pickle.dumps(data))
    assert plain(copy[5]) == rows[5]


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in KINDS), ("parquet", 2), ("jsonl", 2), ("stream", 2)]
)
def test_a_run_resumes_bit_for_bit(kind: str, workers: int):
    check_resume(kind, workers)


def test_row_groups_are_shuffled_a_few_at_a_time_and_read_once():
    folder = write("parquet", Path.cwd(), make_rows(200))
    data = read(folder, cache=2000)
    pieces = np.diff(data._starts)
    assert 1 < data._together < len(pieces)
    order = data.shuffle_rows(torch.Generator().manual_seed(0))
    assert sorted(order.tolist()) == list(range(200))
    reads = []
    opened = data._open
    data._open = lambda number: reads.append(number) or opened(number)
    assert [sample[2] for sample in data.__getitems__(order.tolist()[:1])] == order.tolist()[:1]
    for index in order.tolist():
        data[index]
    assert len(reads) == len(pieces)
    assert read(folder, cache="1GB").shuffle_rows(torch.Generator().manual_seed(0)).tolist() == (
        torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    )


def test_paths_are_files_folders_globs_and_lists():
    folder, rows = write("jsonl", Path.cwd()), make_rows()
    (folder / "_SUCCESS").touch()
    (folder / ".hidden.jsonl").write_text("{}\n")
    (folder / "notes.txt").write_text("not data")
    for paths in ("jsonl", "jsonl/*.jsonl", folder, [folder / f"part-{number}.jsonl" for number in range(FILES)]):
        assert list(read_files(paths)) == rows
    assert list(read_files(["jsonl/part-1.jsonl", "jsonl/part-0.jsonl"])) == rows[13:26] + rows[:13]
    named = read_files("jsonl/part-*.jsonl").describe_files()
    assert list(named) == [f"part-{number}.jsonl" for number in range(FILES)]
    assert len(read_files(["jsonl/part-1.jsonl", "jsonl/part-1.jsonl"]).describe_files()) == 2


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "file", "feather"])
@pytest.mark.parametrize("bucket", ["memory://rows", "bucket://rows"])
def test_rows_are_read_from_a_bucket(kind: str, bucket: str):
    class Bucket(MemoryFileSystem):
        """Says what S3 says of a file."""

        protocol = "bucket"
        store: dict[str, Any] = {}

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return super()._strip_protocol(path.removeprefix("bucket://"))

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            found = super().info(path)
            return (
                {**found, "ETag": f"{hash(bytes(self.store[found['name']].getbuffer()))}"} if found["size"] else found
            )

    fsspec.register_implementation("bucket", Bucket, clobber=True)
    folder, rows = write(kind, Path.cwd()), make_rows()
    fs = fsspec.filesystem(bucket.partition(":")[0])
    fs.put(str(folder), "/rows/here", recursive=True)
    try:
        data = read_files(f"{bucket}/here/part-*")
        assert [plain(row) for row in data] == rows
        described = data.describe_files()
        assert sorted(described) == sorted(path.name for path in folder.iterdir())
        assert read_files(f"{bucket}/here").describe_files() == described
        path = next(folder.iterdir())
        content = fs.cat_file(f"/rows/here/{path.name}")
        fs.pipe_file(f"/rows/here/{path.name}", content[:40] + content[40:].swapcase())
        if kind == "jsonl":
            assert read_files(f"{bucket}/here").describe_files() != described
    finally:
        fs.rm("/rows", recursive=True)


def test_columns_are_chosen():
    folder = write("parquet", Path.cwd())
    assert list(read_files(folder, columns=["id"])[3]) == ["id"]
    assert list(read_files(write("file", Path.cwd()), columns=["text", "id"])[3]) == ["text", "id"]
    with raises_at(DataError, "columns of parquet/part-0.parquet", "'txt'", do="'text'"):
        read_files(folder, columns=["txt"])
    with raises_at(ArgumentError, "read_files"):
        read_files(write("jsonl", Path.cwd()), columns=["id"])


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"row 0", b"row X"))


def remove(path: Path) -> None:
    path.unlink()


def add(path: Path) -> None:
    path.with_name(f"new{path.suffix}").write_bytes(path.read_bytes())


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "file"])
@pytest.mark.parametrize(
    ("spoil", "files"), [(change, "changed: part-0."), (remove, "missing: part-0."), (add, "new: new.")]
)
def test_a_resumed_epoch_names_files_that_are_not_as_before(kind: str, spoil: Any, files: str):
    folder = write(kind, Path.cwd())
    train("run", read(folder), stop=3)
    spoil(next(path for path in folder.iterdir() if path.stem == "part-0"))
    with raises_at(DataError, "a resumed epoch", files):
        train("run", read(folder), resume=True)


def test_files_may_change_between_epochs(caplog: pytest.LogCaptureFixture):
    folder = write("jsonl", Path.cwd())
    train("run", read(folder), stop=7, checkpoint_every="epoch")
    change(folder / "part-0.jsonl")
    with caplog.at_level("INFO", "accmt"):
        train("run", read(folder), resume=True, verbose=True)
    assert "the files of the training data changed since the interruption: changed: part-0.jsonl" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_torn_file_is_named_before_training(kind: str):
    path = sorted(write(kind, Path.cwd()).iterdir())[1]
    content = path.read_bytes()
    for torn in (content[: len(content) // 2], content[:-3], content[:5]):
        path.write_bytes(torn)
        with raises_at(DataError, path.name):
            read_files(path.parent)


def test_a_row_group_that_cannot_be_read_names_its_file():
    path = sorted(write("parquet", Path.cwd(), files=1).iterdir())[0]
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)
    path.write_bytes(content)
    data = read_files(path)
    with raises_at(DataError, "part-0.parquet", "row group 0"):
        data[0]


def test_a_wrong_line_names_its_row():
    Path("rows.jsonl").write_text('{"id": 0}\n\n{"id": \n  \n{"id": 2}')
    data = read_files("rows.jsonl")
    assert [data[0], data[2]] == [{"id": 0}, {"id": 2}]
    with raises_at(DataError, "rows.jsonl", "row 1 of rows.jsonl"):
        data[1]


def test_a_file_that_changes_while_it_is_used_is_an_error():
    folder = write("parquet", Path.cwd())
    data = read_files(folder)
    os.utime(folder / "part-1.parquet", (0, 0))
    with raises_at(StoreError, "part-1.parquet"):
        data[20]
    (folder / "part-2.parquet").unlink()
    with raises_at(StoreError, "part-2.parquet"):
        data[37]


class Denying(MemoryFileSystem):
    """Denies all reads once told to."""

    protocol = "denying"
    store: dict[str, Any] = {}
    denies = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("denying://"))

    def cat_file(self, path: str, *place: Any, **options: Any) -> Any:
        self._answer(path)
        return super().cat_file(path, *place, **options)

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._answer(path)
        opened = super().open(path, mode, **options)
        return DeniedFile(opened.getvalue()) if mode == "rb" else opened

    def _answer(self, path: str) -> None:
        if self.denies:
            raise PermissionError(path)


class DeniedFile(io.BytesIO):
    """An open file whose reads are denied, too."""

    def readinto(self, buffer: Any) -> int:
        if Denying.denies:
            raise PermissionError("denied")
        return super().readinto(buffer)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "overwritten"])
def test_what_a_store_answers_is_no_bad_sample(kind: str, monkeypatch: pytest.MonkeyPatch):
    fsspec.register_implementation("denying", Denying, clobber=True)
    folder = write("jsonl" if kind == "overwritten" else kind, Path.cwd(), files=1)
    (path,) = folder.iterdir()
    fsspec.filesystem("denying").put(str(path), f"/rows/{path.name}")

    class Break(Callback):
        def on_update_end(self) -> None:
            if kind == "overwritten":
                path.write_bytes(path.read_bytes().swapcase())
            else:
                monkeypatch.setattr(Denying, "denies", True)

    data = read_files(path if kind == "overwritten" else f"denying://rows/{path.name}", cache=1, transform=to_sample)
    failures = {"on_bad_sample": "skip"}
    trainer = make_trainer(HPS, callbacks=Break(), checkpoint_every="epoch", handlers="all", failures=failures)
    with raises_at(StoreError, path.name):
        trainer.fit(Points(), data)
    assert (trainer.state.global_step, trainer.state.bad_samples) == (1, 0)
    assert len(list(Path("out").glob("checkpoint-*/step-*"))) == 1


def test_what_cannot_be_read_says_what_to_use():
    Path("empty").mkdir()
    Path("rows.csv").write_text("id\n1\n")
    Path("none.jsonl").write_text("\n")
    write("parquet", Path.cwd())
    write("parquet", Path("other"), [{"id": 1.5}], files=1)
    for paths, message in (
        ("empty", "a folder without such files\n  expected: files that end with .parquet, .arrow"),
        ("rows.csv", "got: rows.csv\n  expected: a file that ends with"),
        ("none.jsonl", "none.jsonl, which has no rows"),
        (["parquet", "other/parquet"], "got: id: double\n  expected: id: int64, point: list<element: double>"),
    ):
        with pytest.raises(DataError) as raised:
            read_files(paths)
        assert message in str(raised.value)
    for paths in ("none.parquet", "none/*.parquet"):
        with raises_at(FileNotFoundError, "read_files", paths, str(Path.cwd())):
            read_files(paths)
    with raises_at(ArgumentError, "read_files(cache=...)"):
        read_files("parquet", cache="much")


def test_lines_of_a_large_file_are_found_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    rows = [{"id": number} for number in range(1000)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.setattr(places, "_KEPT_FROM", 1)
    with monkeypatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        first = read_files(path)
        (index,) = (tmp_path / "cache" / "accmt" / "rows").iterdir()
        written = index.stat()
        assert list(read_files(path)) == list(first) == rows
        assert index.stat().st_mtime_ns == written.st_mtime_ns
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows[:900]))
        assert list(read_files(path)) == rows[:900]
        assert [one.name for one in index.parent.iterdir()] != [index.name]
        patched.setenv("XDG_CACHE_HOME", "/dev/null")  # nothing can be kept there
        assert list(read_files(path)) == rows[:900]


def test_a_mixture_has_the_order_of_its_files():
    sources = {"lines": read(write("jsonl", Path("a"))), "groups": read(write("parquet", Path("b")))}
    hps = {**HPS, "data": {"mix": {"lines": 0.5, "groups": 0.5}}}
    module = Points()
    trainer = Trainer(hps, "mixed", seed=3, verbose=False, checkpoint_every="2 steps")
    trainer.fit(module, sources)
    curriculum = StepsCurriculum([(2, sources["lines"]), (-1, sources["groups"])])
    assert list(curriculum.describe_files())[-1] == "stage 2: part-2.parquet"
    for order in (
        curriculum.order(9, samples_per_step=6, seed=1, shuffle=True).draw()[12:][:38] - 38,
        Order(38, 1, shuffle=True, permute=sources["groups"].shuffle_rows).at(0),
    ):  # two row groups are shuffled together
        assert sorted(order.tolist()) == list(range(38))
        assert (
            len({int(piece) for piece in np.searchsorted(sources["groups"]._starts, order[:5].numpy(), side="right")})
            <= 2
        )
    groups = sources["groups"].shuffle_rows
    assert sorted(groups(torch.Generator()).tolist()) == list(range(38))
    assert "groups: part-0.parquet" in trainer.run.train_loader.source.position(0, 1)["files"]
    assert to_sample(make_rows()[0])[2] == 0
