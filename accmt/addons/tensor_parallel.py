"""Tensor parallelism: processes that share each batch hold a part of most tensors, and compute with it.

Implemented by transformers (the plan of each model) and torch (`DTensor`). Other tensors, such as those of norms, are
replicated with the same gradients; so operations over all parameters encounter several kinds of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from accmt.engine.reduction import broadcast_tensors, require_same_tensors
from accmt.engine.sharded import Sharded
from accmt.engine.shards import is_by_fsdp, is_on_meta, is_sharded, shard_model, untie
from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import plan_of_tensors
from accmt.module import AcceleratorModule
from accmt.processes import num_data_processes, num_processes
from accmt.sharded_tensors import is_dtensor

if TYPE_CHECKING:
    from accelerate import Accelerator

_NAME = "tp"
_ASKED = 'Trainer(parallelism={"tp": ...})'


class Split(Sharded):
    """Tensors that are split over processes which share each batch (tensor parallelism), with FSDP2 over the others."""

    def __init__(self, module: AcceleratorModule, accelerator: Accelerator) -> None:
        super().__init__(module, accelerator)
        _require_whole_heads(self.unwrapped_model, num_processes() // num_data_processes())

    def spread(self) -> None:
        model, accelerator = self.unwrapped_model, self.accelerator
        comes_split, is_empty = is_sharded(model), is_on_meta(model)
        if not comes_split:
            split_tensors(model, accelerator)
        if accelerator.device_placement and not is_empty:
            model.to(accelerator.device)
        if not is_by_fsdp(model):
            if comes_split and not is_empty:
                share_weights(model, accelerator)
            if accelerator.is_fsdp2:
                shard_model(model, accelerator, None)
        super().spread()

    def around_backward(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return the context that keeps gradients that transformers sums over processes from being summed twice."""
        summed = partial_gradients(self.unwrapped_model)
        return partial(beginning_anew, summed) if summed else None


def split_tensors(model: nn.Module, accelerator: Accelerator) -> None:
    """Split the tensors of a transformers model in place, with its own plan.

    Every process starts with the main process's weights and buffers, as in data parallelism.

    Processes: collective.

    Raises:
        ModuleContractError: The model has no plan, or cannot be split over that many processes.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    mesh: Any = accelerator.torch_device_mesh[_NAME]
    _require_whole_heads(model, mesh.size())
    try:
        plan = plan_of_tensors(model, mesh.size())
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        got = f"a {type(model).__name__} without a plan for tensor parallelism: {error}"
        expected = "a transformers model with a plan (transformers 5.23 or newer), or a model that is already split"
        do = f"split it in configure_model with torch's parallelize_module, over a mesh with a dimension {_NAME!r}"
        do = f'Trainer(parallelism={{"fsdp": True}}), which shards any model; or {do}'
        raise fail(ModuleContractError, _ASKED, got=got, expected=expected, do=do) from error
    require_same_tensors(model)
    if not is_on_meta(model):
        broadcast_tensors([*model.parameters(), *model.buffers()], accelerator.device)
    tied = untie(model)  # a plan is applied to each occurrence, and creates a separate parameter each time
    apply_tensor_parallelism(model, mesh, plan)
    _tie_again(model, tied)
    vars(model)["_tp_size"] = mesh.size()  # read by `generate`


def _require_whole_heads(model: nn.Module, size: int) -> None:
    """Check that the plan of a transformers model keeps whole attention heads on each process.

    Raises:
        ModuleContractError: It does not.
    """
    config: Any = getattr(model, "config", None)
    if not (hasattr(config, "get_text_config") and getattr(model, "tp_plan", None)):
        return
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    plan: Any = model.tp_plan
    if heads is not None and get_kv_heads_per_rank(plan, heads, size) is None:
        got = f"{heads} key and value heads of a {type(model).__name__}, over {size} processes"
        raise fail(
            ModuleContractError,
            _ASKED,
            got=got,
            expected="whole heads on each process",
            do='a size that divides it, such as "tp": 2',
        )


def _tie_again(model: nn.Module, tied: list[list[tuple[nn.Module, str]]]) -> None:
    for (first, first_name), *others in tied:
        parameter = getattr(first, first_name)
        for module, name in others:
            other = getattr(module, name)
            if getattr(other, "placements", None) != getattr(parameter, "placements", None):
                got = f"tied weights of a {type(model).__name__} that its plan splits in different ways"
                do = "tie_word_embeddings=False, or FSDP2"
                raise fail(ModuleContractError, _ASKED, got=got, expected="the same split for both", do=do)
            setattr(module, name, parameter)


def share_weights(model: nn.Module, accelerator: Accelerator) -> None:
    """Copy the main process's weights of an already split model to every process that holds the same ones.

    Those are the replicated tensors; and of split tensors, the parts of the main process and those that share its
    batches.

    Processes: collective.
    """
    tensors = [*model.parameters(), *model.buffers()]
    broadcast_tensors([tensor for tensor in tensors if not is_dtensor(tensor)], accelerator.device)
    if num_data_processes() == 1:
        return
    mesh: Any = accelerator.torch_device_mesh
    for tensor in filter(is_dtensor, tensors):
        dist.broadcast(tensor.to_local().detach(), group=mesh["dp"].get_group(), group_src=0)


def partial_gradients(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters whose gradients transformers sums over the processes of a split with its own hook.

    It does so whenever a gradient is accumulated: at the second micro-batch of a window the sum of the first would be
    summed again (seen with transformers 5.23).
    """
    size = getattr(model, "tp_size", None)
    if size in (None, 1):
        return []
    styles = plan_of_tensors(model, size)
    summed = {name for name, style in styles.items() if style == "replicated_with_grad_allreduce"}
    named = model.named_parameters()
    return [parameter for name, parameter in named if name in summed and not is_dtensor(parameter)]


@contextmanager
def beginning_anew(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Run a backward pass without these parameters' previous gradients, and add them to the result."""
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, before, strict=True):
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
