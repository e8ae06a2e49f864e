"""Which process writes which piece of the tensors, and the files that hold them.

`torch.distributed.checkpoint` plans: each shard is written by a process that has it, what all processes have by one of
them. The files are those of safetensors, with the metadata by which torch's `HuggingFaceStorageReader` puts pieces
together for any other number of processes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from accmt.checkpoint.nested_tensors import local_part
from accmt.files import follow_umask
from accmt.processes import gather_objects, num_processes, process_index


@dataclass(frozen=True)
class Pieces:
    """What one process writes.

    Attributes:
        tensors: This process's piece of each tensor it writes, by the tensor's name.
        offsets: Where the piece begins in the whole tensor, per dimension.
    """

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, tuple[int, ...]]

    @classmethod
    def whole(cls, tensors: Mapping[str, Tensor]) -> Pieces:
        return cls(tensors, {name: (0,) * tensor.dim() for name, tensor in tensors.items()})

    def __or__(self, other: Pieces) -> Pieces:
        return Pieces({**self.tensors, **other.tensors}, {**self.offsets, **other.offsets})


class PiecePlanner:
    """Decides which process writes what: everything once, each process about as much as the others.

    A plan holds as long as the tensors keep their names, shapes and dtypes on every process, and is then used again:
    planning is long beside a copy of the tensors.
    """

    def __init__(self) -> None:
        self._layouts: list[str] = []
        self._offsets: Mapping[str, tuple[int, ...]] = {}

    def pieces_of(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return this process's pieces; they are the tensors themselves or their local parts, not copies.

        Processes: collective; every process passes the same names. A tensor is the same on all, or sharded (DTensor).
        """
        if num_processes() == 1:
            return Pieces.whole({name: local_part(tensor) for name, tensor in tensors.items()})
        layouts = gather_objects(_layout_of(tensors))
        if layouts != self._layouts:
            self._offsets = _plan(tensors)
            self._layouts = layouts
        return Pieces({name: local_part(tensors[name]) for name in self._offsets}, self._offsets)


def _plan(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    # Every process computes the same plan from the same local plans, which saves sending it.
    plans, _ = planner.create_global_plan(gather_objects(planner.create_local_plan()))
    return {item.index.fqn: tuple(item.index.offset or ()) for item in plans[process_index()].items}


def _layout_of(tensors: Mapping[str, Tensor]) -> str:
    layout = [
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)) for name, tensor in tensors.items()
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def file_names(num_files: int) -> list[str]:
    return [f"tensors-{number + 1:05d}-of-{num_files:05d}.safetensors" for number in range(num_files)]


def write_pieces(pieces: Pieces, folder: Path) -> Path:
    """Write this process's file of tensors, also where it has none, and return it, not yet durable."""
    path = folder / file_names(num_processes())[process_index()]
    sharding = {name: {"saved_offsets": list(offsets)} for name, offsets in pieces.offsets.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    try:
        save_file({name: tensor.contiguous() for name, tensor in pieces.tensors.items()}, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    follow_umask(path)
    return path
