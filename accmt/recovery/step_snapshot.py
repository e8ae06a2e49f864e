"""The step snapshot: a run as its last optimizer step left it, for a checkpoint when something fails before the next.

Weights and optimizer change in the optimizer step only, so they need no copy. What else changes until the next one is
small: counters, running averages, buffers such as batch norm's. It is copied once after each step, without waiting for
the device or for another process, and again only when a stage after the step has changed something.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from accmt.callbacks.dispatch import find_hooks
from accmt.libraries.private_names import buffers_of, count_writes, has_running_statistics, is_saved
from accmt.recovery.run_state import LocalState
from accmt.run import Run
from accmt.sharded_tensors import write_into


class StepSnapshot:
    """A run after its last optimizer step, and how far it came with what follows that step.

    Args:
        is_kept: Whether a checkpoint may ever be asked for; if not, and no feature needs it, nothing is copied.

    Attributes:
        next_stage: The stage that comes next: its index in `accmt.loop.stages.STAGES`, or the length of that list when
            training continues.
        made_step: Whether the last accumulation window ended in an optimizer step, rather than in a skipped one.
        may_change_in_step_hooks: Whether the hooks after a step may change what the snapshot holds.
        state: What `LocalState.collect` returned; None before the first capture.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool) -> None:
        self.next_stage = 0
        self.made_step = True
        self._is_valid = False
        self.state: dict[str, Any] | None = None
        self.may_change_in_step_hooks = False
        self._is_kept = is_kept
        self._local_state: LocalState | None = None
        self._buffers = _Buffers(model)

    def capture(self, run: Run, next_stage: int) -> None:
        """Copy the state of the run now.

        Args:
            next_stage: The stage that comes next.
        """
        self.next_stage, self._is_valid = next_stage, True
        if not (self._is_kept or run.features.needs_snapshot):
            return
        if self._local_state is None:
            self._local_state = LocalState(run)
            # accmt's own hooks, such as the progress bar's, change nothing that a checkpoint holds.
            users = (*run.callbacks, run.module)
            self.may_change_in_step_hooks = any("on_update_end" in find_hooks(user) for user in users)
        self.state = self._local_state.collect()
        if self._buffers.places:
            self._buffers.copy()

    def invalidate(self) -> None:
        """Note that the weights are no longer the snapshot's, or should never be saved, until the next one is taken.

        In the middle of an optimizer step they are neither the snapshot's nor the next's.
        """
        self._is_valid = False

    @property
    def can_be_saved(self) -> bool:
        """Whether there is a state to save."""
        return self.state is not None and self._is_valid

    @contextmanager
    def restored(self, run: Run) -> Iterator[None]:
        """Give the model the buffers of the snapshot, and the optimizer its rates, while they are saved."""
        groups = run.stepper.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, (self.state or {})["lr"], strict=False):  # a group may be new since
            group["lr"] = deepcopy(rate)  # a tensor of two owners could not be written
        self._buffers.restore()
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


class _Buffers:
    """Copies of the buffers that a checkpoint holds, refreshed only where training has changed them."""

    def __init__(self, model: nn.Module) -> None:
        self.places = [
            (module, name) for module in model.modules() for name in buffers_of(module) if is_saved(module, name)
        ]
        self._copies: list[torch.Tensor | None] = [None] * len(self.places)
        self._versions: list[tuple[int, int] | None] = [None] * len(self.places)

    def copy(self) -> None:
        for index, (module, name) in enumerate(self.places):
            buffer = buffers_of(module).get(name)
            version = None if buffer is None or has_running_statistics(module) else _version_of(buffer)
            if buffer is None or (version is not None and version == self._versions[index]):
                continue
            self._versions[index] = version
            copied = self._copies[index]
            if copied is None or copied.shape != buffer.shape:
                self._copies[index] = buffer.detach().clone()
            else:
                copied.copy_(buffer)

    def restore(self) -> None:
        for index, (module, name) in enumerate(self.places):
            buffer, copied = buffers_of(module).get(name), self._copies[index]
            if buffer is None or copied is None:
                continue
            version = None if has_running_statistics(module) else _version_of(buffer)
            if version is None or version != self._versions[index]:  # else it has its values, and may be read-only
                write_into(buffer, copied)


def _version_of(buffer: torch.Tensor) -> tuple[int, int] | None:
    """Return what changes whenever a tensor does; None where nothing tells.

    The running statistics of batch norm are written by a kernel that counts no version.
    """
    return None if buffer.is_inference() else (id(buffer), count_writes(buffer))
