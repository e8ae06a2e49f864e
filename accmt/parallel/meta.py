"""Models without values yet, built on the meta device: they are sharded first, and filled part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from accmt.errors import ModuleContractError, explain
from accmt.libraries.private_names import initializer_of
from accmt.processes import broadcast_object
from accmt.sharded_tensors import is_dtensor, shard_like

_WHERE = "self.model, built on the meta device"


def is_on_meta(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, has no values yet."""
    return any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers()))


def fill(model: nn.Module, device: torch.device) -> None:
    """Give a model its first values, sharded or not, in place: those that it would have been built with.

    One part after the other is drawn as a whole, by all processes alike from the main one's state of torch's generator,
    and each keeps what is its own. So no process ever holds more than its shards and the tensors of one part.

    Processes: collective.

    Raises:
        ModuleContractError: A part cannot be filled.
    """
    _require_fillable(model)
    initialize = initializer_of(model) or _reset
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(broadcast_object(torch.get_rng_state()))
        for part in filter(_has_own, model.modules()):
            with _as_wholes(part), torch.no_grad():
                initialize(part)


def _require_fillable(model: nn.Module) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(model.parameters())):
        got, do = "tied weights, which would get values of their own each", "build it on the CPU"
        raise ModuleContractError(explain(_WHERE, got, "weights that are not tied", do))
    if initializer_of(model) is not None:
        return
    for name, part in model.named_modules():
        if _has_own(part) and not hasattr(part, "reset_parameters"):
            got = f"{name or 'the model'}, a {type(part).__name__} with tensors of its own and without reset_parameters"
            do = "def reset_parameters(self), which fills its tensors, as torch's layers have it"
            raise ModuleContractError(explain(_WHERE, got, "parts that fill themselves", do))


def _has_own(part: nn.Module) -> bool:
    return any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False)))


def _reset(part: nn.Module) -> None:
    reset: Callable[[], None] = part.reset_parameters  # type: ignore[assignment]
    reset()


@contextmanager
def _as_wholes(part: nn.Module) -> Iterator[None]:
    """Let a part have whole parameters on the CPU, and keep of them what is this process's."""
    own = dict(part.named_parameters(recurse=False))
    for name, parameter in own.items():
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        setattr(part, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    yield
    for name, parameter in own.items():
        value = shard_like(getattr(part, name).detach(), parameter)
        _local(parameter.detach()).copy_(_local(value))
        setattr(part, name, parameter)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
