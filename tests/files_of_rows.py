"""Small data sets on disk, in each format that `read_files` reads, and runs on them."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tarfile
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from accmt import AcceleratorModule, Trainer, read_files
from tests.launching import SCRIPTS, launch
from tests.resume.unbroken import InterruptAt, InterruptionError
from tests.toys import Record

FILES = 3
GROUP = 4  # rows of a row group
HPS = {"epochs": 2, "batch_size": 6, "optim": {"type": "AdamW", "lr": 0.01}}


def make_rows(count: int = 38) -> list[dict[str, Any]]:
    points = torch.randn(count, 3, generator=torch.Generator().manual_seed(1)).tolist()
    return [{"id": number, "point": point, "text": f"row {number}"} for number, point in enumerate(points)]


def write(kind: str, folder: Path, rows: Sequence[dict[str, Any]] | None = None, files: int = FILES) -> Path:
    """Write rows to several files of a format, and return their folder."""
    rows = make_rows() if rows is None else rows
    folder = folder / kind
    if kind in _WHOLE:
        _WHOLE[kind](folder, rows)
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(rows) // files)
    for number in range(files):
        _write_file(kind, folder / f"part-{number}", rows[number * size : (number + 1) * size])
    return folder


def _write_mds(folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> None:
    stand_in_for_torchvision()
    from streaming import MDSWriter

    columns = {"id": "int", "point": "json", "text": "str"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=800, **settings) as writer:
        for row in rows:
            writer.write(row)


def _write_litdata(folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_size=5, **settings)
    for number, row in enumerate(rows):
        cache[number] = row
    cache.done()
    cache.merge()


_WHOLE = {"mds": _write_mds, "litdata": _write_litdata}


def stand_in_for_torchvision() -> None:
    """Let MosaicML Streaming import torchvision, of which no build loads beside a CPU build of torch."""
    with contextlib.suppress(ImportError, RuntimeError):
        import torchvision  # noqa: F401

        return
    for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
        outer, _, inner = name.rpartition(".")
        if outer:
            setattr(sys.modules[outer], inner, module)
    sys.modules["torchvision.datasets"].VisionDataset = object
    sys.modules["torchvision.transforms.functional"].to_tensor = None


def _write_file(kind: str, path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if kind == "jsonl":
        path.with_suffix(".jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return
    if kind == "tar":
        with tarfile.open(path.with_suffix(".tar"), "w") as tar:
            for row in rows:
                for suffix, content in ((".json", json.dumps(row)), (".txt", row["text"])):
                    member = tarfile.TarInfo(f"{row['id']:04}{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content.encode()))
        return
    import pyarrow as pa
    from pyarrow import feather, parquet

    table = pa.Table.from_pylist(list(rows))
    if kind == "parquet":
        parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=GROUP)
    elif kind == "feather":
        feather.write_feather(table, str(path.with_suffix(".feather")), compression="zstd", chunksize=GROUP)
    else:
        make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file, make(file, table.schema) as writer:
            writer.write_table(table, GROUP)


def to_sample(row: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    if "json" in row:  # of a tar file
        row = json.loads(row["json"])
    point = torch.tensor(row["point"], dtype=torch.float64)
    return point, point.sum().reshape(1), row["id"]


class Points(AcceleratorModule):
    """Fits the sum of a point.

    Attributes:
        seen: The rows of each batch.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1)).double()
        self.seen: list[list[int]] = Record()

    def training_step(self, batch: Any) -> torch.Tensor:
        points, sums, ids = batch
        self.seen.append(ids.tolist())
        return nn.functional.mse_loss(self.model(points), sums)


def read(path: Path | str, **settings: Any) -> Any:
    """Read rows as samples; memory for two row groups makes them be shuffled two at a time."""
    return read_files(path, **{"transform": to_sample, "cache": 1000, **settings})


def train(
    folder: Path | str, data: Any, *, stop: int | None = None, processes: int = 1, dropout: float = 0.2, **settings: Any
) -> Points:
    """Train to the end, or to an interruption."""
    hps = {**HPS, "batch_size": 6 // processes}
    callbacks = [] if stop is None else [InterruptAt(stop)]
    given = {"checkpoint_every": "2 steps", "seed": 3, "verbose": False, "log_every": 2, **settings}
    module = Points(dropout)
    with contextlib.suppress(InterruptionError):
        Trainer(hps, folder, callbacks=callbacks, **given).fit(module, data)
    return module


def weights_of(module: Points) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in module.model.parameters()]


def check_resume(kind: str, workers: int) -> None:
    """Check that an interrupted run on files is the uninterrupted one, and reads each row once per epoch."""
    folder = write(kind, Path.cwd())
    unbroken = train("unbroken", read(folder), dataloader_num_workers=workers)
    first = train("parts", read(folder), dataloader_num_workers=workers, stop=3)
    rest = train("parts", read(folder), dataloader_num_workers=workers, resume=True)
    assert weights_of(rest) == weights_of(unbroken)
    assert [sorted(sum(unbroken.seen[epoch * 7 :][:7], [])) for epoch in range(2)] == [list(range(38))] * 2
    assert first.seen[:2] + rest.seen == unbroken.seen


def check_processes(kinds: Sequence[str], folder: Path) -> None:
    """Check that two processes train on the rows of one, in the same steps, and resume bit for bit."""
    from tests.distributed.scripts import readers

    for kind in kinds:
        write(kind, folder)
    result = folder / "result.json"
    launch(SCRIPTS / "readers.py", str(result), str(folder), *kinds, processes=2, result=result)
    for kind, together in json.loads(result.read_text()).items():
        alone = readers.run(folder, kind, workers=0)
        assert together["parts"]["weights"] == together["whole"]["weights"]
        for ours, theirs in zip(together["whole"]["weights"], alone["whole"]["weights"], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9)
        seen = [sum(batches, []) for batches in zip(*together["whole"]["seen"], strict=True)]
        assert seen == alone["whole"]["seen"][0]
