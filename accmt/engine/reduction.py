"""Explicit communication: reduces gradients where a process had no batch, shares buffers, compares models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accmt.checkpoint.state_dicts import has_inner_tensors, plain_parts
from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import (
    exchange_in_forward,
    has_gradient_hook,
    left_out_by_ddp,
    note_trained_parameters,
)
from accmt.processes import gather_if_different, num_processes
from accmt.sharded_tensors import without_repetition

_NONE, _SPARSE, _DENSE = range(3)
_SHOWN = 3
_BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel


class TransparentWrapper(DistributedDataParallel):
    """A wrapper with the attributes and submodules of the model itself: `self.model.config`, `self.model[0]`.

    A step that computes its loss only through these is rejected: only a call of the wrapper averages gradients.

    Attributes:
        calls: An entry for each call in the current step.
    """

    calls: list[Any]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Note the call, and call the model."""
        self.calls.append(None)
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Return the wrapper's attribute, or else the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # a wrapper that is being unpickled has none yet: without this, endless recursion
                raise
            return getattr(self.module, name)

    def __getitem__(self, key: Any) -> Any:
        """Return a submodule, such as a layer of `nn.Sequential`."""
        return self.module[key]


def is_container(model: nn.Module) -> bool:
    """Return whether a model is never called itself, such as an `nn.ModuleDict` of networks that a step calls.

    There is no call to wrap, so gradients are averaged explicitly.
    """
    return type(model).forward is nn.Module.forward and "forward" not in vars(model)


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over processes like DistributedDataParallel; a missing gradient counts as zero.

    Processes: collective; every process passes the same parameters. A parameter without a gradient anywhere keeps None.
    """
    if num_processes() == 1 or not parameters:
        return
    # A process without a gradient, or with a sparse one, takes part in the exchange that any other process needs.
    local_kinds = [_kind_of(parameter.grad) for parameter in parameters]
    kinds = torch.tensor(local_kinds, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(kinds, op=dist.ReduceOp.MAX)
    dense = []
    for parameter, kind in zip(parameters, kinds.tolist(), strict=True):
        if kind == _SPARSE:
            parameter.grad = _average_sparse(parameter)
        elif kind == _DENSE:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if gradient.is_sparse:
                gradient = gradient.to_dense()
            parameter.grad = gradient
            dense.append(parameter.grad)
    reduce_together(dense, _average)


def _average(flat: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(flat)
    return flat.div_(num_processes())


def reduce_together(tensors: Iterable[torch.Tensor], reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the values of tensors by what a function returns for vectors of many of them, which are sent together."""
    for bucket in _buckets_of(tensors):
        flat = reduce(torch.cat([tensor.reshape(-1) for tensor in bucket]))
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for part, tensor in zip(parts, bucket, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets_of(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        # `torch.cat` of different types would convert them.
        fits = not bucket or (gradient.dtype, gradient.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not fits or size + gradient.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.nbytes
    if bucket:
        yield bucket


def _kind_of(gradient: torch.Tensor | None) -> int:
    if gradient is None:
        return _NONE
    if gradient.is_sparse and gradient.sparse_dim() == 1:
        return _SPARSE
    return _DENSE


def _average_sparse(parameter: nn.Parameter) -> torch.Tensor:
    """Return the mean of the processes' sparse gradients: their concatenated rows, which `coalesce` adds up."""
    if parameter.grad is None:
        rows, values = parameter.new_zeros(0, dtype=torch.long), parameter.new_zeros((0, *parameter.shape[1:]))
    else:
        gradient = parameter.grad.coalesce()
        rows, values = gradient.indices()[0], gradient.values()
    rows, values = gather_ragged(rows)[0], gather_ragged(values)[0] / num_processes()
    return torch.sparse_coo_tensor(rows[None], values, parameter.shape, check_invariants=False).coalesce()


def gather_ragged(rows: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Return the concatenated rows of all processes, and how many each has.

    Processes: collective.
    """
    num_rows = torch.tensor([len(rows)], device=rows.device)
    counts = [torch.zeros_like(num_rows) for _ in range(num_processes())]
    dist.all_gather(counts, num_rows)
    numbers = list(map(int, counts))
    # `all_gather` takes tensors of equal shape only.
    padded = rows.new_zeros((max(numbers), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.zeros_like(padded) for _ in numbers]
    dist.all_gather(parts, padded)
    for rank, number in enumerate(numbers):
        parts[rank] = parts[rank][:number]
    return torch.cat(parts), numbers


def settle_buckets(model: nn.Module, *, set_to_none: bool) -> None:
    """Let DistributedDataParallel form its final gradient buckets before the first step.

    Normally it rebuilds them after its first backward. With more than two processes the order of a sum depends on the
    gradient's position in its bucket: the first step of a resumed run would be rounded differently from the same step
    of an uninterrupted run.

    Processes: collective.

    Source: `Reducer::should_rebuild_buckets` in torch/csrc/distributed/c10d/reducer.cpp, which decides when, and
        `Reducer::mark_variable_ready_dense`, which divides, or multiplies by the reciprocal.
    """
    # A sum of two numbers is rounded alike in either order.
    if num_processes() <= 2 or not reduces_only_whole(model):
        return
    model.reducer.prepare_for_backward([])
    _sum_of_weights(model).backward()  # type: ignore[no-untyped-call]
    model.zero_grad(set_to_none=set_to_none)


def zero_loss_of(model: DistributedDataParallel, *, was_called: bool) -> torch.Tensor | None:
    """Return a loss of 0 whose backward averages gradients of 0 with the others'; None if they do not average now.

    It is computed from the weights, not from outputs, which may be NaN.

    Processes: collective with the others' forward, unless this process has run its own.
    """
    zero = _sum_of_weights(model) * 0.0
    # Where the step has called the model, its forward has exchanged already; a last backward still expects this output.
    if not was_called or model.require_backward_grad_sync:
        exchange_in_forward(model, zero, was_called=was_called)
    if not model.require_backward_grad_sync:
        return None
    return zero


def _sum_of_weights(model: nn.Module) -> torch.Tensor:
    # Layers such as nn.Embedding(sparse=True), whose gradients the reducer expects to be sparse.
    sparse: set[Any] = set()
    for layer in model.modules():
        if getattr(layer, "sparse", False) and hasattr(layer, "weight"):
            sparse.add(layer.weight)
    sums = []
    for weight in model.parameters():
        if weight.requires_grad:
            sums.append(_sum(weight, is_sparse=weight in sparse))
    return torch.stack(sums).sum()


def reduces_only_whole(model: nn.Module) -> TypeGuard[DistributedDataParallel]:
    """Return whether gradients are averaged only if every parameter gets one: a bucket waits for all of its own."""
    return isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph)


def require_all_gradients(model: DistributedDataParallel) -> None:
    """Reject a window in which trained parameters got no gradient, because then others were not averaged.

    torch reports this only in the next forward pass, after a step with gradients that differ between processes.

    Raises:
        ModuleContractError: There are such parameters.
    """
    trained = {}
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and name not in model.parameters_to_ignore:
            trained[name] = parameter
    names = names_without_gradient(trained)
    if names:
        got = f"no gradient for {shorten(names)}: the loss does not depend on them"
        expected = "a gradient for every trained parameter, because several processes average gradients together"
        do = "freeze them (requires_grad_(False)), or set "
        do += 'Trainer(parallelism={"ddp": {"find_unused_parameters": True}})'
        raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)


def names_without_gradient(trained: Mapping[str, nn.Parameter]) -> list[str]:
    """Return which of the trained parameters got no gradient.

    Raises:
        ModuleContractError: None of them got one.
    """
    names = []
    for name, parameter in trained.items():
        # An optimizer that steps within backward uses a gradient and drops it, in such a hook.
        if parameter.grad is None and not has_gradient_hook(parameter):
            names.append(name)
    # Without this, such a run trains nothing: optimizers skip parameters without a gradient, silently.
    if trained and len(names) == len(trained):
        got = f"a loss without a path to the model: none of its {len(names)} trained parameters has a gradient"
        expected = "a loss that is computed from the outputs of self.model"
        do = "compute it from the outputs themselves: without .detach(), .item(), .tolist(), .numpy(), .data, "
        do += "torch.tensor(...), torch.no_grad(), or requires_grad_() on a result"
        raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)
    return names


def shorten(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of the others."""
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text


def add_note_of_unused(error: Exception, model: nn.Module) -> None:
    """Add advice where torch detects, one step late, that parameters got no gradient."""
    if reduces_only_whole(model) and "find_unused_parameters" in str(error):
        error.add_note(
            "[accmt] the previous step's loss did not depend on all trained parameters, so gradients were not "
            'averaged: set Trainer(parallelism={"ddp": {"find_unused_parameters": True}})'
        )


def _sum(weight: nn.Parameter, *, is_sparse: bool) -> torch.Tensor:
    """Return a number with the same kind of gradient as in training; DistributedDataParallel accepts no other."""
    if weight.is_complex():  # backward starts from real numbers only
        return torch.view_as_real(weight).sum()
    if not is_sparse:
        return weight.sum()
    row = torch.zeros(1, dtype=torch.long, device=weight.device)
    return nn.functional.embedding(row, weight, sparse=True).sum()


def rebuild_reducer(model: DistributedDataParallel, *, set_to_none: bool) -> None:
    """Let DistributedDataParallel average the gradients of the parameters that currently require them.

    It normally records them only when it is built.

    Processes: collective; every process trains the same parameters.
    """
    note_trained_parameters(model)
    settle_buckets(model, set_to_none=set_to_none)


def broadcast_buffers(model: nn.Module) -> None:
    """Copy the main process's buffers, such as running statistics of batch norm, to every process.

    Processes: collective. Training does the same at each forward; this updates them after the last batch.
    """
    broadcast_tensors(model.buffers())


def broadcast_weights(model: nn.Module) -> None:
    """Copy the main process's parameters to every process, like DistributedDataParallel when it is built.

    Processes: collective.
    """
    broadcast_tensors(chain.from_iterable(map(plain_parts, model.parameters())))


@contextmanager
def sending_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Let DistributedDataParallel wrap a model with frozen weights that are tensor wrappers.

    It would concatenate them to send them from the main process, which torchao's tensors do not support. Their inner
    tensors are sent instead.

    Processes: collective.
    """
    frozen = {}
    for name, weight in model.named_parameters():
        if has_inner_tensors(weight) and not weight.requires_grad:
            frozen[name] = weight
    with ExitStack() as stack:
        if frozen:
            stack.enter_context(left_out_by_ddp(model, frozen))
        yield
    broadcast_tensors(chain.from_iterable(map(plain_parts, frozen.values())))


def broadcast_tensors(tensors: Iterable[torch.Tensor], device: torch.device | None = None) -> None:
    """Copy the main process's values of tensors to every process, in place.

    Args:
        device: The device for the exchange, one tensor after the other; None for each tensor's device.

    Processes: collective.
    """
    if num_processes() == 1:
        return
    for tensor in tensors:
        values = without_repetition(tensor.detach())
        # NCCL sends only contiguous memory, which a transposed view or an expanded buffer does not have.
        exchanged = values.contiguous() if device is None else values.to(device)
        dist.broadcast(exchanged, src=0)
        if exchanged is not values:
            values.copy_(exchanged)


def require_same_tensors(model: nn.Module) -> None:
    """Check that the model has the same tensors on all processes, which exchange them in order.

    If they differ, some collectives would wait forever, and others would mix up weights without an error.

    Processes: collective.

    Raises:
        ModuleContractError: Names, shapes or dtypes differ.
    """
    tensors = chain(model.named_parameters(), model.named_buffers())
    local = {name: f"{list(tensor.shape)} of {tensor.dtype}" for name, tensor in tensors}
    descriptions = gather_if_different(local)
    for rank, here in enumerate(descriptions):
        on_main = descriptions[0]
        for name in {**on_main, **here}:
            expected, actual = on_main.get(name, "missing"), here.get(name, "missing")
            if expected == actual:
                continue
            got = f"{name!r} is {expected} on process 0, and {actual} on process {rank}"
            do = "build the model with the same arguments everywhere, not depending on rank, files or random numbers"
            raise fail(ModuleContractError, "self.model", got=got, expected="the same model on every process", do=do)
