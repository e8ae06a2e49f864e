"""Saves and finds checkpoints in a folder that is on two disks; writes what each process saw.

torchrun --nproc-per-node 3 separate_disks.py FOLDER RESULT.json

Process 0 uses FOLDER/disk-0, and processes 1 and 2 use FOLDER/disk-1.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accmt.addons import several_disks
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import CheckpointError
from accmt.processes import is_main_process, manages_disk, process_index, separate_disks
from tests.checkpoints import save_with
from tests.distributed.scripts.answers import write_and_leave

MANAGERS = [0, 1, 1]
several_disks._CHUNK = 10


def write(files: Path) -> None:
    (files / f"others-{process_index()}.bin").write_text(f"of process {process_index()}, in several chunks")
    (files / f"weights-{process_index()}.safetensors").write_text(f"of process {process_index()}")


def write_or_fail(files: Path) -> None:
    write(files)
    if process_index() == 2:
        raise OSError(28, "No space left on device")


def names_in(folder: Path) -> list[str]:
    """Return what is in the folder, in three processes that wait for one another."""
    dist.barrier()
    found = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    dist.barrier()
    return found


def answer(folder: Path) -> dict[str, Any]:
    store = CheckpointStore(folder, max_checkpoints=2)
    answers: dict[str, Any] = {"none": store.newest() is None}
    store.claim()
    for step in (1, 2):
        save_with(store, step, write, {"step": step})
    answers["saved"] = names_in(folder)
    found = store.newest()
    answers["found"] = found and (str(found.folder.relative_to(folder)), found.info, names_in(found.folder))
    try:
        save_with(store, 3, write_or_fail, {})
    except CheckpointError as error:
        answers["failed"] = str(error).splitlines()[1]
    answers["names after a failure"] = names_in(folder)
    dist.barrier()
    if is_main_process():
        (folder / "step-00000002" / "others-1.bin").write_text("damaged")
        (folder / "step-00000002" / "weights-1.safetensors").write_text("damaged")
    answers["repaired"] = [one and one.step for one in [store.newest()]] + names_in(folder / "step-00000002")
    answers["content"] = (folder / "step-00000002" / "others-1.bin").read_text()
    save_with(store, 3, write, {})
    store.release()
    if is_main_process():  # which makes the checkpoint whole on its disk
        for index in (1, 2):
            (folder / "step-00000002" / f"weights-{index}.safetensors").write_text(f"of process {index}")
    dist.barrier()
    if manages_disk() and not is_main_process():
        shutil.rmtree(folder)
    dist.barrier()
    found = store.newest()
    answers["after a disk was lost"] = [found and found.step, *names_in(folder)]
    try:
        store.find(folder / "step-00000003")
    except CheckpointError as error:
        answers["explicit"] = type(error).__name__
    found = store.find(folder / "step-00000002")
    answers["explicit, whole"] = str(found.folder.relative_to(folder))
    answers["set aside"] = [str(store.set_aside_previous().relative_to(folder.parent)), *names_in(folder)]
    return answers


def main() -> None:
    dist.init_process_group("gloo")
    separate_disks(MANAGERS)
    folder = Path(sys.argv[1]) / f"disk-{MANAGERS[process_index()]}" / "ck"
    write_and_leave(answer(folder), sys.argv[2])


if __name__ == "__main__":
    main()
