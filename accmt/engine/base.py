"""The interface between a run and its engine: how the processes train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accmt.data import MicroBatch, SourceOptions
from accmt.data.windows import WindowMaker
from accmt.engine.borrowed import running_uneven_step
from accmt.engine.meta_device import fill
from accmt.engine.quantized import find_quantized
from accmt.engine.reduction import broadcast_buffers, broadcast_weights, is_container, require_same_tensors
from accmt.engine.shards import is_on_meta
from accmt.engine.sync_batchnorm import (
    adding_no_samples,
    restore_batch_norm,
    synchronized_layers,
    without_synchronization,
)
from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import forget_prepared, prepare_alone
from accmt.options import Settings
from accmt.precisions import autocast, hold_in_float32
from accmt.processes import num_data_processes, num_processes
from accmt.registry import addon
from accmt.saving.weights import ShardedState, WholeState
from accmt.sharded_tensors import total_norm

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import AcceleratorModule

NOTHING = nullcontext()


class Engine:
    """How processes train one model; this class needs no other process.

    An engine is chosen once, when a run is set up. Everything that differs between engines is a method or an attribute,
    so no other code checks which engine is used.

    Args:
        module: The module, whose `model` its steps call.
        accelerator: The Accelerator of the run.

    Attributes:
        model: The model as it is trained.
        unwrapped_model: The user's model.
        needs_all: Whether each forward of the model needs every process.
        calls: The outputs of the model's calls in the current step, which a training step must not bypass; None if it
            may.
        no_sync: Returns the context of a micro-batch that is followed by others in its window, if the engine reduces
            gradients in each backward and can skip that; otherwise None.
        notes_trained: Whether the set of trained parameters must not change within a window.
        inference_mode: Returns the context for evaluations.
        divisor: By what the sum of the gradients of all processes is divided.
        total_norm: Returns the norm of gradients, as `total_norm` of `accmt.sharded_tensors`.
    """

    needs_all: ClassVar[bool] = False
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    calls: list[Any] | None = None
    notes_trained: bool = False
    inference_mode: type[torch.inference_mode | torch.no_grad] = torch.inference_mode
    total_norm: Callable[..., torch.Tensor] = staticmethod(total_norm)

    def __init__(self, module: AcceleratorModule, accelerator: Accelerator) -> None:
        self._module = module
        self.accelerator = accelerator
        self.divisor = num_data_processes()
        self.model: nn.Module = module.model
        self.unwrapped_model: nn.Module = module.model

    def require_trainable(self, settings: Settings) -> None:
        """Check, before the model is changed, that it can be trained with the settings."""

    def spread(self) -> None:
        """Distribute what has to be distributed before the optimizer is built.

        That is a model that is split by tensor parallelism (and sharded if there are more processes), and a model
        without values.

        Processes: collective.
        """
        if is_on_meta(self.unwrapped_model):
            fill(self.unwrapped_model, self.accelerator.device)

    def distribute(self) -> None:
        """Move the model to its device and precision before its optimizer is built.

        Processes: collective.
        """
        model, moves_model = self.unwrapped_model, self.accelerator.device_placement
        require_same_tensors(model)  # before anything is exchanged, for example in the test of the optimizer
        self.spread()
        if moves_model:
            model.to(self.accelerator.device)
        # Weights that were read in 16 bits would round away small updates.
        if self.accelerator.mixed_precision in ("fp16", "bf16"):
            hold_in_float32(model)
        if moves_model and any(True for _ in find_quantized(model)):
            with autocast(self.accelerator):
                addon("try_quantized_layers")(model)

    def require_optimizer(self, optimizer: Any) -> None:
        """Check that the optimizer supports the parameters as they are trained."""

    def wrap(self, optimizer: Any, *, set_to_none: bool, may_fail: bool = False) -> None:
        """Set `model` to the trained model, and check that it starts identical on all processes.

        Processes: collective.

        Args:
            optimizer: The optimizer.
            set_to_none: Whether gradients are set to None after each step.
            may_fail: Whether a process may fail in a micro-batch without ending the run, so that forward and backward
                must not need the others.
        """
        model = self.unwrapped_model
        if is_container(model):
            self._use(prepare_alone(model, self.accelerator))
        else:
            self._use(self.accelerator.prepare(model))  # without the optimizer, whose state it would load again

    def wrap_for_evaluation(self) -> None:
        """Set `model` to the model for evaluation without training.

        Processes: collective; every process gets the main process's weights, as in training.
        """
        self._use(prepare_alone(self.unwrapped_model, self.accelerator))
        broadcast_weights(self.model)

    def _use(self, model: nn.Module) -> None:
        self.model = model
        self.unwrapped_model = self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def detach(self) -> None:
        """Restore the module's own model without the run's wrappers, and release it from the Accelerator."""
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        # The Accelerator may live on, and would keep the model's memory.
        forget_prepared(model, self.model, self.accelerator)
        restore_batch_norm(model)
        self._module.model = model

    def arrange(self, options: SourceOptions) -> SourceOptions:
        """Return the options of data as this engine needs them to be divided among the processes."""
        return options

    def group(self, maker: WindowMaker) -> WindowMaker:
        """Return the maker of windows of training data for this engine."""
        return maker

    def around_backward(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a function that creates the context of each backward, or None."""
        return None

    def begin_window(self) -> None:
        """Start an accumulation window.

        Processes: collective.
        """

    def running(self, micro_batch: MicroBatch | None) -> AbstractContextManager[None]:
        """Return the context in which a step runs, on this process's batch or a borrowed one.

        It explains errors, sets `calls`, and lets a borrowed batch contribute nothing to what the step communicates.

        Args:
            micro_batch: What it runs on; None if all processes have equal batches.
        """
        return NOTHING

    @contextmanager
    def _running_uneven(self, micro_batch: MicroBatch) -> Iterator[None]:
        # In evaluation mode, batch norm exchanges nothing.
        is_borrowed = micro_batch.batch is None and self.unwrapped_model.training
        layers = synchronized_layers(self.unwrapped_model) if is_borrowed else ()
        with running_uneven_step(micro_batch), adding_no_samples(layers):
            yield

    def zero_loss(self) -> torch.Tensor | None:
        """Return a loss of 0 with which this process takes part in the others' backward, after a step without a loss.

        None if they do not need it there.

        Processes: collective with the others' forward, if this process's step has not called the model.

        Raises:
            ModuleContractError: The others' forward needed this process.
        """
        return None

    def require_accumulating(self, number: str) -> None:
        """Check that gradients of several micro-batches can be accumulated.

        Args:
            number: The number of micro-batches per optimizer step, as text.
        """

    def first_backward_check(self) -> Callable[[], bool] | None:
        """Return a function to call after each backward until it returns True, or None."""
        return None

    def add_note(self, error: Exception) -> None:
        """Add advice to an error of a step if torch's own message has none."""

    def end_micro_batch(self, micro_batch: MicroBatch) -> None:
        """Act on the gradients of a micro-batch, after its backward if there was one.

        Processes: collective, unless forward and backward failed on some.
        """

    def reduce_gradients(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Reduce the gradients of a finished window, if the backward of the model does not.

        Processes: collective.

        Args:
            parameters: Parameters whose gradients are reduced; None for the optimizer's.
        """

    def note_trained(self) -> None:
        """Average the gradients of the parameters that currently require them.

        Processes: collective; every process trains the same parameters.
        """

    def share_buffers(self) -> None:
        """Copy the main process's buffers, such as running statistics of batch norm, to every process.

        Processes: collective.
        """
        broadcast_buffers(self.unwrapped_model)

    @contextmanager
    def unwrapped(self, *, trains: bool = False) -> Iterator[None]:
        """Let the module's steps use the model without communication, as far as possible.

        Args:
            trains: Whether it is in training mode, in which batch norm may communicate.
        """
        wrapped = self._module.model
        self._module.model = self.unwrapped_model
        layers = synchronized_layers(self.unwrapped_model) if trains else ()
        try:
            with without_synchronization(layers):
                yield
        finally:
            self._module.model = wrapped

    def quiet_weights(self) -> list[nn.Parameter]:
        """Return the weights that nothing but the optimizer and the user's code writes: none if the engine does."""
        return list(self.unwrapped_model.parameters())

    def weights(self) -> WholeState | ShardedState:
        """Return the model's weights for saving: in full, or to be gathered one by one.

        Processes: collective.
        """
        return WholeState(self.accelerator.get_state_dict(self.model))


class Alone(Engine):
    """A single process."""


def reject_renormalization(model: nn.Module) -> None:
    """Reject embeddings that change their weights in the forward pass: each process changes those of its own batch.

    Raises:
        ModuleContractError: A layer has a `max_norm`, and there are several processes.
    """
    if num_processes() == 1:
        return
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            path = f"self.model.{name}".removesuffix(".")
            got = f"max_norm={layer.max_norm}: each process rescales the rows of its own batch in the forward pass"
            do = (
                "leave max_norm out, and rescale all rows after each step: def on_after_optimizer_step(self): "
                f"self.unwrapped_model.get_submodule({name!r}).weight.data.renorm_("
                f"{layer.norm_type:g}, 0, {layer.max_norm:g})"
            )
            raise fail(ModuleContractError, path, got=got, expected="weights that only the optimizer changes", do=do)
