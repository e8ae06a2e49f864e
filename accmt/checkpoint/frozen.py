"""The weights that a checkpoint leaves out: frozen weights under adapters, and those missing from the state dict.

These weights come from elsewhere and do not change. A checkpoint holds only their digests, and a resumed run builds the
model again. Frozen weights of other models are saved: they may exist nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
import xxhash
from torch import Tensor, nn

from accmt.checkpoint.state_dicts import local_part, model_state, persistent_buffers, plain_parameter_names, plain_parts
from accmt.errors import CheckpointError, fail
from accmt.processes import gather_if_different
from accmt.sharded_tensors import bytes_of, make_whole

_SHOWN = 3
_CHUNK = 2**22


class FrozenWeights:
    """The weights that a model's checkpoints leave out. Processes: collective where the model is sharded."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        weights = find_frozen(model)
        self._digests = {name: digest_of(weight) for name, weight in weights.items()}
        self._checksums = {name: checksum(weight) for name, weight in weights.items()}

    def digests(self) -> dict[str, str]:
        """Return the digest of each weight that is left out, by plain name, except those that were trained or changed.

        Compares every value, because a change through `.data` (PEFT merges adapters this way) leaves no other trace.
        This costs less than the forward pass of one step, which also reads every weight.

        Processes: collective: a weight that changed on one process is left out on none.
        """
        if not self._digests:
            return {}
        weights = find_frozen(self._model)
        changed = set()
        for name in self._digests:
            if name not in weights or checksum(weights[name]) != self._checksums[name]:
                changed.add(name)
        for name in changed.union(*gather_if_different(sorted(changed))):
            del self._digests[name]
        return dict(self._digests)


def find_frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return what a checkpoint leaves out, by plain name: frozen parameters and the tensors that belong to them.

    For a model with PEFT adapters, these are all frozen parameters. For other models, only those that the model's
    `state_dict` leaves out, and those quantized by bitsandbytes, which load only as part of a model folder.
    An inactive adapter is frozen but belongs to the trained state: its parameters contain the adapter's name.
    Tensors that belong to a weight are, for example, the scales of a quantized weight, neither parameters nor buffers.
    """
    frozen = {name: weight for name, weight in plain_parameter_names(model).items() if not weight.requires_grad}
    if not frozen:
        return {}
    adapters: set[str] = set()
    for module in model.modules():
        adapters.update(getattr(module, "peft_config", None) or ())
    if adapters:
        base = {name: weight for name, weight in frozen.items() if adapters.isdisjoint(name.split("."))}
        return {**base, **_scales_of(base, model)}
    # By memory: a `state_dict` that renames a weight does not leave it out.
    in_state = {_memory_of(entry) for entry in model_state(model).values() if isinstance(entry, Tensor)}
    missing, quantized = {}, {}
    for name, weight in frozen.items():
        if weight.numel() and _memory_of(weight) not in in_state:  # all empty tensors have the address 0
            missing[name] = weight
        if type(weight).__module__.startswith("bitsandbytes."):
            quantized[name] = weight
    return {**missing, **quantized, **_scales_of(quantized, model)}


def _scales_of(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return the entries of the `state_dict` next to these weights that are neither parameters nor buffers."""
    owners = tuple({f"{name.rpartition('.')[0]}." for name in weights})
    known = {**plain_parameter_names(model), **persistent_buffers(model)}
    scales = {}
    for name, entry in model_state(model).items():
        if isinstance(entry, Tensor) and name not in known and name.startswith(owners):
            scales[name] = entry
    return scales


def _memory_of(tensor: Tensor) -> int:
    return plain_parts(local_part(tensor))[0].untyped_storage().data_ptr()


def checksum(weight: Tensor) -> object:
    """Return a checksum of this process's part of a weight, computed on the weight's device."""
    parts = plain_parts(local_part(weight.detach()))
    # On the device, because copying all frozen weights to the host at each checkpoint would take far longer.
    checksums: list[object] = []
    for part in parts:
        if part.device.type == "cpu":
            checksums.append(_digest(part))
        else:
            checksums.append(_sums(part))
    return checksums


def _sums(part: Tensor) -> list[int]:
    """Return sums of a tensor's bytes, chunk by chunk, each byte weighted by a different odd number."""
    data = part.contiguous().reshape(-1).view(torch.uint8)
    # In chunks: the products are of eight bytes each, and would take eight times the memory of the weight.
    sums = []
    for chunk in torch.split(data, _CHUNK):
        weights = _weights(str(part.device))[: len(chunk)]
        sums.append((chunk * weights).sum())
    return torch.stack(sums).tolist()


@lru_cache(maxsize=1)
def _weights(device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (_CHUNK,), generator=generator)
    return (2 * numbers + 1).to(device)


def digest_of(weight: Tensor) -> str:
    """Return a fingerprint of a whole tensor, sharded or not (xxh3, 16 hexadecimal digits).

    Processes: collective where it is sharded.
    """
    whole = make_whole(weight.detach())
    return "-".join(map(_digest, plain_parts(whole)))


def _digest(tensor: Tensor) -> str:
    digest = xxhash.xxh3_64(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(bytes_of(tensor))
    return digest.hexdigest()


def require_same_frozen(model: nn.Module, saved: Mapping[str, str]) -> None:
    """Check that the weights which a checkpoint left out are the same in the model.

    Processes: collective where the model is sharded.
    """
    if not saved:
        return
    weights = {**model_state(model), **plain_parameter_names(model)}
    different = []
    for name, digest in saved.items():
        if name not in weights or digest_of(weights[name]) != digest:
            different.append(name)
    if different:  # the adapter would be resumed on another base model, or on a new head with other random values
        raise fail(
            CheckpointError,
            "the frozen weights of the model",
            got=f"{len(different)} of {len(saved)} differ from those of the saved run: {', '.join(different[:_SHOWN])}",
            expected="the same base model as in the saved run: a checkpoint holds only the adapter",
            do="load the same base model, seed its random values (such as a new head), or start with `resume=False`",
        )
