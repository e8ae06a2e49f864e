"""Writes tensors to two disks, and reads them on each process; writes what was read and sent.

torchrun --nproc-per-node 3 spread_tensors.py FOLDER RESULT.json

Process 0 uses FOLDER/disk-0, and processes 1 and 2 use FOLDER/disk-1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from accmt.addons import several_disks
from accmt.addons.several_disks import SpreadReader
from accmt.checkpoint.contents import PiecePlanner, file_names, write_pieces
from accmt.errors import CheckpointError
from accmt.processes import process_index, separate_disks
from accmt.sharded_tensors import make_whole
from tests.distributed.scripts.answers import write_and_leave

MANAGERS = [0, 1, 1]
WHOLE = {
    "even": torch.arange(54.0).reshape(9, 6),
    "uneven": torch.arange(35, dtype=torch.bfloat16).reshape(7, 5),
    "mask": torch.arange(12).reshape(3, 4) % 3 == 0,
    "step": torch.tensor(7.0),
    "statistics": torch.linspace(0, 1, 4, dtype=torch.float64),
}
SHARDED = ("even", "uneven", "mask")


def lay_out(tensors: dict[str, torch.Tensor], placement: Placement) -> dict[str, torch.Tensor]:
    """Return the tensors with some of them on all processes together, as FSDP2 or tensor parallelism has them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(tensor, mesh, [placement]) if name in SHARDED else tensor.clone()
        for name, tensor in tensors.items()
    }


def read(folder: Path, placement: Placement) -> dict[str, Any]:
    """Return whether everything was read, and how many bytes were sent for it."""
    sent: list[int] = []

    def send(self: SpreadReader, index: Any) -> torch.Tensor:
        tensor = original(self, index)
        sent.append(tensor.nbytes)
        return tensor

    original, SpreadReader._send = SpreadReader._send, send
    try:
        reader = SpreadReader(folder, file_names(dist.get_world_size()))
        stored = reader.read_metadata().state_dict_metadata
        targets = lay_out({name: torch.zeros_like(tensor) for name, tensor in WHOLE.items()}, placement)
        reader.read_into(targets)
    finally:
        SpreadReader._send = original
    return {
        "are shapes right": {name: stored[name].size for name in stored} == {n: t.shape for n, t in WHOLE.items()},
        "is right": all(torch.equal(make_whole(targets[name]), tensor) for name, tensor in WHOLE.items()),
        "sent": sum(sent),
    }


def main() -> None:
    dist.init_process_group("gloo")
    separate_disks(MANAGERS)
    several_disks._CHUNK = 16
    folder = Path(sys.argv[1]) / f"disk-{MANAGERS[process_index()]}"
    folder.mkdir(exist_ok=True)
    write_pieces(PiecePlanner().pieces_of(lay_out(WHOLE, Shard(0))), folder)
    dist.barrier()
    names = {"as written": Shard(0), "by columns": Shard(1), "whole": Replicate()}
    answers = {name: read(folder, placement) for name, placement in names.items()}
    answers["files"] = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    if process_index() == 1:
        (folder / file_names(3)[2]).unlink()
    dist.barrier()
    try:
        SpreadReader(folder, file_names(3))
    except CheckpointError as error:
        answers["without a file"] = str(error)
    write_and_leave(answers, sys.argv[2])


if __name__ == "__main__":
    main()
