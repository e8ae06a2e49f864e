"""Models built on the meta device, or at the start of a run: distributed before they have values, then filled.

So no process holds all of a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from accmt.checkpoint.state_dicts import local_part
from accmt.engine.shards import shard_model, untie
from accmt.engine.tensor_parallel import tensor_parallel_size
from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import (
    draw_first_values,
    has_first_value,
)
from accmt.processes import broadcast_object
from accmt.registry import addon
from accmt.sharded_tensors import is_dtensor, make_whole, shard_like

if TYPE_CHECKING:
    from accelerate import Accelerator

_WHERE = "self.model, built on the meta device"
_EXPECTED = "modules that initialize their own tensors"


def fill(model: nn.Module, device: torch.device) -> None:
    """Initialize a model in place, sharded or not, with the same values as if it had been built with them.

    One part after the other is initialized in full, on all processes with the main process's state of torch's
    generator, and each process keeps its shards. No process ever holds more than its shards and the tensors of one
    part.

    Processes: collective.

    Raises:
        ModuleContractError: A part cannot be initialized.
    """
    _require_fillable(model)  # before memory is taken for it
    untie(model)  # a model that is built in full initializes each occurrence of a tied weight, and keeps the first
    model.to_empty(device=device)
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(broadcast_object(torch.get_rng_state()))
        # transformers initializes in an order of its own, and ties weights only afterwards.
        if _is_of_transformers(model):
            draw_first_values(model, as_wholes)
            tie: Any = model.tie_weights
            tie()
            return
        bottom_up: dict[nn.Module, None] = {}  # the order in which the parts were built: children before their parent
        model.apply(lambda part: bottom_up.setdefault(part))
        for part in filter(_has_tensors, bottom_up):
            with as_wholes(part), torch.no_grad():
                _reset(part)


def _is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is from transformers, which can initialize each of its parts."""
    if "transformers" not in sys.modules:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _require_fillable(model: nn.Module) -> None:
    if _is_of_transformers(model):  # which initializes each part, and ties weights again
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # `reset_parameters` of each layer knows nothing of the tie.
    if len(names) > len(list(model.parameters())):
        got, do = "tied weights, each of which would get different values", "build it on the CPU"
        raise fail(ModuleContractError, _WHERE, got=got, expected="weights that only transformers ties", do=do)
    for name, part in model.named_modules():
        if _has_tensors(part) and not hasattr(part, "reset_parameters"):
            got = f"{name or 'the model'}, a {type(part).__name__} with tensors but without reset_parameters"
            do = "define reset_parameters(self), which initializes its tensors, as in torch's layers"
            raise fail(ModuleContractError, _WHERE, got=got, expected=_EXPECTED, do=do)


def _has_tensors(part: nn.Module) -> bool:
    return any(True for _ in chain(part.parameters(recurse=False), part.buffers(recurse=False)))


def _reset(part: nn.Module) -> None:
    reset: Callable[[], None] = part.reset_parameters  # type: ignore[assignment]
    reset()


@contextmanager
def as_wholes(part: nn.Module) -> Iterator[None]:
    """Give a part and its children full parameters on the CPU, and keep this process's shards of them afterwards.

    Includes children, because some parts initialize their children's values again (attention in GPT-2). Values read
    from a file are kept.

    Processes: collective.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    for module in (part, *part.children()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if has_first_value(parameter):
                continue
            replaced.append((module, name, parameter))
            # The part's parameters are about to be initialized, those of a child have been.
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            if module is not part:
                whole.copy_(make_whole(parameter.detach()))
            setattr(module, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    with _RejectsDraws():
        yield
    for module, name, parameter in replaced:
        value = shard_like(getattr(module, name).detach(), parameter)
        local_part(parameter.detach()).copy_(local_part(value))
        setattr(module, name, parameter)


class _RejectsDraws(TorchFunctionMode):
    """Rejects in-place initialization of sharded tensors: each process would initialize its shard independently."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        changed = next(chain(args, keywords.values()), None)
        # By the trailing underscore, as torch names operations that write into their first argument.
        if name.endswith("_") and not name.endswith("__") and is_dtensor(changed):
            got = f"initial values that a part draws ({name}) for parts below its children"
            raise fail(ModuleContractError, _WHERE, got=got, expected=_EXPECTED, do="build it on the CPU")
        return func(*args, **keywords)


_accelerator: Accelerator | None = None


@contextmanager
def building_for(accelerator: Accelerator | None) -> Iterator[None]:
    """Load models in distributed form in this context, if the Accelerator of a run distributes them.

    Args:
        accelerator: None loads them in full.
    """
    global _accelerator  # noqa: PLW0603 - `configure_model` takes no arguments
    before, _accelerator = _accelerator, accelerator
    try:
        yield
    finally:
        _accelerator = before


def accelerator_to_build_for() -> Accelerator | None:
    """Return the Accelerator of the run whose model is being built; None if each process holds the full model."""
    if _accelerator is None or not (_accelerator.is_fsdp2 or tensor_parallel_size(_accelerator) > 1):
        return None
    return _accelerator


def distribute_empty(model: nn.Module, accelerator: Accelerator) -> None:
    """Split a model without values by tensor parallelism, and shard it, as requested by the run.

    Processes: collective.
    """
    if tensor_parallel_size(accelerator) > 1:
        addon("split_tensors")(model, accelerator)
    if accelerator.is_fsdp2:
        shard_model(model, accelerator, None)


def device_of_shards(accelerator: Accelerator) -> torch.device:
    """Return the device of a model's shards between the steps."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    if accelerator.is_fsdp2 and isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
        return torch.device("cpu")
    device: torch.device = accelerator.device
    return device
