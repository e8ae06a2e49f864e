"""Data parallelism: each process has the whole model and separate batches, and gradients are averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accmt.data import MicroBatch
from accmt.engine.base import NOTHING, Engine, reject_renormalization
from accmt.engine.borrowed import may_be_uneven
from accmt.engine.reduction import (
    TransparentWrapper,
    add_note_of_unused,
    average_gradients,
    broadcast_buffers,
    broadcast_weights,
    is_container,
    rebuild_reducer,
    reduces_only_whole,
    require_all_gradients,
    sending_quantized_weights,
    settle_buckets,
    zero_loss_of,
)
from accmt.errors import ArgumentError, fail
from accmt.libraries.private_names import left_out_by_ddp, prepare_alone
from accmt.options.optimizer_and_scheduler_arguments import weights_of
from accmt.processes import num_processes
from accmt.sharded_tensors import is_expanded

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.optim import Optimizer

    from accmt import AcceleratorModule


class DataParallel(Engine):
    """Replicas whose gradients `DistributedDataParallel` averages in the last backward of a window.

    A container, or a model without trained parameters, is not wrapped: its gradients are averaged explicitly at the end
    of the window. So are those of a run in which a process may fail in a micro-batch: nobody then waits for it.
    """

    def __init__(self, module: AcceleratorModule, accelerator: Accelerator) -> None:
        super().__init__(module, accelerator)
        self._has_replicas = num_processes() > 1  # a launcher may start a single process, which Accelerate wraps too
        self._wrapper: TransparentWrapper | None = None
        self._optimizer: Optimizer | None = None
        self._set_to_none = True

    def wrap(self, optimizer: Optimizer, *, set_to_none: bool, may_fail: bool = False) -> None:
        """Wrap the model, unless it is a container of the modules that the steps call, or a process may fail."""
        model = self.unwrapped_model
        self._optimizer, self._set_to_none = optimizer, set_to_none
        if is_container(model) or may_fail:
            self._use(prepare_alone(model, self.accelerator))
            # As DistributedDataParallel does when it wraps: the processes may have drawn different weights.
            broadcast_weights(self.model)
            broadcast_buffers(self.model)
        else:
            # DistributedDataParallel sends buffers in place, which torch refuses where elements share memory. Nothing
            # writes to such views, so they are equal.
            views = {name: buffer for name, buffer in model.named_buffers() if is_expanded(buffer)}
            with ExitStack() as stack:
                stack.enter_context(sending_quantized_weights(model))
                if views:
                    stack.enter_context(left_out_by_ddp(model, views))
                super().wrap(optimizer, set_to_none=set_to_none)
        if isinstance(self.model, DistributedDataParallel):  # Accelerate does not wrap a model without trained weights
            self.model.__class__ = TransparentWrapper
            vars(self.model)["calls"] = []
        if isinstance(self.model, TransparentWrapper):
            self._wrapper, self.notes_trained = self.model, True
            self.no_sync = partial(self.accelerator.no_sync, self.model) if self._has_replicas else None
        reject_renormalization(self.unwrapped_model)
        settle_buckets(self.model, set_to_none=set_to_none)

    def begin_window(self) -> None:
        if self._wrapper is None:
            self.share_buffers()  # like the wrapper before a window's first batch

    def running(self, micro_batch: MicroBatch | None) -> AbstractContextManager[None]:
        self.calls = None
        # Not in a preflight step, which runs the bare model.
        if self._wrapper is not None and self._has_replicas and self._module.model is not self.unwrapped_model:
            self.calls = self._wrapper.calls
            self.calls.clear()
        if micro_batch is not None and self._has_replicas and may_be_uneven(micro_batch):
            return self._running_uneven(micro_batch)
        return NOTHING

    def zero_loss(self) -> torch.Tensor | None:
        if self._wrapper is None or not self._has_replicas:
            return None
        return zero_loss_of(self._wrapper, was_called=bool(self.calls))

    def require_accumulating(self, number: str) -> None:
        """Reject `static_graph` with accumulation: it counts the gradients of its first backward, and then asserts.

        Source: `Reducer::autograd_hook` in torch/csrc/distributed/c10d/reducer.cpp.
        """
        if self._wrapper is not None and self._wrapper.static_graph:
            got = f"static_graph=True, and {number} per optimizer step"
            expected = "one backward per optimizer step: a static graph cannot skip the reduction of a micro-batch's "
            expected += "gradients"
            do = "drop static_graph, or do not accumulate (grad_accumulation_steps, max_micro_batch_size, max_tokens)"
            raise fail(ArgumentError, 'Trainer(parallelism={"ddp": ...})', got=got, expected=expected, do=do)

    def first_backward_check(self) -> Callable[[], bool] | None:
        model = self._wrapper
        if model is None or not reduces_only_whole(model):
            return None

        def check() -> bool:
            # Where other micro-batches of the window follow, they may still give the missing gradients.
            if not model.require_backward_grad_sync:
                return False
            require_all_gradients(model)  # before hooks, which may drop gradients on purpose
            return True  # one check per epoch; later torch reports it itself

        return check

    def add_note(self, error: Exception) -> None:
        add_note_of_unused(error, self.model)

    def reduce_gradients(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        if self._wrapper is not None:  # which averages them in the backward
            return
        if parameters is None:
            parameters = []
            if self._optimizer is not None:
                parameters = weights_of(self._optimizer)
        average_gradients(parameters)

    def note_trained(self) -> None:
        if self._wrapper is not None:
            rebuild_reducer(self._wrapper, set_to_none=self._set_to_none)
