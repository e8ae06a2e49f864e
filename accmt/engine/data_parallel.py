"""Data parallelism: each process has the whole model and separate batches, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accmt.data import MicroBatch
from accmt.engine.base import Engine
from accmt.engine.reduction import (
    TransparentWrapper,
    add_note_of_unused,
    average_gradients,
    broadcast_buffers,
    broadcast_weights,
    is_container,
    rebuild_reducer,
    reduce_nothing,
    reduces_only_whole,
    require_all_gradients,
    sending_quantized_weights,
    settle_buckets,
)
from accmt.engine.replicas import reject_renormalization, require_equal_weights
from accmt.engine.step_collectives import counting_calls, meet, running_borrowed_step, running_step
from accmt.errors import ArgumentError, explain
from accmt.libraries.private_names import left_out_by_ddp
from accmt.processes import num_processes
from accmt.protocols import ModelOwner
from accmt.sharded_tensors import is_expanded

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer


class DataParallel(Engine):
    """Replicas whose gradients `DistributedDataParallel` averages in the last backward of a window.

    A container, or a model without trained parameters, is not wrapped: its gradients are averaged explicitly at the end
    of the window. So are the gradients of a micro-batch that does not reach every process.
    """

    def __init__(self, module: ModelOwner, accelerator: Accelerator) -> None:
        super().__init__(module, accelerator)
        self._has_others = num_processes() > 1  # a launcher may start a single process, which Accelerate wraps too
        self._wrapper: TransparentWrapper | None = None
        self._optimizer: Optimizer | None = None
        self._set_to_none = True
        self._reduces_at_end = self._is_unreduced = True

    def wrap(self, optimizer: Optimizer, *, set_to_none: bool) -> None:
        """Wrap the model, unless it is a container of the modules that the steps call."""
        own = self.unwrapped_model
        self._optimizer, self._set_to_none = optimizer, set_to_none
        if is_container(own):
            super().wrap(optimizer, set_to_none=set_to_none)
            broadcast_weights(self.model)
            broadcast_buffers(self.model)
        else:
            views = {name: buffer for name, buffer in own.named_buffers() if is_expanded(buffer)}  # never written
            with sending_quantized_weights(own), left_out_by_ddp(own, views) if views else nullcontext():
                super().wrap(optimizer, set_to_none=set_to_none)
        if isinstance(self.model, DistributedDataParallel):
            self.model.__class__ = TransparentWrapper
        if isinstance(self.model, TransparentWrapper):
            self._wrapper, self.notes_trained = self.model, True
            self._reduces_at_end = self._is_unreduced = False
            self.no_sync = partial(self.accelerator.no_sync, self.model) if self._has_others else None
        reject_renormalization(self.unwrapped_model)
        require_equal_weights(self.unwrapped_model)
        settle_buckets(self.model, set_to_none=set_to_none)

    def begin_epoch(self, *, reduces_at_end: bool) -> None:
        self._reduces_at_end = reduces_at_end or self._wrapper is None

    def begin_window(self) -> None:
        self._is_unreduced = self._reduces_at_end
        if self._reduces_at_end:
            self.share_buffers()  # like the wrapper before a window's first batch

    def own_or_borrowed(self, step: str, micro_batch: MicroBatch) -> Any:
        if not micro_batch.is_partial or micro_batch.batch is not None:
            return micro_batch.batch
        return meet(step, None, communicates=False)

    @contextmanager
    def running(self, step: str, micro_batch: MicroBatch | None) -> Iterator[list[None] | None]:
        with ExitStack() as stack:
            if micro_batch is not None and self._has_others and (micro_batch.is_partial or micro_batch.is_last):
                stack.enter_context(running_step(step, micro_batch, needs_all=False))
            yield stack.enter_context(self._counting_calls())

    @contextmanager
    def running_borrowed(self, step: str) -> Iterator[list[None] | None]:
        with running_borrowed_step(step, needs_all=False), self._counting_calls() as calls:
            yield calls

    @contextmanager
    def _counting_calls(self) -> Iterator[list[None] | None]:
        # The bare model is not wrapped, or its gradients are reduced explicitly.
        if self._module.model is self.unwrapped_model or not self._has_others:
            yield None
            return
        with counting_calls(self.model) as calls:
            yield calls

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        self._is_unreduced = True
        with self.unwrapped(trains=True):
            yield

    def finish_borrowed(self, loss: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        backward(loss * 0.0)
        for parameter, gradient in zip(parameters, gradients, strict=True):  # the others' losses may have added to them
            parameter.grad = gradient

    def leave_out(self, *, was_called: bool, meanwhile: Callable[[], None]) -> None:
        if self._wrapper is None or self._is_unreduced:
            meanwhile()
        else:
            reduce_nothing(self._wrapper, was_called=was_called, meanwhile=meanwhile)

    def require_accumulating(self, number: str) -> None:
        """Reject `static_graph` with accumulation: it counts the gradients of its first backward, and then asserts.

        Source: `Reducer::autograd_hook` in torch/csrc/distributed/c10d/reducer.cpp.
        """
        if self._wrapper is not None and self._wrapper.static_graph:
            got = f"static_graph=True, and {number} per optimizer step"
            expected = (
                "one backward per optimizer step: a static graph cannot skip the reduction of a micro-batch's gradients"
            )
            do = "drop static_graph, or do not accumulate (grad_accumulation_steps, max_micro_batch_size, max_tokens)"
            raise ArgumentError(explain('Trainer(parallelism={"ddp": ...})', got, expected, do))

    def first_backward_check(self) -> Callable[[], bool] | None:
        model = self._wrapper
        if model is None or not reduces_only_whole(model):
            return None

        def check() -> bool:
            if not model.require_backward_grad_sync or self._is_unreduced:
                return False
            require_all_gradients(model)  # before hooks, which may drop gradients on purpose
            return True  # one check per epoch; later torch reports it itself

        return check

    def add_note(self, error: Exception) -> None:
        add_note_of_unused(error, self.model)

    def reduce_remaining(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        if self._is_unreduced:
            average_gradients(self._parameters() if parameters is None else parameters)

    def note_trained(self) -> None:
        if self._wrapper is not None:
            rebuild_reducer(self._wrapper, set_to_none=self._set_to_none)

    def _parameters(self) -> list[nn.Parameter]:
        groups = () if self._optimizer is None else self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]
