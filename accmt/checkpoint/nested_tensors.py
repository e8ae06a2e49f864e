"""Taking the tensors out of a nested state, and putting them back."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accmt.checkpoint.typed_json import TensorReference, WrappedTensor
from accmt.errors import CheckpointCorruptError, CheckpointError, explain
from accmt.libraries.private_names import is_made_of_tensors

# What both safetensors and its reader in torch.distributed.checkpoint know.
STORABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64}
)


def split_tensors(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take every tensor out of a state.

    A tensor's name is the path to it, joined by dots. Tensors that share their memory (tied weights) are taken once.
    One of a sub-class that is made of other tensors (such as a quantized one) is taken apart into those.

    Returns:
        The tensors by name, and the state with a `TensorReference` or a `WrappedTensor` in the place of each.

    Raises:
        CheckpointError: A tensor is sparse, quantized, without data, or of a dtype that safetensors does not have.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[Any, str] = {}

    def refer(tensor: Tensor, path: str) -> TensorReference | WrappedTensor:
        if is_made_of_others(tensor):
            return _take_apart(tensor, lambda part, name: _replace(part, f"{path}.{name}", Tensor, refer))
        _require_storable(tensor, path)
        memory = _memory_of(tensor)
        if memory not in names:
            names[memory] = _unused_name(path, tensors)
            tensors[names[memory]] = tensor.detach()
        return TensorReference(names[memory])

    return tensors, _replace(state, "", Tensor, refer)


def join_tensors(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """Put tensors back: the inverse of `split_tensors`.

    Raises:
        CheckpointCorruptError: A tensor that the state refers to is missing.
        CheckpointError: A sub-class of tensors is not there: what defines it has not been imported.
    """

    def find(reference: TensorReference | WrappedTensor, path: str) -> Tensor:
        if isinstance(reference, WrappedTensor):
            return _put_together(reference, join_tensors(tensors, reference.parts))
        if reference.name in tensors:
            return tensors[reference.name]
        got, do = f"no tensor {reference.name!r}", "resume from another checkpoint"
        raise CheckpointCorruptError(explain(path or "state", got, "the files of one checkpoint", do))

    return _replace(rest, "", (TensorReference, WrappedTensor), find)


def referred_tensors(rest: Any) -> set[str]:
    names: set[str] = set()

    def note(reference: TensorReference | WrappedTensor, path: str) -> None:
        names.update({reference.name} if isinstance(reference, TensorReference) else referred_tensors(reference.parts))

    _replace(rest, "", (TensorReference, WrappedTensor), note)
    return names


def is_made_of_others(tensor: Tensor) -> bool:
    """Return whether a tensor has no memory of its own, but is made of other tensors, as quantized ones are."""
    is_other = isinstance(tensor, DTensor) or tensor.layout != torch.strided
    anything: object = tensor  # else mypy takes such a sub-class for impossible
    return not is_other and is_made_of_tensors(anything)


def local_part(tensor: Tensor) -> Tensor:
    """Return what this process has of a sharded tensor; another tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors that a tensor is made of; a plain one is its own only part."""
    if not is_made_of_others(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in plain_parts(getattr(tensor, name))]


def describe_kind(kind: type) -> str:
    """Return the name under which a sub-class of tensors stands in a checkpoint."""
    return f"{kind.__module__}:{kind.__qualname__}"


def _take_apart(tensor: Tensor, split: Callable[[Tensor, str], Any]) -> WrappedTensor:
    """Return what stands for a tensor that is made of others.

    Source: `torch.utils._python_dispatch.is_traceable_wrapper_subclass` describes both halves of the protocol.
    """
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: split(getattr(tensor, name), name) for name in names}
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    return WrappedTensor(describe_kind(type(tensor)), parts, context, size, stride, tensor.dtype)


def _put_together(wrapped: WrappedTensor, parts: Mapping[str, Tensor]) -> Tensor:
    module, _, name = wrapped.kind.partition(":")
    try:  # nothing is imported for the sake of a name in a file
        kind: Any = functools.reduce(getattr, name.split("."), sys.modules[module])
        put_together: Callable[..., Tensor] = kind.__tensor_unflatten__
    except (KeyError, AttributeError) as error:
        got, expected = f"{wrapped.kind}, which is not imported", "the sub-class of tensors that was saved"
        message = explain("a tensor of the checkpoint", got, expected, f"import {module} (and define it at its top)")
        raise CheckpointError(message) from error
    return put_together(dict(parts), wrapped.context, torch.Size(wrapped.size), wrapped.stride)


def _replace(state: Any, path: str, kind: type | tuple[type, ...], replace: Callable[[Any, str], Any]) -> Any:
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
    local = local_part(tensor)
    if type(local) not in (Tensor, torch.nn.Parameter) or local.numel() == 0:
        return id(tensor)  # no memory of its own to compare
    return (local.device, local.data_ptr(), local.dtype, tensor.shape, tensor.stride())


def _require_storable(tensor: Tensor, path: str) -> None:
    is_dense = (
        tensor.layout == torch.strided
        and tensor.dtype in STORABLE
        and not (tensor.is_meta or tensor.is_nested)  # a nested one may be strided, and has no shape
    )
    if is_dense and not (isinstance(tensor, DTensor) and is_made_of_others(tensor.to_local())):
        return
    kind = "nested tensor" if tensor.is_nested else "tensor"
    message = explain(
        path or "state",
        f"a {kind} ({tensor.dtype}, {tensor.layout}, on {tensor.device}), which cannot be stored",
        f"a dense tensor with data, of {', '.join(sorted(str(dtype) for dtype in STORABLE))}",
        "convert it in `state_dict`, or keep it out of the state (a buffer: `persistent=False`)",
    )
    raise CheckpointError(message)
