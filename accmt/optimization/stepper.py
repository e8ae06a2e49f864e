"""Backward, gradient clipping and the optimizer step, with or without a gradient scaler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accmt.errors import ModuleContractError, fail
from accmt.libraries.private_names import multiply_
from accmt.optimization.optimizers import ChainedOptimizer, mesh_by_mesh
from accmt.options.optimizer_and_scheduler_arguments import members_of, weights_of
from accmt.sharded_tensors import by_mesh, dense_values, is_dtensor, mesh_of, total_norm

if TYPE_CHECKING:
    from accelerate import Accelerator


# ---- Gradient clipping


def clip_gradients(
    parameters: Sequence[nn.Parameter],
    limit: float | None,
    kind: str,
    norm_of: Callable[[list[torch.Tensor]], torch.Tensor] = total_norm,
) -> torch.Tensor | None:
    """Clip gradients that are already reduced over processes and unscaled, by norm or by value.

    Returns:
        The norm before clipping; None if gradients are not clipped by norm.
    """
    if limit is None:
        return None
    has_sparse = False
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            has_sparse = True
            parameter.grad = parameter.grad.coalesce()  # so that values can be changed in place
    gradients = _gradients_of(parameters)
    norm = None if kind == "value" else norm_of(gradients)
    if has_sparse:
        # torch clips gradients of parameters, and no sparse ones. So each gradient, or the values of a sparse one, is
        # made the gradient of another parameter, which shares its memory.
        parameters = []
        for gradient in gradients:
            values = dense_values(gradient) if gradient.is_sparse else gradient
            parameter = nn.Parameter(values, requires_grad=values.is_floating_point())
            parameter.grad = values
            parameters.append(parameter)
    for (members,) in by_mesh(parameters):
        if norm is None:
            nn.utils.clip_grad_value_(members, limit)
        else:
            nn.utils.clip_grads_with_norm_(members, limit, norm)
    return norm


def _gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


_TORCH = frozenset(kind for kind in vars(torch.optim).values() if isinstance(kind, type))
_TORCH_ZERO_GRAD = torch.optim.Optimizer.zero_grad


class Stepper:
    """Runs backward passes and steps of one optimizer.

    It calls torch directly: under data parallelism, Accelerate's optimizer wrapper adds nothing, costs more per step
    than the rest of the loop on a small model, and does not detect that a fused optimizer skipped a step.

    Args:
        accelerator: The accelerator that prepared the model.
        optimizer: The torch optimizer.
        set_to_none: Whether gradients are set to None after a step.
        clip: Maximum norm or value of the gradient; None disables clipping.
        clip_type: "norm" or "value".
        around_backward: Returns a context for each backward pass; None uses no context.
        norm_of: Returns the norm of gradients.

    Attributes:
        optimizer: The torch optimizer.
        may_draw: Whether the optimizer may draw random numbers in its step, for noise or rounding; torch's do not.
        clips: Whether `clip` does anything.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        optimizer: torch.optim.Optimizer,
        *,
        set_to_none: bool = True,
        clip: float | None = None,
        clip_type: str = "norm",
        around_backward: Callable[[], AbstractContextManager[None]] | None = None,
        norm_of: Callable[[list[torch.Tensor]], torch.Tensor] = total_norm,
    ) -> None:
        from accelerate import Accelerator

        self.optimizer = optimizer
        self._before_clipping: Callable[[list[nn.Parameter]], None] | None = None
        self._accelerator = accelerator
        self._scaler: torch.amp.GradScaler | None = accelerator.scaler
        self._is_unscaled = False
        self._how_to_zero: dict[str, bool] = {}
        if "set_to_none" in inspect.signature(optimizer.zero_grad).parameters:  # a wrapper's may not take it
            self._how_to_zero["set_to_none"] = set_to_none
        self._clip = clip or None
        self.clips = self._clip is not None
        self._clip_type = clip_type
        self._norm_of = norm_of
        self.may_draw = not all(type(member) in _TORCH for member in members_of(optimizer))
        self._drops_gradients = set_to_none and type(optimizer).zero_grad is _TORCH_ZERO_GRAD
        self._around_backward = around_backward or nullcontext
        self._is_mixed = len(set(map(mesh_of, self.parameters))) > 1
        if isinstance(optimizer, ChainedOptimizer):  # which splits the steps of its members itself
            optimizer.is_mixed, self._is_mixed = self._is_mixed, False
        self._with_modes: list[Any] = list(filter(has_modes, members_of(optimizer)))
        self._is_training = False
        self._trained: list[tuple[nn.Parameter, torch.Tensor]] | None = None
        is_plain = self._scaler is None and type(accelerator).backward is Accelerator.backward
        self._is_plain_backward = is_plain and around_backward is None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the optimizer, including groups added later."""
        return weights_of(self.optimizer)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of `loss`."""
        try:
            if self._is_plain_backward:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                with self._around_backward():
                    self._accelerator.backward(loss)
        except RuntimeError as error:
            # torch's message says nothing of FSDP2, which has freed the weights that another backward needs.
            if "storage of size 0" in str(error) and any(map(is_dtensor, self.parameters)):
                got = f"a gradient of a gradient (create_graph=True), or a second backward of one forward: {error}"
                expected = "one backward per forward: FSDP2 frees the gathered weights after it"
                do = "train without `parallelism`: accmt launch --strat ddp"
                where = "the backward of a model that FSDP2 shards"
                raise fail(ModuleContractError, where, got=got, expected=expected, do=do) from error
            raise

    @property
    def trains_other_weights(self) -> bool:
        """Whether the optimizer uses different weights for training and evaluation."""
        return bool(self._with_modes)

    def begin_training(self) -> None:
        """Switch to the training weights of optimizers with separate evaluation weights, such as schedule-free ones."""
        self._is_training = True
        for optimizer in self._with_modes:
            optimizer.train()

    def end_training(self) -> None:
        """Switch to the evaluation weights of such optimizers."""
        self._is_training = False
        for optimizer in self._with_modes:
            optimizer.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Use the evaluation weights, and restore the training weights bit for bit afterwards.

        The optimizer computes each from the other, with rounding. The training weights are therefore copied, so that a
        run interrupted and resumed here is identical to an uninterrupted one.
        """
        if not (self._with_modes and self._is_training) or self._trained is not None:
            yield
            return
        self._trained = [(parameter, parameter.detach().clone()) for parameter in self.parameters]
        self.evaluate_again()
        try:
            yield
        finally:
            trained, self._trained = self._trained, None
            self.begin_training()
            with torch.no_grad():
                for parameter, value in trained:
                    parameter.copy_(value)

    def evaluate_again(self) -> None:
        """Switch back to the evaluation weights, in case a user's hook has called `train()`."""
        if self._trained is None:
            return
        for optimizer in self._with_modes:
            optimizer.eval()

    def unscale(self) -> None:
        """Unscale the gradients of the gradient scaler; once per window, before they are read or changed.

        A window has no gradients if all its batches have weight 0. The scaler would report a missing backward.
        """
        if self._scaler is not None and _gradients_of(self.parameters):
            self._scaler.unscale_(self.optimizer)
            self._is_unscaled = True

    def multiply_gradients(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        gradients = _gradients_of(self.parameters)
        if not gradients:  # all batches had weight 0; torch rejects an empty list
            return
        for (members,) in by_mesh(gradients):
            multiply_(members, factor)

    def clip(self, parameters: list[nn.Parameter] | None = None) -> torch.Tensor | None:
        """Clip the unscaled gradients of the accumulation window.

        Args:
            parameters: The parameters whose gradients are clipped; None means all.

        Returns:
            The norm before clipping; None if gradients are not clipped by norm.
        """
        if parameters is None:
            parameters = self.parameters
        if self._before_clipping is not None:
            self._before_clipping(parameters)
        return clip_gradients(parameters, self._clip, self._clip_type, self._norm_of)

    def before_clipping(self, look: Callable[[list[nn.Parameter]], None]) -> None:
        """Call a function with the parameters before each `clip`, even if clipping is disabled."""
        self._before_clipping, self.clips = look, True

    def step(self) -> bool:
        """Make the optimizer step.

        Returns:
            False if the gradient scaler skipped it because a gradient was not finite. This is detected by its lower
            scale (fused optimizers skip steps internally).

        Source:
            https://docs.pytorch.org/docs/stable/notes/amp_examples.html
        """
        scaler = self._scaler
        with mesh_by_mesh(self.optimizer) if self._is_mixed else nullcontext():
            if scaler is None:
                self.optimizer.step()
                return True
            self._is_unscaled = False
            scaler.step(self.optimizer)
        scale = scaler.get_scale()
        scaler.update()
        return scaler.get_scale() >= scale

    def skip(self) -> bool:
        """Skip the step of the accumulation window.

        Returns:
            False, like a skipped `step`.
        """
        if self._scaler is not None and self._is_unscaled:
            self._scaler.update()  # or it could not unscale the next window
            self._is_unscaled = False
        return False

    def zero_grad(self) -> None:
        """Clear the gradients for the next window."""
        if not self._drops_gradients or "zero_grad" in vars(self.optimizer):  # overridden, perhaps by a hook
            self.optimizer.zero_grad(**self._how_to_zero)
            return
        # The same as `Optimizer.zero_grad`, without its profiler and compiler guards, which on a small model cost more
        # than the gradients of all its layers.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def has_modes(optimizer: Any) -> bool:
    """Return whether an optimizer switches weights between training and evaluation with `train()` and `eval()`."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
