"""Weights of a sharded model, written one after the other: no process ever holds the whole of it.

The main process decides which tensor it needs next; the others follow it, because each is put together by all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn

from accmt.processes import broadcast_object, is_main_process, run_on_main_process
from accmt.sharded_tensors import make_whole

T = TypeVar("T")

_END = ""
_CHUNK = 2**24


class WholeState(dict[str, Tensor]):
    """A state dict that each process has whole."""

    def lend(self, action: Callable[[], T]) -> T:
        """Let the main process do something with the tensors, and return its result on every process.

        Processes: collective.

        Raises:
            Exception: What the action raised, on every process.
        """
        return run_on_main_process(action)


class ShardedState:
    """A state dict whose tensors are put together when they are needed.

    Attributes:
        outlines: Tensors without memory, by name; names of one weight have the same one.
    """

    def __init__(self, model: nn.Module) -> None:
        state_dict: dict[str, Tensor] = model.state_dict(keep_vars=True)  # in which tied weights are one object
        self._own = {name: tensor.detach() for name, tensor in state_dict.items()}
        first: dict[int, Tensor] = {}
        self.outlines = {
            name: first.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            for name, tensor in state_dict.items()
        }

    def fetch(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU.

        Processes: main only, within `lend`.
        """
        _announce(name)
        return make_whole(self._own[name]).cpu()

    def fetch_outlined(self, outlines: Mapping[str, Tensor]) -> Callable[[str], Tensor] | None:
        """Return what fetches tensors by the names under which `outlines` has ours; None where it has others too."""
        names = {id(outline): name for name, outline in self.outlines.items()}
        if any(id(outline) not in names for outline in outlines.values()):
            return None
        return lambda name: self.fetch(names[id(outlines[name])])

    def fetch_all(self) -> dict[str, Tensor]:
        """Return all tensors whole, where what is saved has to be computed from them."""
        return {name: self.fetch(name) for name in self._own}

    def lend(self, action: Callable[[], T]) -> T:
        """Let the main process do something with whole tensors, and return its result on every process.

        Processes: collective.

        Raises:
            Exception: What the action raised, on every process.
        """
        if not is_main_process():
            self._follow()
        return run_on_main_process(lambda: self._act(action))

    def _act(self, action: Callable[[], T]) -> T:
        try:
            return action()
        finally:
            _announce(_END)

    def _follow(self) -> None:
        while (name := _announce(_END)) != _END:
            make_whole(self._own[name])


def _announce(name: str) -> str:
    """Return the name that the main process passes, on every process."""
    return broadcast_object(name)


class StreamedFile:
    """A safetensors file that is written tensor by tensor, and gets its metadata at the end.

    Args:
        path: The file.
        outlines: What will be in it, by name, in this order.
        metadata: Metadata as long as that which it will have.

    Source: https://github.com/huggingface/safetensors#format
    """

    def __init__(self, path: Path, outlines: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._outlines = outlines
        self._begin = len(self._header(metadata))

    def write(self, fetch: Callable[[str], Tensor], digest: xxhash.xxh3_64) -> None:
        """Write every tensor, and add it to the digest of all."""
        with self.path.open("wb") as file:
            file.seek(self._begin)
            for name in self._outlines:
                tensor = fetch(name)
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                for start in range(0, len(data), _CHUNK):
                    digest.update(data[start : start + _CHUNK].data)
                    file.write(data[start : start + _CHUNK].data)

    def seal(self, metadata: Mapping[str, str]) -> None:
        """Write what stands before the tensors."""
        with self.path.open("r+b") as file:
            file.write(self._header(metadata))

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name, outline in self._outlines.items():
            begin, end = end, end + outline.nbytes
            entries[name] = {
                "dtype": _name_of(outline.dtype),
                "shape": list(outline.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type."""
    data = safetensors.torch.save({"one": torch.empty(1, dtype=dtype)})
    length = int.from_bytes(data[:8], "little")
    name: str = json.loads(data[8 : 8 + length])["one"]["dtype"]
    return name
