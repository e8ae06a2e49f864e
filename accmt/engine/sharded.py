"""Sharded models (FSDP2, HSDP): each process holds a part of each parameter, and every forward needs all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from accmt.data import MicroBatch
from accmt.engine.base import Engine
from accmt.engine.calls import explaining_parts
from accmt.engine.shards import reshard
from accmt.engine.step_collectives import meet, running_borrowed_step, running_step
from accmt.errors import ModuleContractError, explain
from accmt.processes import num_processes
from accmt.saving.streaming import ShardedState, WholeState


class Sharded(Engine):
    """Shards, which are gathered for each forward; gradients are reduced in each backward."""

    needs_all: ClassVar[bool] = True
    inference_mode = torch.no_grad  # what FSDP2 makes whole has memory that is used in training again

    def own_or_borrowed(self, step: str, micro_batch: MicroBatch) -> Any:
        if not micro_batch.is_partial or num_processes() == 1:
            return micro_batch.batch
        return meet(step, micro_batch.batch, communicates=True)

    @contextmanager
    def running(self, step: str, micro_batch: MicroBatch | None) -> Iterator[list[None] | None]:
        is_uneven = micro_batch is not None and (micro_batch.is_partial or micro_batch.is_last)
        with ExitStack() as stack:
            if micro_batch is not None and is_uneven and num_processes() > 1:
                stack.enter_context(running_step(step, micro_batch, needs_all=True))
            calls = stack.enter_context(explaining_parts(self.unwrapped_model))
            yield calls if num_processes() > 1 else None

    @contextmanager
    def running_borrowed(self, step: str) -> Iterator[list[None] | None]:
        with running_borrowed_step(step, needs_all=True), explaining_parts(self.unwrapped_model) as calls:
            yield calls

    def leave_out(self, *, was_called: bool, meanwhile: Callable[[], None]) -> None:
        """Reject it: the others need this process in their backward."""
        got, expected = "None, while the other processes need this one in their backward", "a loss"
        do = "return the loss of the batch multiplied by 0, and the weight 0; or train without sharding"
        raise ModuleContractError(explain("training_step", got, expected, do))

    @contextmanager
    def unwrapped(self, *, trains: bool = False) -> Iterator[None]:
        """Let each process hold no more than its shards again afterwards; there is no model without communication."""
        try:
            yield
        finally:
            reshard(self.unwrapped_model)

    def count_writes(self) -> int | None:
        return None

    def weights(self) -> WholeState | ShardedState:
        return ShardedState(self.unwrapped_model)


class Split(Sharded):
    """Tensors that are split over processes which share each batch (tensor parallelism), FSDP2 over the others."""
