"""Checksums of tensors that do not depend on the order of summation, on shards or on the number of processes.

The checksum of a tensor is the sum of its bits, as integers, times an odd number for each position, mod 2 ** 64.
Integer sums have no rounding, so parts may be added in any order: each process adds up its shard, and one small message
adds up the processes. Every odd number has an inverse mod 2 ** 64, so a change of a single value always shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from accmt.checkpoint.state_dicts import has_inner_tensors, local_part, plain_parts
from accmt.processes import gather_objects, is_main_process
from accmt.sharded_tensors import is_dtensor

_BLOCK = 2**13  # positions with different factors; a further factor belongs to each block
_MIX = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, as a signed number
_IN_CACHE = {"cpu": 2**16}  # values at a time: a temporary of the whole tensor takes five times as long
_ON_DEVICE = 2**24
_MASK = 2**64 - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def add_over_processes(sums: Sequence[int]) -> list[int]:
    """Add checksums of shards over all processes.

    Processes: collective.
    """
    return [sum(of_all) & _MASK for of_all in zip(*gather_objects(list(sums)), strict=True)]


def sums_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the checksums of this process's parts; 0 for None. Waits once for the device.

    The sums over all processes are the checksums: of a tensor that several processes hold, only one adds its part.
    """
    with torch.no_grad():
        parts = [[] if tensor is None else _parts(tensor.detach()) for tensor in tensors]
    flat = [part for of_one in parts for part in of_one]
    values = iter(_read(flat))
    return [sum(next(values) for _ in of_one) & _MASK for of_one in parts]


def sum_of_state(state: Mapping[Any, Any]) -> list[tuple[int, Tensor | int]]:
    """Return what an optimizer keeps for a parameter as pairs of a factor and a tensor, or the digest of a value."""
    return [
        (_digest(path) | 1, value if isinstance(value, Tensor) else _digest(repr(value)))
        for path, value in sorted(_flatten(state), key=lambda pair: pair[0])
    ]


def combine(names: Sequence[str], sums: Sequence[int]) -> int:
    """Return one checksum of several named ones."""
    return sum((_digest(name) | 1) * one for name, one in zip(names, sums, strict=True)) & _MASK


def digest_batch(batch: Any) -> str:
    """Return a digest of the content of a batch: its tensors, arrays, numbers and strings.

    Of tensors that are on a device already, only type and shape count: reading them would wait for it in each step.
    """
    digest = xxhash.xxh3_64()
    for path, value in _flatten(batch):
        digest.update(path.encode())
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            for part in plain_parts(value.detach()) if value.device.type == "cpu" else ():
                dense = part if part.layout == torch.strided else part.to_dense()
                digest.update(dense.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif hasattr(value, "tobytes"):
            digest.update(value.tobytes())
        elif isinstance(value, str | int | float | bool | bytes | None):
            digest.update(repr(value).encode())
        else:
            digest.update(type(value).__qualname__.encode())
    return digest.hexdigest()


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _flatten(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _flatten(one, f"{path}.{number}")
    else:
        yield path, value


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _read(sums: list[Tensor]) -> list[int]:
    """Return the values of scalars, those of one device together."""
    values: dict[int, int] = {}
    for device in {one.device for one in sums}:
        numbers = [number for number, one in enumerate(sums) if one.device == device]
        values.update(zip(numbers, torch.stack([sums[number] for number in numbers]).tolist(), strict=True))
    return [values[number] for number in range(len(sums))]


def _parts(tensor: Tensor) -> list[Tensor]:
    """Return scalars on the tensor's device whose sum is the checksum of this process's part."""
    if is_dtensor(tensor):
        return _parts_of_sharded(tensor)
    if tensor.layout != torch.strided:
        coalesced = tensor.coalesce()
        return [*_parts(coalesced.indices()), *_parts(coalesced.values())]
    if has_inner_tensors(tensor):
        return [part for one in plain_parts(tensor) for part in _parts(one)]
    return _add_run(_bits(tensor), 0)


def _parts_of_sharded(tensor: DTensor) -> list[Tensor]:
    """Return the sums of a shard: each value counts with its position in the whole tensor."""
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    local = local_part(tensor)
    if has_inner_tensors(local):  # quantized optimizer state: positions within the shard
        return [part for one in plain_parts(local) for part in _parts(one)]
    if coordinate is None or not local.numel():
        return []
    if any(placement.is_replicate() and at for placement, at in zip(placements, coordinate, strict=True)):
        return []  # the process at coordinate 0 adds the same part
    chunks = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):  # several runs in one shard
        whole = tensor.full_tensor()
        return _add_run(_bits(whole), 0) if is_main_process() else []
    offsets, shape = tuple(chunks[0].offsets), tuple(tensor.shape)
    dim = max((dim for dim in range(local.dim()) if local.shape[dim] != shape[dim]), default=0)
    inner = math.prod(shape[dim + 1 :])
    if math.prod(local.shape[:dim]) == 1:  # one run of neighbours, as FSDP2 shards
        before = sum(offset * math.prod(shape[number + 1 :]) for number, offset in enumerate(offsets[: dim + 1]))
        return _add_run(_bits(local), before)
    runs = torch.zeros((), dtype=torch.int64, device=local.device)
    for number in range(dim):
        places = torch.arange(local.shape[number], device=local.device) + offsets[number]
        runs = runs[..., None] + places * math.prod(shape[number + 1 :])
    starts = runs.reshape(-1) + offsets[dim] * inner
    return _add_runs(_bits(local).view(len(starts), -1), starts)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor's values in logical order, as integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()])


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator) + 1).to(device)


def _factor_of_block(block: int) -> int:
    factor = (block * _MIX | 1) & _MASK
    return factor - 2**64 if factor >= 2**63 else factor


def _add_run(values: Tensor, start: int) -> list[Tensor]:
    """Return the sums of neighbouring values, the first of which is at position `start` in its tensor."""
    factors, sums, end = _factors(values.device), [], len(values)
    at = min(-start % _BLOCK, end)  # the rest of a block that has begun
    if at:
        first = start % _BLOCK
        sums.append((values[:at].long() * factors[first : first + at]).sum() * _factor_of_block(start // _BLOCK))
    size = _IN_CACHE.get(values.device.type, _ON_DEVICE)
    while end - at >= _BLOCK:
        stop = at + min(size, (end - at) // _BLOCK * _BLOCK)
        block = (start + at) // _BLOCK
        blocks = torch.arange(block, block + (stop - at) // _BLOCK, device=values.device) * _MIX | 1
        sums.append(((values[at:stop].view(-1, _BLOCK).long() * factors).sum(1) * blocks).sum())
        at = stop
    if at < end:
        factor = _factor_of_block((start + at) // _BLOCK)
        sums.append((values[at:].long() * factors[: end - at]).sum() * factor)
    return sums if len(sums) < 2 else [torch.stack(sums).sum()]


def _add_runs(values: Tensor, starts: Tensor) -> list[Tensor]:
    """Return the sums of rows of values, each of which begins at another position in the whole tensor."""
    factors, width = _factors(values.device), values.shape[1]
    places = torch.arange(width, device=values.device)
    rows = max(1, _IN_CACHE.get(values.device.type, _ON_DEVICE) // max(1, width))
    sums = []
    for some, begins in zip(torch.split(values, rows), torch.split(starts, rows), strict=True):
        at = begins[:, None] + places
        sums.append((some.long() * factors[at % _BLOCK] * ((at // _BLOCK) * _MIX | 1)).sum())
    return [torch.stack(sums).sum()]
