"""What to write of a state dict: names without wrappers, and each tensor once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from accmt.errors import WeightsError, explain
from accmt.libraries.private_names import is_made_of_tensors
from accmt.sharded_tensors import is_dtensor

_COMPILED = "_orig_mod"
_PARALLEL = "module."


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name of a state dict to the name without what `torch.compile` and data parallelism put around a model.

    `_orig_mod` goes wherever it stands in a name, because a submodule can be compiled too. A leading `module.` goes
    only where every name has it: a wrapper encloses the whole model.
    """
    own = list(names)
    plain = [".".join(part for part in name.split(".") if part != _COMPILED) for name in own]
    while plain and all(name.startswith(_PARALLEL) for name in plain):
        plain = [name.removeprefix(_PARALLEL) for name in plain]
    twice = sorted({name for name in plain if plain.count(name) > 1}) if len(set(plain)) < len(plain) else []
    if twice:
        message = explain(
            "names of the weights",
            f"more than one weight is called {', '.join(twice)} once `{_COMPILED}` is taken out",
            "names that differ without what torch.compile adds",
            f"rename the submodule that is called `{_COMPILED}`",
        )
        raise WeightsError(message)
    return dict(zip(own, plain, strict=True))


def find_tied(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name whose tensor is the very same view as an earlier one's to that earlier name."""
    first: dict[Hashable, str] = {}
    kept = {name: first.setdefault(_view(tensor), name) for name, tensor in state_dict.items()}
    return {name: earlier for name, earlier in kept.items() if earlier != name}


def give_own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous, each with memory of its own; only those that need it are copied."""
    owners: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage()
        if memory.nbytes() != dense.nbytes or memory.data_ptr() in owners:
            dense = dense.clone()
        owners.add(dense.untyped_storage().data_ptr())
        separate[name] = dense
    return separate


def require_complete(state_dict: Mapping[str, Tensor], model: nn.Module) -> None:
    """Reject a state dict that holds less than the model's parameters: shards of ZeRO-3 or FSDP, or nothing.

    A model that leaves something out itself, by a `state_dict` method of its own, is not checked.
    """
    if any(type(module).state_dict is not nn.Module.state_dict for module in model.modules()):
        return
    expected = _count(dict(model.named_parameters()))
    buffers = set(plain_names(name for name, _ in model.named_buffers(remove_duplicate=False)).values())
    names = plain_names(state_dict)
    weights = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}
    got = _count({name: tensor for name, tensor in weights.items() if names[name] not in buffers})
    if got < expected:
        empty = [names[name] for name, tensor in weights.items() if not tensor.numel()]
        message = explain(
            f"the weights of {type(model).__name__}",
            f"{got:,} values in {len(state_dict)} tensors" + (f", none in {', '.join(empty[:3])}" if empty else ""),
            f"at least {expected:,}, as its parameters have",
            "gather the shards of all processes before saving (ZeRO-3 and FSDP keep empty ones on each)",
        )
        raise WeightsError(message)


def _count(tensors: Mapping[str, Tensor]) -> int:
    tied = find_tied(tensors)
    # DeepSpeed keeps the size of the whole beside the empty tensor that ZeRO-3 leaves of a parameter.
    return sum(getattr(tensors[name], "ds_numel", tensors[name].numel()) for name in tensors if name not in tied)


def require_dense_tensors(state_dict: Mapping[str, object]) -> None:
    """Reject, by name, every value that a weight file cannot hold: no tensor, a sparse one, or one without memory."""
    faults = [f"{name}: {_kind(value)}" for name, value in state_dict.items() if not _is_dense(value)]
    if faults or not state_dict:
        message = explain(
            "weights to save",
            "; ".join(faults) or "no tensor at all",
            "dense tensors that hold data",
            "keep other values out of the state dict (`get_extra_state`, sparse parameters), gather shards first, or "
            "pass `model_saving=None`",
        )
        raise WeightsError(message)


def require_storable(state_dict: Mapping[str, object], *, safe_serialization: bool) -> None:
    """Reject at the start of a run what `require_dense_tensors` rejects, and dtypes that safetensors does not have."""
    require_dense_tensors(state_dict)
    dtypes = {value.dtype: name for name, value in state_dict.items() if isinstance(value, Tensor)}
    for dtype, name in dtypes.items() if safe_serialization else ():
        try:
            safetensors.torch.save({name: torch.empty(1, dtype=dtype)})
        except (KeyError, ValueError, SafetensorError) as error:
            got, do = f"a tensor of {dtype}", "convert it, or pass `safe_serialization=False`"
            raise WeightsError(explain(name, got, "a dtype that safetensors has", do)) from error


def _view(tensor: Tensor) -> Hashable:
    anything: object = tensor
    if is_made_of_tensors(anything):  # a DTensor among them
        return id(tensor)  # which has no memory itself
    address = tensor.untyped_storage().data_ptr()
    if address == 0 or tensor.numel() == 0:
        return id(tensor)  # without memory nothing is shared
    return tensor.device, address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_dense(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return is_dtensor(value) or not is_made_of_tensors(value)


def _kind(value: object) -> str:
    if is_made_of_tensors(value):
        return f"a {type(value).__name__}, which is made of other tensors"
    return f"{value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__
