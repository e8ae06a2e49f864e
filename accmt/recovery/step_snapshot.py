"""What a run was at its last update boundary: the state that a checkpoint may hold when something fails in between.

Weights and optimizer move in the optimizer's step only, so they need no copy. What a window moves besides is small:
counters, means that no row has yet, buffers such as batch norm's. It is copied at each boundary, without waiting for
the device or for another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

if TYPE_CHECKING:
    from accmt.run import Run

Due: TypeAlias = Literal["start", "update", "skipped", "evaluation", "epoch", "epoch_end"]
"""What the run has still to do at a boundary before it trains on: everything from the start on, what follows an update,
what follows a window that made none, log and evaluation after an update, the end of the epoch, or the hooks after an
epoch was counted."""


class Boundary:
    """The last update boundary of a run.

    Args:
        model: The user's model itself.
        is_kept: Whether a checkpoint may ever be asked for; if not, nothing is copied.

    Attributes:
        due: What was still to be done there; None if nothing was.
        is_torn: Whether an update is half done: neither this boundary nor the next can be saved.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool) -> None:
        self.due: Due | None = None
        self.is_torn = False
        self._is_kept = is_kept
        self._own: dict[str, Any] | None = None
        self._buffers = _Buffers(model)

    def mark(self, run: Run, due: Due | None = None) -> None:
        """Note that the run is at a boundary now.

        Args:
            run: The run.
            due: What it has still to do here.
        """
        self.due, self.is_torn = due, False
        if self._is_kept:
            from accmt.recovery.run_state import collect_own

            self._own = _copy_shared(collect_own(run))
            self._buffers.copy()

    @property
    def can_be_saved(self) -> bool:
        """Whether there is a state to save."""
        return self._own is not None and not self.is_torn

    @property
    def own(self) -> dict[str, Any]:
        """What `collect_own` returned at the boundary."""
        return self._own or {}

    @contextmanager
    def given_back(self, run: Run) -> Iterator[None]:
        """Let the model have the buffers of the boundary, and the optimizer its rates, while they are saved."""
        groups = run.stepper.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, self.own["lr"], strict=False):  # a group may be new since
            group["lr"] = rate
        self._buffers.put_back()
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


class _Buffers:
    """Copies of the buffers that a checkpoint holds, taken again only where training has changed them.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name)
            for module in model.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self._copies: list[torch.Tensor | None] = [None] * len(self._places)
        self._seen: list[tuple[int, int] | None] = [None] * len(self._places)

    def copy(self) -> None:
        for index, (module, name) in enumerate(self._places):
            buffer = module._buffers.get(name)
            version = None if buffer is None or isinstance(module, _NormBase) else _version_of(buffer)
            if buffer is None or (version is not None and version == self._seen[index]):
                continue
            self._seen[index] = version
            copied = self._copies[index]
            if copied is None or copied.shape != buffer.shape:
                self._copies[index] = buffer.detach().clone()
            else:
                copied.copy_(buffer)

    def put_back(self) -> None:
        with torch.no_grad():
            for (module, name), copied in zip(self._places, self._copies, strict=True):
                buffer = module._buffers.get(name)
                if buffer is not None and copied is not None:
                    buffer.copy_(copied)


def _version_of(buffer: torch.Tensor) -> tuple[int, int] | None:
    """Return what changes whenever a tensor does; None where nothing tells.

    The running statistics of batch norm are written by a kernel that counts no version.
    """
    return None if buffer.is_inference() else (id(buffer), buffer._version)


def _copy_shared(own: dict[str, Any]) -> dict[str, Any]:
    """Copy what of `collect_own` is no copy already: the values to be logged, and what the user's objects return."""
    parts = own["parts"]
    copied = {"running_averages": copy_structure(parts["running_averages"]), "module": copy_structure(parts["module"])}
    users = {"callbacks": copy_structure(own["callbacks"]), "trainer": copy_structure(own["trainer"])}
    return {**own, **users, "parts": {**parts, **copied}}


def copy_structure(value: Any) -> Any:
    """Copy containers, and the objects in them that add up logged values; tensors are shared, for nobody changes them.

    A tensor in a callback's own state is shared too: copying weights at each update would cost more than the update.
    """
    kind = type(value)
    if kind is dict:
        return {key: entry if type(entry) in _PLAIN else copy_structure(entry) for key, entry in value.items()}
    if kind is list:
        return [copy_structure(entry) for entry in value] if value and type(value[0]) in _CONTAINERS else value.copy()
    if kind is set:
        return value.copy()
    if kind.__module__.startswith("accmt.metrics"):
        copied = object.__new__(kind)
        copied.__dict__.update(copy_structure(vars(value)))
        return copied
    return value


_CONTAINERS = (dict, list, set, tuple)
_PLAIN = {float, int, str, bool, type(None), torch.Tensor, torch.device}
