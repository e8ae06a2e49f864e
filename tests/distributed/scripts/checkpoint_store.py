"""Saves and finds checkpoints together, some of them with a failure on one process; writes what each process saw.

torchrun --nproc-per-node 2 checkpoint_store.py FOLDER RESULT.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accmt.checkpoint.store import CheckpointStore
from accmt.errors import CheckpointError
from accmt.processes import gather_objects, is_main_process, process_index
from tests.checkpoints import save_with
from tests.distributed.scripts.answers import write_and_leave


def write(files: Path) -> None:
    (files / f"weights-{process_index()}.bin").write_text(f"of process {process_index()}")
    (files / "parts").mkdir()
    (files / "parts" / f"{process_index()}").write_text("x")


def failing_on(rank: int) -> Callable[[Path], None]:
    def write_or_fail(files: Path) -> None:
        write(files)
        if process_index() == rank:
            raise OSError(28, "No space left on device")

    return write_or_fail


def write_the_same_name(files: Path) -> None:
    (files / "weights.bin").write_text(f"of process {process_index()}")


def error_of(action: Callable[[], Any]) -> str:
    try:
        return str(action())
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def names_in(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir())
    gather_objects(None)  # nobody goes on to change the folder while another still looks
    return names


def answer(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder, max_checkpoints=2)
    answers: dict[str, Any] = {"none": store.newest() is None}
    answers["saved"] = save_with(store, 1, write, {"of": process_index()}).name
    found = store.newest()
    answers["found"] = found and (found.step, found.info, sorted(found.manifest.files), found.manifest.processes)
    for rank in (0, 1):
        answers[f"failed on {rank}"] = error_of(lambda rank=rank: save_with(store, 2, failing_on(rank), {}))
    answers["same name"] = error_of(lambda: save_with(store, 2, write_the_same_name, {}))
    answers["unwritable info"] = error_of(lambda: save_with(store, 2, write, {"bad": {1}}))
    dist.barrier()
    answers["names after failures"] = names_in(folder)
    answers["saved again"] = save_with(store, 2, write, {}).name
    dist.barrier()
    if is_main_process():
        (folder / "step-00000002" / "weights-1.bin").write_text("damaged")
    answers["explicit"] = error_of(lambda: store.find(folder / "step-00000002"))
    found = store.newest()
    answers["fallback"] = found and found.step
    answers["previous"] = str(store.set_aside_previous())
    answers["nowhere"] = error_of(lambda: store.find(folder / "step-00000001"))
    return answers


def main() -> None:
    dist.init_process_group("gloo")
    write_and_leave(answer(Path(sys.argv[1])), sys.argv[2])


if __name__ == "__main__":
    main()
