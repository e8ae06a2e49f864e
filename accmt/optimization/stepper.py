"""Backward, clipping and the optimizer's step, with or without a gradient scaler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import DistributedType
from torch import nn

if TYPE_CHECKING:
    from accelerate import Accelerator

_OWN_ENGINE = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP, DistributedType.XLA)


class Stepper:
    """Turns losses into updates of one optimizer.

    Where Accelerate has nothing to add (no scaler, no engine of its own), torch is called directly: its wrapped
    optimizer costs more per step than the whole rest of the loop on a small model.

    Args:
        accelerator: The accelerator that prepared model and optimizer.
        model: The prepared model.
        optimizer: The prepared optimizer.
        set_to_none: Whether gradients are dropped after an update.
        clip: Largest norm or value of the gradient; None is off.
        clip_type: "norm" or "value".

    Attributes:
        optimizer: The torch optimizer underneath.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        optimizer: Any,
        *,
        set_to_none: bool = True,
        clip: float | None = None,
        clip_type: str = "norm",
    ) -> None:
        from accelerate import Accelerator

        self.optimizer: torch.optim.Optimizer = optimizer.optimizer
        self._accelerator = accelerator
        self._prepared = optimizer
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._model = model
        self._set_to_none = set_to_none
        self._clip = clip or None
        self._clip_type = clip_type
        self._is_direct = accelerator.scaler is None and accelerator.distributed_type not in _OWN_ENGINE
        self._calls_backward = self._is_direct and type(accelerator).backward is Accelerator.backward

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss` to those of the window."""
        if self._calls_backward:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._accelerator.backward(loss)

    def unscale(self) -> None:
        """Take the gradient scaler's factor out of the gradients; once per window, before they are read or changed."""
        if self._accelerator.scaler is not None:
            self._accelerator.unscale_gradients(self._prepared)

    def multiply_gradients(self, factor: float) -> None:
        """Multiply all gradients by one number."""
        gradients = self.gradients
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients there are, in the order of the optimizer's parameters."""
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer changes."""
        return self._parameters

    def clip(self) -> torch.Tensor | None:
        """Clip the gradients of the window, unscaled before.

        Returns:
            The norm before clipping; None where nothing was clipped by norm.
        """
        if self._clip is None:
            return None
        if self._clip_type == "value":
            nn.utils.clip_grad_value_(self._parameters, self._clip)
            return None
        if self._is_direct or self._accelerator.scaler is not None:
            return nn.utils.clip_grad_norm_(self._parameters, self._clip)
        norm: torch.Tensor | None = self._accelerator.clip_grad_norm_(self._model.parameters(), self._clip)
        return norm

    def step(self) -> bool:
        """Let the optimizer make its update.

        Returns:
            False if the gradient scaler skipped it, because a gradient was not finite.
        """
        if self._is_direct:
            self.optimizer.step()
            return True
        self._prepared.step()
        return not self._prepared.step_was_skipped

    def skip(self) -> bool:
        """Make no update of the window.

        Returns:
            False, as `step` does when it was skipped.
        """
        if self._accelerator.scaler is not None:
            self._accelerator.scaler.update()  # or it would refuse to unscale the next window
        return False

    def zero_grad(self) -> None:
        """Begin the next window without gradients."""
        self.optimizer.zero_grad(set_to_none=self._set_to_none)
