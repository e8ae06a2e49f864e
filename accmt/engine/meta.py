"""Models without values yet, built on the meta device: they are sharded first, and filled part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accmt.errors import ModuleContractError, explain
from accmt.libraries.private_names import draw_first_values, draws_first_values, has_first_value
from accmt.processes import broadcast_object
from accmt.sharded_tensors import is_dtensor, make_whole, shard_like

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
    untie(model)  # for a model that is built whole draws each place of a tied weight, and keeps the first
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(broadcast_object(torch.get_rng_state()))
        if draws_first_values(model):
            draw_first_values(model, as_wholes)
            tie: Any = model.tie_weights
            tie()
            return
        for part in filter(_has_own, _bottom_up(model)):
            with as_wholes(part), torch.no_grad():
                _reset(part)


def untie(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Give each place of a tied weight one of its own, and return the places of each such weight."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, name))
    tied = {parameter: of_one for parameter, of_one in places.items() if len(of_one) > 1}
    for parameter, of_one in tied.items():
        for module, name in of_one[1:]:
            setattr(module, name, nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad))
    return list(tied.values())


def _require_fillable(model: nn.Module) -> None:
    if draws_first_values(model):
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if len(names) > len(list(model.parameters())):
        got, do = "tied weights, which would get values of their own each", "build it on the CPU"
        raise ModuleContractError(explain(_WHERE, got, "weights that are not tied, but by transformers", do))
    for name, part in model.named_modules():
        if _has_own(part) and not hasattr(part, "reset_parameters"):
            got = f"{name or 'the model'}, a {type(part).__name__} with tensors of its own and without reset_parameters"
            do = "def reset_parameters(self), which fills its tensors, as torch's layers have it"
            raise ModuleContractError(explain(_WHERE, got, "parts that fill themselves", do))


def _bottom_up(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model in the order in which they were built: what is in a part before the part."""
    found: dict[nn.Module, None] = {}
    model.apply(lambda part: found.setdefault(part))
    return list(found)


def _has_own(part: nn.Module) -> bool:
    return any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False)))


def _reset(part: nn.Module) -> None:
    reset: Callable[[], None] = part.reset_parameters  # type: ignore[assignment]
    reset()


@contextmanager
def as_wholes(part: nn.Module) -> Iterator[None]:
    """Let a part and its children have whole parameters on the CPU, and keep of them what is this process's.

    Children too, because some parts draw their children's values once more (attention in GPT-2). What was read from a
    file stays as it is.

    Processes: collective.
    """
    own = {
        (holder, name): parameter
        for holder in (part, *part.children())
        for name, parameter in holder.named_parameters(recurse=False)
        if not has_first_value(parameter)
    }
    for (holder, name), parameter in own.items():
        # An own parameter is about to be drawn, a child's has been.
        whole = torch.empty(parameter.shape, dtype=parameter.dtype)
        if holder is not part:
            whole.copy_(make_whole(parameter.detach()))
        setattr(holder, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    with _RejectsDraws():
        yield
    for (holder, name), parameter in own.items():
        value = shard_like(getattr(holder, name).detach(), parameter)
        _local(parameter.detach()).copy_(_local(value))
        setattr(holder, name, parameter)


class _RejectsDraws(TorchFunctionMode):
    """Rejects to change sharded tensors in place: each process would draw its part by itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        changed = next(chain(args, named.values()), None)
        if name.endswith("_") and not name.endswith("__") and is_dtensor(changed):
            got = f"first values that a part draws ({name}) for parts below its children"
            raise ModuleContractError(explain(_WHERE, got, "parts that fill themselves", "build it on the CPU"))
        return func(*args, **named)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor
