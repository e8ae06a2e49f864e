"""The interface between a run and its engine: how the processes train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accmt.data import MicroBatch
from accmt.engine.meta_device import fill
from accmt.engine.quantized import try_quantized_layers
from accmt.engine.reduction import broadcast_buffers, broadcast_weights, is_container, require_same_tensors
from accmt.engine.shards import is_on_meta
from accmt.engine.sync_batchnorm import restore_batch_norm, synchronized_layers, without_synchronization
from accmt.libraries.private_names import buffers_of, forget_prepared, prepare_alone
from accmt.options import Settings
from accmt.precision import autocast, hold_in_float32
from accmt.protocols import ModelOwner
from accmt.saving.weights import ShardedState, WholeState
from accmt.sharded_tensors import is_expanded

if TYPE_CHECKING:
    from accelerate import Accelerator

_NO_CALLS: AbstractContextManager[list[None] | None] = nullcontext()
_NOTHING = nullcontext()


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
        no_sync: Returns the context of a micro-batch that is followed by others in its window, if the engine reduces
            gradients in each backward and can skip that; otherwise None.
        notes_trained: Whether the set of trained parameters must not change within a window.
        inference_mode: Returns the context for evaluations.
    """

    needs_all: ClassVar[bool] = False
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    notes_trained: bool = False
    inference_mode: type[torch.inference_mode | torch.no_grad] = torch.inference_mode

    def __init__(self, module: ModelOwner, accelerator: Accelerator) -> None:
        self._module = module
        self.accelerator = accelerator
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
        model, places = self.unwrapped_model, self.accelerator.device_placement
        require_same_tensors(model)  # before anything is exchanged, for example in the test of the optimizer
        self.spread()
        if places:
            move(model, self.accelerator.device)
        if self.accelerator.mixed_precision in ("fp16", "bf16"):
            hold_in_float32(model)
        if places:
            with autocast(self.accelerator):
                try_quantized_layers(model)

    def require_optimizer(self, optimizer: Any) -> None:
        """Check that the optimizer supports the parameters as they are trained."""

    def wrap(self, optimizer: Any, *, set_to_none: bool) -> None:
        """Set `model` to the trained model, and check that it starts identical on all processes.

        Processes: collective.

        Args:
            optimizer: The optimizer.
            set_to_none: Whether gradients are set to None after each step.
        """
        own = self.unwrapped_model
        if is_container(own):
            self._use(prepare_alone(own, self.accelerator))
        else:
            self._use(self.accelerator.prepare(own))  # without the optimizer, whose state it would load again

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
        own = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        forget_prepared(own, self.model, self.accelerator)
        restore_batch_norm(own)
        self._module.model = own

    def around_backward(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return a function that creates the context of each backward, or None."""
        return None

    def begin_epoch(self, *, reduces_at_end: bool) -> None:
        """Start an epoch of training.

        Args:
            reduces_at_end: Whether micro-batches may fail on a process, so that none of them reduces gradients.
        """

    def begin_window(self) -> None:
        """Start an accumulation window.

        Processes: collective.
        """

    def own_or_borrowed(self, step: str, micro_batch: MicroBatch) -> Any:
        """Return this process's batch; if it has none and the step needs all processes, another process's batch.

        A step on a borrowed batch runs in `running_borrowed` and does not count.

        Processes: collective in a micro-batch that does not reach all of them.

        Args:
            step: The name of the step, for errors.
            micro_batch: This process's part of it.
        """
        return micro_batch.batch

    def running(self, step: str, micro_batch: MicroBatch | None) -> AbstractContextManager[list[None] | None]:
        """Return the context in which a step runs on this process's batch.

        It explains errors, handles communication by the step itself, and yields a list with an entry for each call of
        the model, which a training step must not bypass; None if it may.

        Args:
            step: The name of the step, for errors.
            micro_batch: What it runs on; None if processes need not meet in it.
        """
        return _NO_CALLS

    def running_borrowed(self, step: str) -> AbstractContextManager[list[None] | None]:
        """Return the context for a step on a borrowed batch, which contributes 0 to sums over processes."""
        return _NO_CALLS

    def unreduced(self) -> AbstractContextManager[None]:
        """Return the context of a micro-batch in which processes may behave differently, as far as possible.

        `reduce_remaining` reduces the remaining gradients at the end of the window.
        """
        return _NOTHING

    def finish_borrowed(self, loss: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
        """Take part in the others' backward with the loss of a borrowed batch, and discard its gradients."""
        backward(loss * 0.0)

    def leave_out(self, *, was_called: bool, meanwhile: Callable[[], None]) -> None:
        """Take part, without a loss, in the others' forward and backward.

        Processes: collective if the others reduce their gradients in this micro-batch.

        Args:
            was_called: Whether this process has called the model.
            meanwhile: What the others do between forward and backward.
        """
        meanwhile()

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

    def reduce_remaining(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Reduce the gradients that a window's micro-batches did not reduce.

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


def move(model: nn.Module, device: torch.device) -> None:
    """Move a model to a device; unlike `nn.Module.to`, keeps buffers that are views of the same memory as views."""
    shared: dict[int, list[tuple[nn.Module, str, torch.Tensor]]] = {}
    for part in model.modules():
        for name, buffer in buffers_of(part).items():
            if type(buffer) is torch.Tensor and buffer.layout == torch.strided and buffer.numel():
                shared.setdefault(buffer.untyped_storage().data_ptr(), []).append((part, name, buffer))
    model.to(device)
    for places in shared.values():
        owners = {id(buffer): buffer for _, _, buffer in places}
        part, name, first = places[0]
        is_view = len(places) > 1 or is_expanded(first)
        if not is_view or buffers_of(part)[name] is first or any(one.dtype != first.dtype for one in owners.values()):
            continue
        whole = torch.empty(0, dtype=first.dtype, device=first.device).set_(first.untyped_storage()).to(device)
        moved = {key: whole.as_strided(one.size(), one.stride(), one.storage_offset()) for key, one in owners.items()}
        for part, name, buffer in places:
            buffers_of(part)[name] = moved[id(buffer)]
