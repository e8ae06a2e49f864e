"""Communication by a user's step in a micro-batch that does not reach every process or is divided unevenly.

A process without a batch would not run its step, and the others' collectives would wait for it. So the processes
synchronize once in such a micro-batch: those with a batch at the first collective of their step or after it, those
without immediately. If any step communicates, processes without a batch borrow another process's batch and run the
step, but count nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accmt.data import MicroBatch
from accmt.engine.reduction import gather_ragged
from accmt.errors import ArgumentError, ModuleContractError, explain, file_of
from accmt.libraries.private_names import GATHERING, SUMMING, watching_collectives
from accmt.messages import warn_once
from accmt.processes import broadcast_object, gather_from_data, gather_objects, num_data_processes, num_processes

_num_with_batch: int | None = None  # processes that have a batch, if not all have one
_is_borrowed = False  # whether this process runs a step on a borrowed batch
_is_ragged = False  # whether the current code handles unequal and borrowed batches itself


def meet(step: str, own: Any, *, communicates: bool) -> Any:
    """Return this process's batch or, if it has none and the others communicate, another process's batch.

    Processes: collective.

    Args:
        step: The name of the step, for errors.
        own: This process's batch; None if it has none.
        communicates: Whether this process's step communicates.

    Raises:
        ModuleContractError: Some steps communicate and others do not.
    """
    global _num_with_batch  # noqa: PLW0603 - a mean over processes reads it
    every = gather_objects((own is not None, communicates))
    _num_with_batch = sum(has_batch for has_batch, _ in every)
    if not any(one for _, one in every):
        return own
    apart = [index for index, (has_batch, one) in enumerate(every) if has_batch and not one]
    if apart:
        there = [index for index, (_, one) in enumerate(every) if one]
        got = f"a collective of torch.distributed on processes {there}, but none on {apart}, which have a batch as well"
        do = "communicate in every step or in none, or on a condition that is equal on all processes"
        raise ModuleContractError(explain(step, got, "the same collectives on every process", do))
    has_batch = [one for one, _ in every]
    if all(has_batch):
        return own
    lent = broadcast_object(own, source=has_batch.index(True))
    return lent if own is None else own


@contextmanager
def running_step(step: str, micro_batch: MicroBatch, *, needs_all: bool) -> Iterator[None]:
    """Run the step on this process's batch: synchronize with the others, and check the shapes that they exchange.

    Args:
        step: The name of the step, for errors.
        micro_batch: What it runs on; its batch must not be None.
        needs_all: Whether the model itself communicates, so that the processes are already synchronized.
    """
    if needs_all:
        with _exact_accelerator():
            yield
        return
    has_met = not micro_batch.is_partial

    def before(name: str, tensors: list[Tensor]) -> None:
        nonlocal has_met
        if not has_met:
            has_met = True
            meet(step, micro_batch.batch, communicates=True)
        _check(step, name, tensors, is_partial=micro_batch.is_partial)

    with watching_collectives(before), _exact_accelerator():
        yield
    if not has_met:
        meet(step, micro_batch.batch, communicates=False)


@contextmanager
def running_borrowed_step(step: str, *, needs_all: bool) -> Iterator[None]:
    """Run the step on a borrowed batch, like `running_step`: it contributes 0 to sums over processes."""
    global _is_borrowed  # noqa: PLW0603 - what the step calls reads it

    def before(name: str, tensors: list[Tensor]) -> None:
        if not needs_all:
            _check(step, name, tensors, is_partial=True)
        for tensor in tensors if name in SUMMING else ():
            tensor.data.zero_()

    _is_borrowed = True
    try:
        with watching_collectives(before), _exact_accelerator():
            yield
    finally:
        _is_borrowed = False


def _check(step: str, name: str, tensors: list[Tensor], *, is_partial: bool) -> None:
    """Reject tensors of unequal shapes, which would crash a backend, and warn about samples that count twice."""
    if _is_ragged or name not in GATHERING | SUMMING:
        return
    every = gather_objects([tuple(tensor.shape) for tensor in tensors])
    if any(shapes != every[0] for shapes in every):
        got = f"a collective of shapes {', '.join(map(str, every))} on processes 0 to {len(every) - 1}"
        expected = "equal shapes: the last samples of the data are divided as evenly as possible, so sizes differ by 1"
        do = "accmt.gather_with_gradients(tensor) accepts unequal sizes, like self.accelerator.gather_for_metrics; "
        do += 'metrics=... gathers automatically; or set data_options={"drop_last": True}'
        raise ModuleContractError(explain(step, got, expected, do))
    if is_partial and name in GATHERING:
        way_out = 'accmt.gather_with_gradients and data_options={"drop_last": True} avoid this'
        if step != "training_step":
            way_out = "metrics=... and self.accelerator.gather_for_metrics avoid this"
        what = f"{step} gathers over processes although there are fewer last batches than processes"
        warn_once(
            f"{what}: a process without a batch repeats another process's, which then counts twice; {way_out}",
            about=what,
        )


class _Gather(torch.autograd.Function):
    """Concatenates the rows of all processes; a row's gradient is the sum over the losses of all processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> tuple[Tensor, int]:
        joined, numbers = gather_ragged(rows[:0] if _is_borrowed else rows)
        first = sum(numbers[: dist.get_rank()])
        ctx.own = slice(first, first + numbers[dist.get_rank()])
        ctx.shape = rows.shape
        return joined, first

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        own = gradient[ctx.own]
        return own if own.shape == ctx.shape else gradient.new_zeros(ctx.shape)  # for a borrowed batch


def gather_with_gradients(rows: Tensor) -> tuple[Tensor, int]:
    """Return the concatenated rows of all processes, with gradients, and the index of this process's first row.

    Processes may have different numbers of rows. In a step the gradient equals that of one big batch, without an extra
    factor: a loss of this process's rows against all rows is weighted by its samples, like any loss.

    Processes: collective, also in the backward.

    Args:
        rows: `[samples, ...]`; only the first dimension may differ between processes.

    Raises:
        ArgumentError: `rows` is a scalar; or processes share batches, as with tensor parallelism.

    Examples:
        >>> import torch
        >>> texts, first = gather_with_gradients(torch.eye(2))
        >>> (texts.shape, first + torch.arange(2))
        (torch.Size([2, 2]), tensor([0, 1]))
    """
    global _is_ragged  # noqa: PLW0603 - the check of shapes reads it
    if rows.ndim == 0:
        got, expected = "a tensor of shape []", "rows: [samples, ...]"
        raise ArgumentError(explain("gather_with_gradients", got, expected, "pass the features of the batch"))
    if num_processes() == 1:
        return rows, 0
    if num_data_processes() != num_processes():
        got, expected = "processes that share batches (tensor parallelism)", "processes with separate batches"
        raise ArgumentError(explain("gather_with_gradients", got, expected, 'Trainer(parallelism={"fsdp": True})'))
    was, _is_ragged = _is_ragged, True
    try:
        joined, first = _Gather.apply(rows)  # type: ignore[no-untyped-call]
    finally:
        _is_ragged = was
    # The others do not see the rows of a borrowed batch.
    return (torch.cat([joined, rows]), len(joined)) if _is_borrowed else (joined, first)


@dataclass
class _Nothing:
    """The contribution of a process with a borrowed batch to a gather."""


@contextmanager
def _exact_accelerator() -> Iterator[None]:
    """Let methods of every Accelerator ignore borrowed batches, and `gather` accept unequal ones."""
    global _num_with_batch  # noqa: PLW0603 - as above
    from accelerate import Accelerator
    from accelerate.utils import recursively_apply

    before = Accelerator.gather, Accelerator.gather_for_metrics, Accelerator.reduce

    def gather(_: Accelerator, input_data: Any, use_gather_object: bool = False) -> Any:  # noqa: FBT001, FBT002
        global _is_ragged  # noqa: PLW0603 - the check of shapes reads it
        from accelerate.utils import send_to_device

        was, _is_ragged = _is_ragged, True
        try:
            every = gather_from_data(_Nothing() if _is_borrowed else send_to_device(input_data, "cpu"))
        finally:
            _is_ragged = was
        return _join(input_data, [one for one in every if not isinstance(one, _Nothing)])

    def reduce(self: Accelerator, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        reduced = before[2](self, tensor, reduction, scale)
        if reduction != "mean" or not _num_with_batch:
            return reduced
        return recursively_apply(lambda one: one * (num_processes() / _num_with_batch), reduced)

    Accelerator.gather, Accelerator.gather_for_metrics, Accelerator.reduce = gather, gather, reduce
    try:
        yield
    finally:
        Accelerator.gather, Accelerator.gather_for_metrics, Accelerator.reduce = before
        _num_with_batch = None


def _join(own: Any, every: list[Any]) -> Any:
    """Concatenate data like Accelerate: tensors along their first dimension, also in containers; lists of objects."""
    if isinstance(own, Tensor):
        return torch.cat([one.reshape(1) if one.ndim == 0 else one for one in every]).to(own.device)
    if isinstance(own, Mapping):
        return type(own)({name: _join(own[name], [one[name] for one in every]) for name in own})  # type: ignore[call-arg]
    if isinstance(own, list | tuple) and any(isinstance(one, Tensor | Mapping) for one in own):
        joined = [_join(one, [other[index] for other in every]) for index, one in enumerate(own)]
        return type(own)(*joined) if hasattr(own, "_fields") else type(own)(joined)
    return [item for one in every for item in one]


# ---- Whether a step calls the model itself: only its call averages gradients and gathers shards.


@contextmanager
def counting_calls(wrapper: nn.Module) -> Iterator[list[None]]:
    """Yield a list that gets an entry for each call of the wrapper."""
    calls: list[None] = []
    # Before other hooks: one that gathers shards may fail because another process has failed.
    handle = wrapper.register_forward_pre_hook(lambda _module, _inputs: calls.append(None), prepend=True)
    try:
        yield calls
    finally:
        handle.remove()


def require_call(calls: list[None]) -> None:
    """Reject a step that bypasses the model's wrapper: each process would train alone.

    Raises:
        ModuleContractError: There was no call.
    """
    if not calls:
        got = "self.model was not called, so the gradients of the processes would not be averaged"
        expected = "the loss computed through self.model(...), or a self.model without a forward"
        do = "call self.model(...), not a submodule or method of it; or make self.model an nn.ModuleDict of its parts"
        raise ModuleContractError(explain("training_step", got, expected, do))


@contextmanager
def explaining_parts(model: nn.Module) -> Iterator[list[None]]:
    """Explain the error of calling a submodule of a sharded model directly: only the model's call gathers its shards.

    Yields a list that gets an entry for each call of the model.
    """
    with counting_calls(model) as calls:
        try:
            yield calls
        except RuntimeError as error:
            if calls and "to have dtype" in str(error):
                got = f"another dtype than the model was sharded with, for example from model.to() in a hook: {error}"
                expected, do = "the dtype from the start of the run", 'for example Trainer(mixed_precision="bf16")'
                raise ModuleContractError(explain("self.model", got, expected, do)) from error
            if calls or "torch/" not in file_of(error):  # raised by the user's own code
                raise
            got = f"a submodule of self.model, which is sharded, was called instead of self.model itself: {error}"
            expected, do = (
                "self.model(...), whose call gathers the shards",
                "call self.model(...), or train without FSDP2",
            )
            raise ModuleContractError(explain("a step of the module", got, expected, do)) from error
