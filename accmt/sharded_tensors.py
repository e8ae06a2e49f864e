"""Tensors of which each process holds a part (`DTensor`), and the classes that FSDP2 makes of models with such."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a sharded tensor."""
    # Who holds a DTensor has imported its module; importing it here would load sympy with every `import accmt`.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def make_whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor.

    Processes: collective where it is sharded.
    """
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a whole tensor where `like` is sharded, without communication; else the whole."""
    if not is_dtensor(like) or is_dtensor(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def shard_state(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return whole tensors as `like` has those of the same names: sharded or whole."""
    return {name: shard_like(tensor, like[name]) for name, tensor in state.items()}


def class_of(model: nn.Module) -> type[nn.Module]:
    """Return a model's class as its author wrote it: `fully_shard` makes one of it that is called FSDP...

    Source: `fully_shard` in torch/distributed/fsdp/_fully_shard/_fully_shard.py.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = type(model)
    # A user's class may derive from FSDPModule as well; only torch's has this name.
    if fsdp is None or fsdp.FSDPModule not in kind.__bases__ or not kind.__name__.startswith("FSDP"):
        return kind
    return next(base for base in kind.__bases__ if base is not fsdp.FSDPModule)


def total_norm(gradients: Sequence[Tensor], order: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients together.

    Processes: collective where they are sharded.
    """
    values = [dense_values(gradient) if gradient.is_sparse else gradient for gradient in gradients]
    norms = [make_whole(nn.utils.get_total_norm(tensors, order)) for (tensors,) in by_mesh(values)]
    # The norm of a single norm would be rounded once more.
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), order)


def dense_values(sparse: Tensor) -> Tensor:
    """Return the values of a sparse tensor, which adds up those of one place; of a coalesced one they are its own."""
    return sparse.coalesce().values()


def by_mesh(*tensors: Sequence[Tensor]) -> list[tuple[list[Tensor], ...]]:
    """Divide lists of tensors by the processes over which those of the first list are sharded.

    Torch computes with many tensors at once only where all are sharded over the same, or none is.
    """
    if not any(map(is_dtensor, tensors[0])):
        return [tuple(map(list, tensors))]
    groups: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in zip(*tensors, strict=True):
        groups.setdefault(mesh_of(row[0]), []).append(row)
    return [tuple(map(list, zip(*rows, strict=True))) for rows in groups.values()]


def mesh_of(tensor: Tensor) -> DeviceMesh | None:
    """Return the processes over which a tensor is sharded, None where it is whole."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several entries of a tensor are one in memory, as `Tensor.expand` makes them."""
    if tensor.layout != torch.strided or is_dtensor(tensor):
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def without_repetition(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a view in which each entry of an expanded tensor is there once, so that it can be written.

    Args:
        tensor: The tensor; another than `like` is cut as that would be.
    """
    like = tensor if like is None else like
    if not is_expanded(like):
        return tensor
    for dim, stride in enumerate(like.stride()):
        if stride == 0 and like.shape[dim]:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def write_into(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor values in place; an expanded one stays the view that it is."""
    with torch.no_grad():
        without_repetition(tensor).copy_(without_repetition(values, tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a dense tensor's bytes, without a copy if it is on the CPU.

    `Tensor.numpy` would mark the memory: torch then refuses to resize the tensor, as `out=` does.
    """
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return np.from_dlpack(flat).data
