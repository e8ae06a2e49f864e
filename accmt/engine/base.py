"""What a run asks of its engine: the way in which its processes train one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from accmt.checkpoint.frozen import find_read_only
from accmt.data import MicroBatch
from accmt.engine.reduction import broadcast_buffers, broadcast_weights, is_container, require_same_tensors
from accmt.engine.shards import fill, is_on_meta
from accmt.engine.sync_batchnorm import restore_batch_norm, synchronized_layers, without_synchronization
from accmt.errors import ModuleContractError, explain
from accmt.huggingface import try_quantized_layers
from accmt.libraries.private_names import buffers_of, count_writes, forget_prepared, prepare_alone
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.precision import autocast, hold_in_float32
from accmt.processes import num_processes
from accmt.saving.weights import ShardedState, WholeState
from accmt.sharded_tensors import is_expanded

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

    Attributes:
        model: The model as it is trained.
        unwrapped_model: The user's model itself.
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

    def __init__(self, module: AcceleratorModule, accelerator: Accelerator) -> None:
        self._module = module
        self.accelerator = accelerator
        self.model: nn.Module = module.model
        self.unwrapped_model: nn.Module = module.model

    def require_trainable(self, settings: Settings) -> None:
        """Check, before anything is done to the model, that it can be trained as the settings say."""

    def spread(self) -> None:
        """Spread what has to be spread before the optimizer is built, which then has the parameters as trained.

        That is a model that is split by tensor parallelism, and sharded where processes are left for that; and a model
        that has no values yet.

        Processes: collective.
        """
        if is_on_meta(self.unwrapped_model):
            fill(self.unwrapped_model, self.accelerator.device)

    def distribute(self) -> None:
        """Bring the model to where, and into the precision in which, it is trained, before its optimizer is built.

        Processes: collective.
        """
        model, places = self.unwrapped_model, self.accelerator.device_placement
        require_same_tensors(model)  # before anything of a type is exchanged, as in the trial of the optimizer
        self.spread()
        if places:
            move(model, self.accelerator.device)
        self._require_writable()
        if self.accelerator.mixed_precision in ("fp16", "bf16"):
            hold_in_float32(model)
        if places:
            with autocast(self.accelerator):
                try_quantized_layers(model)

    def _require_writable(self) -> None:
        fixed = find_read_only(self.unwrapped_model) if num_processes() > 1 else {}
        if fixed:
            got = (
                f"{next(iter(fixed))} is in memory that is mapped read-only, and processes exchange weights and buffers"
            )
            do = "copy it: torch.from_numpy(np.array(table)); or train on one process"
            raise ModuleContractError(explain("self.model", got, "memory that can be written", do))

    def require_optimizer(self, optimizer: Any) -> None:
        """Check that an optimizer can step the parameters as they are trained."""

    def wrap(self, optimizer: Any, *, set_to_none: bool) -> None:
        """Make `model` what is trained, and check that it begins alike on all processes.

        Processes: collective.

        Args:
            optimizer: Its optimizer.
            set_to_none: Whether gradients are dropped after each step.
        """
        own = self.unwrapped_model
        if is_container(own):
            self._use(prepare_alone(own, self.accelerator))
        else:
            self._use(self.accelerator.prepare(own, optimizer)[0])

    def wrap_for_evaluation(self) -> None:
        """Make `model` what is evaluated, where nothing is trained.

        Processes: collective; every process gets the main process's weights, as training would give them.
        """
        self._use(prepare_alone(self.unwrapped_model, self.accelerator))
        broadcast_weights(self.model)

    def _use(self, model: nn.Module) -> None:
        self.model = model
        self.unwrapped_model = self.accelerator.unwrap_model(model, keep_torch_compile=False)

    def detach(self) -> None:
        """Give the module its own model back, without the wrappers of the run, and let the Accelerator forget it."""
        own = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        forget_prepared(own, self.model, self.accelerator)
        restore_batch_norm(own)
        self._module.model = own

    def around_backward(self) -> Callable[[], AbstractContextManager[None]] | None:
        """Return what gives the context of each backward; None for none."""
        return None

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


def move(model: nn.Module, device: torch.device) -> None:
    """Bring a model to a device; buffers that are views of one memory stay so, which `nn.Module.to` parts."""
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
