"""What a run asks of its engine: the way in which its processes train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accmt.data import MicroBatch
from accmt.engine.reduction import broadcast_buffers
from accmt.engine.sync_batchnorm import synchronized_layers, without_synchronization
from accmt.libraries.private_names import count_writes
from accmt.module import AcceleratorModule
from accmt.saving.streaming import ShardedState, WholeState

if TYPE_CHECKING:
    from accelerate import Accelerator

_NO_CALLS: AbstractContextManager[list[None] | None] = nullcontext()
_NOTHING = nullcontext()


class Engine:
    """How processes train one model; here, what each engine does that needs no other process.

    It is chosen once, when a run is set up. Whatever is different with another engine is a method or an attribute of
    it, so nothing else asks which one it is.

    Args:
        module: The module, whose `model` its steps call.
        accelerator: The Accelerator of the run.
        model: The model as it is trained.
        unwrapped_model: The user's model itself.

    Attributes:
        needs_all: Whether each forward of the model needs every process.
        no_sync: Returns the context of a micro-batch after which others follow in its window, where one that reduces
            gradients in each backward can leave that out; else None.
        notes_trained: Whether a window has to train the parameters with which it began.
        inference_mode: Returns the context in which an evaluation computes.
    """

    needs_all: ClassVar[bool] = False
    no_sync: Callable[[], AbstractContextManager[None]] | None = None
    notes_trained: bool = False
    inference_mode: type[torch.inference_mode | torch.no_grad] = torch.inference_mode

    def __init__(
        self, module: AcceleratorModule, accelerator: Accelerator, model: nn.Module, unwrapped_model: nn.Module
    ) -> None:
        self._module = module
        self.accelerator = accelerator
        self.model = model
        self.unwrapped_model = unwrapped_model

    def begin_epoch(self, *, reduces_at_end: bool) -> None:
        """Begin an epoch of training.

        Args:
            reduces_at_end: Whether micro-batches may fail on a process, so that none of them reduces gradients.
        """

    def begin_window(self) -> None:
        """Begin an accumulation window.

        Processes: collective.
        """

    def own_or_borrowed(self, step: str, micro_batch: MicroBatch) -> Any:
        """Return this process's batch; where it has none and the step needs all processes, that of another one.

        A step on a borrowed batch is run with `running_borrowed`, and counts for nothing.

        Processes: collective in a micro-batch that does not reach all of them.

        Args:
            step: The name of the step, for errors.
            micro_batch: This process's part of it.
        """
        return micro_batch.batch

    def running(self, step: str, micro_batch: MicroBatch | None) -> AbstractContextManager[list[None] | None]:
        """Return the context in which a step runs on this process's batch.

        It explains errors, sees to what the step itself communicates, and gives a list with an entry for each call of
        the model, which a training step must not go around; None where it may.

        Args:
            step: The name of the step, for errors.
            micro_batch: What it runs on; None where processes need not meet in it.
        """
        return _NO_CALLS

    def running_borrowed(self, step: str) -> AbstractContextManager[list[None] | None]:
        """Return the context in which a step runs on a borrowed batch: what it adds to sums over processes is 0."""
        return _NO_CALLS

    def unreduced(self) -> AbstractContextManager[None]:
        """Return the context of a micro-batch in which processes may differ in what they do, as far as they can.

        What it leaves unreduced, `reduce_remaining` reduces when the window ends.
        """
        return _NOTHING

    def finish_borrowed(self, loss: torch.Tensor, backward: Callable[[torch.Tensor], None]) -> None:
        """Take part in the backward of the others with the loss of a borrowed batch, of which no gradient is kept."""
        backward(loss * 0.0)

    def leave_out(self, *, was_called: bool, meanwhile: Callable[[], None]) -> None:
        """Take part, without a loss, in what the others do in their forward and backward.

        Processes: collective where the others reduce their gradients in this micro-batch.

        Args:
            was_called: Whether this process has called the model.
            meanwhile: What the others do between forward and backward.
        """
        meanwhile()

    def require_accumulating(self, number: str) -> None:
        """Check that gradients of several micro-batches can be accumulated.

        Args:
            number: How many there are in an optimizer step, in words.
        """

    def first_backward_check(self) -> Callable[[], bool] | None:
        """Return what is to be called after each backward, until it returns True; None for nothing."""
        return None

    def add_note(self, error: Exception) -> None:
        """Say what to write where torch's own message about an error of a step does not."""

    def reduce_remaining(self, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Reduce, when a window ends, the gradients that its micro-batches did not.

        Processes: collective.

        Args:
            parameters: Those whose gradients are meant; None is what the optimizer has.
        """

    def note_trained(self) -> None:
        """Average the gradients of those parameters from now on that require them now.

        Processes: collective; every process trains the same parameters.
        """

    def share_buffers(self) -> None:
        """Give every process the main process's buffers, such as running statistics of batch norm.

        Processes: collective.
        """
        broadcast_buffers(self.unwrapped_model)

    @contextmanager
    def unwrapped(self, *, trains: bool = False) -> Iterator[None]:
        """Let the module's steps use the model without communication meanwhile, as far as it can do without.

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

    def count_writes(self) -> int | None:
        """Return how often the weights were written in place; None where the engine itself writes them."""
        return sum(count_writes(weight) for weight in self.unwrapped_model.parameters())

    def weights(self) -> WholeState | ShardedState:
        """Return the weights of the model as they are saved: whole, or to be put together one by one.

        Processes: collective.
        """
        return WholeState(self.accelerator.get_state_dict(self.model))


class Alone(Engine):
    """One process."""
