"""Sharded models (FSDP2, HSDP): each process holds a part of each parameter, and every forward needs all processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from accmt.data import MicroBatch
from accmt.engine.base import Engine, reject_renormalization
from accmt.engine.borrowed import may_be_uneven
from accmt.engine.meta_device import device_of_shards, fill
from accmt.engine.model_calls import explaining_parts
from accmt.engine.quantized import reject_sharding_quantized_weights
from accmt.engine.reduction import is_container, require_same_tensors
from accmt.engine.shards import (
    is_by_fsdp,
    is_on_meta,
    is_sharded,
    require_known_shards,
    reshard,
    shard_model,
    try_steps_of_shards,
)
from accmt.errors import ArgumentError, ModuleContractError, fail
from accmt.libraries.private_names import tree_leaves
from accmt.options import Settings
from accmt.options.optimizer_and_scheduler_arguments import members_of
from accmt.precisions import hold_in_float32
from accmt.processes import num_processes
from accmt.saving.weights import ShardedState, WholeState


class Sharded(Engine):
    """Shards, which are gathered for each forward; gradients are reduced in each backward."""

    needs_all: ClassVar[bool] = True
    inference_mode = torch.no_grad  # the memory of FSDP2's gathered parameters is used in training again

    def require_trainable(self, settings: Settings) -> None:
        if self.accelerator.is_fsdp2:
            reject_sharding_quantized_weights(self.unwrapped_model)
        if settings.hps.halves_micro_batches:
            got = "a sharded model: a process that runs out of memory cannot leave a collective that the others are in"
            do = "leave it out (`tune` uses it too), and use a smaller batch size or gradient_checkpointing=True"
            expected = "a model that each process has in full"
            raise fail(ArgumentError, "max_micro_batch_size: auto", got=got, expected=expected, do=do)

    def spread(self) -> None:
        model = self.unwrapped_model
        if is_on_meta(model):
            # Sharded first, so that no process ever holds all of its values.
            if self.accelerator.is_fsdp2 and not is_by_fsdp(model):
                _require_forward(model)
                shard_model(model, self.accelerator, None)
            fill(model, device_of_shards(self.accelerator))

    def distribute(self) -> None:
        model = self.unwrapped_model
        if not is_sharded(model):
            require_same_tensors(model)
        self.spread()
        # Accelerate does it for FSDP2. Source: `fsdp2_prepare_model` in accelerate/utils/fsdp_utils.py.
        if self.accelerator.mixed_precision in ("fp16", "bf16") and not self.accelerator.is_fsdp2:
            hold_in_float32(model)

    def require_optimizer(self, optimizer: Any) -> None:
        reject_low_bit_states(optimizer)

    def wrap(self, optimizer: Any, *, set_to_none: bool, may_fail: bool = False) -> None:
        """Shard the model, unless it already is: by a previous run, by the program, or by tensor parallelism."""
        self._shard(optimizer)
        reject_renormalization(self.unwrapped_model)
        try_steps_of_shards(optimizer)

    def wrap_for_evaluation(self) -> None:
        self._shard(None)

    def _shard(self, optimizer: Any) -> None:
        model = self.unwrapped_model
        if is_sharded(model):
            require_known_shards(model)
        else:
            _require_forward(model)
            shard_model(model, self.accelerator, optimizer)
        self._use(model)

    @contextmanager
    def running(self, micro_batch: MicroBatch | None) -> Iterator[None]:
        with ExitStack() as stack:
            if micro_batch is not None and may_be_uneven(micro_batch) and num_processes() > 1:
                stack.enter_context(self._running_uneven(micro_batch))
            calls = stack.enter_context(explaining_parts(self.unwrapped_model))
            self.calls = None
            # Alone, a step may return None without a call of the model: no other process waits for its shards.
            if num_processes() > 1:
                self.calls = calls
            yield

    def zero_loss(self) -> torch.Tensor | None:
        if self.calls is None:
            return None
        # The others wait in their forward for the shards of this process, which would not come.
        if not self.calls:
            got = "None before self.model was called, while the forward of the other processes needs this one"
            do = "call self.model(...) before `return None`; or train without sharding"
            expected = "a call of the model in every step"
            raise fail(ModuleContractError, "training_step", got=got, expected=expected, do=do)
        leaves = tree_leaves(self.calls)  # in the outputs of transformers models, too
        outputs = [output for output in leaves if isinstance(output, torch.Tensor) and output.requires_grad]
        # The sum over all outputs: each layer's backward gathers its shards, and the others wait for it.
        return sum((output.sum() for output in outputs), outputs[0].new_zeros(())) * 0.0

    @contextmanager
    def unwrapped(self, *, trains: bool = False) -> Iterator[None]:
        """Reduce each process's memory to its shards again afterwards; there is no model without communication."""
        try:
            yield
        finally:
            reshard(self.unwrapped_model)

    def quiet_weights(self) -> list[nn.Parameter]:
        return []

    def weights(self) -> WholeState | ShardedState:
        return ShardedState(self.unwrapped_model)


def _require_forward(model: nn.Module) -> None:
    """Reject sharding a container: its submodules are called without it, and only its call would gather them."""
    if is_container(model):
        got = f"a {type(model).__name__} without a forward, sharded by FSDP2"
        do = "give it a forward that calls its submodules, or train it without `parallelism`"
        raise fail(ModuleContractError, "self.model", got=got, expected="a model that is called itself", do=do)


def reject_low_bit_states(optimizer: Any) -> None:
    """Reject optimizers that cannot step sharded weights, or whose states of them cannot be stored."""
    for member in members_of(optimizer):
        library, name = type(member).__module__.partition(".")[0], type(member).__name__
        # Those of torchao that are private have plain states.
        if library == "bitsandbytes" or (library == "torchao" and not name.startswith("_")):
            got = f"{name} of {library}, and a model with sharded weights (FSDP2, tensor parallelism)"
            expected = "an optimizer of torch for shards; or full weights, without FSDP2"
            do = "set `type: AdamW` in `optim`; or launch with `accmt launch --strat ddp`"
            raise fail(ModuleContractError, "the optimizer", got=got, expected=expected, do=do)
