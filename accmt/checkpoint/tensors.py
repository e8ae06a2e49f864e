"""Taking the tensors out of a nested state, and putting them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accmt.checkpoint.typed_json import TensorReference
from accmt.errors import CheckpointCorruptError, CheckpointError, explain

# What both safetensors and its reader in torch.distributed.checkpoint know.
STORABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64}
)


def split_tensors(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take every tensor out of a state.

    A tensor's name is the path to it, joined by dots. Tensors that share their memory (tied weights) are taken once.

    Args:
        state: Dicts, lists and tuples, nested, of tensors and other values.

    Returns:
        The tensors by name, and the state with a `TensorReference` in the place of each.

    Raises:
        CheckpointError: A tensor is sparse, quantized, without data, or of a dtype that safetensors does not have.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def refer(tensor: Tensor, path: str) -> TensorReference:
        _require_storable(tensor, path)
        memory = _memory_of(tensor)
        if memory not in names:
            names[memory] = _unused_name(path, tensors)
            tensors[names[memory]] = tensor.detach()
        return TensorReference(names[memory])

    return tensors, _replace(state, "", Tensor, refer)


def join_tensors(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Put tensors back: the inverse of `split_tensors`.

    Args:
        tensors: The tensors by name.
        rest: The state with references.

    Raises:
        CheckpointCorruptError: A tensor that the state refers to is missing.
    """

    def find(reference: TensorReference, path: str) -> Tensor:
        if reference.name in tensors:
            return tensors[reference.name]
        message = explain(
            path or "state",
            f"no tensor {reference.name!r}",
            "the files of one checkpoint",
            "resume from another checkpoint",
        )
        raise CheckpointCorruptError(message)

    return _replace(rest, "", TensorReference, find)


def referred_tensors(rest: Any) -> set[str]:
    """Return the names of all tensors that a state without them refers to."""
    names: set[str] = set()
    _replace(rest, "", TensorReference, lambda reference, path: names.add(reference.name))
    return names


def _replace(state: Any, path: str, kind: type, replace: Callable[[Any, str], Any]) -> Any:
    if isinstance(state, kind):
        return replace(state, path)
    begin = f"{path}." if path else ""
    if isinstance(state, dict) and not isinstance(state, Counter):
        return {key: _replace(item, f"{begin}{key}", kind, replace) for key, item in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_replace(item, f"{begin}{index}", kind, replace) for index, item in enumerate(state))
    return state


def _unused_name(path: str, taken: Mapping[str, Tensor]) -> str:
    # {"a": {"b": x}, "a.b": y} gives the same path twice.
    name, count = path, 1
    while name in taken:
        count += 1
        name = f"{path}~{count}"
    return name


def _memory_of(tensor: Tensor) -> Any:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if type(local) not in (Tensor, torch.nn.Parameter) or local.numel() == 0:
        return id(tensor)  # no memory of its own to compare
    return (local.device, local.data_ptr(), local.dtype, tensor.shape, tensor.stride())


def _require_storable(tensor: Tensor, path: str) -> None:
    if tensor.layout == torch.strided and tensor.dtype in STORABLE and not tensor.is_meta:
        return
    message = explain(
        path or "state",
        f"a tensor ({tensor.dtype}, {tensor.layout}, on {tensor.device}), which cannot be stored",
        f"a dense tensor with data, of {', '.join(sorted(str(dtype) for dtype in STORABLE))}",
        "convert it in `state_dict`, or keep it out of the state (a buffer: `persistent=False`)",
    )
    raise CheckpointError(message)
