"""Means of logged values over a window of batches and over processes, without waiting for the device in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accmt.processes import gather_objects, is_main_process, num_processes, process_index, sum_over_processes

_COMPACT_AT = 256

Weight = float | torch.Tensor


class WeightedSum:
    """A sum of weighted values, kept on the device until it is read.

    Detached values are put in a list, which costs less than a sum on the device; every few hundred of them become one
    partial sum there, so that memory stays bounded. A value of weight 0 counts for nothing, even if it is not finite.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._partial: torch.Tensor | None = None

    def add(self, value: torch.Tensor, weight: Weight) -> None:
        """Add one value.

        Args:
            value: A detached tensor of one element.
            weight: Its weight, such as the number of samples; a tensor is not waited for.
        """
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= _COMPACT_AT:
            self._compact()

    def take(self) -> tuple[float, float]:
        """Return (sum of value x weight, sum of weights) in double precision, and begin anew.

        Waits for the device.
        """
        values, weights = self._stack()
        pairs = [(v * w, w) for v, w in zip(values.tolist(), weights.tolist(), strict=True) if w]
        if self._partial is not None:
            pairs.append(tuple(self._partial.tolist()))
        self._values, self._weights, self._partial = [], [], None
        return exact_sum([total for total, _ in pairs]), exact_sum([weight for _, weight in pairs])

    def state_dict(self) -> dict[str, Any]:
        """Return everything added so far, each value as it is: adding them up now would round otherwise than later."""
        values, weights = self._stack()
        return {
            "values": values.tolist(),
            "weights": weights.tolist(),
            "are_tensors": [isinstance(weight, torch.Tensor) for weight in self._weights],
            "partial": None if self._partial is None else self._partial.tolist(),
        }

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add what `state_dict` returned, in this process or in another one."""
        self._values += [torch.tensor(value, dtype=torch.float64) for value in state["values"]]
        for weight, is_tensor in zip(state["weights"], state["are_tensors"], strict=True):
            self._weights.append(torch.tensor(weight, dtype=torch.float64) if is_tensor else weight)
        if state["partial"] is not None:
            partial = torch.tensor(state["partial"], dtype=torch.float64)
            self._partial = partial if self._partial is None else self._partial + partial

    def _compact(self) -> None:
        values, weights = self._stack()
        dtype = torch.float32 if values.device.type == "mps" else torch.float64
        values, weights = values.to(dtype), weights.to(values.device, dtype)
        sums = torch.stack([torch.where(weights == 0, 0.0, values * weights).sum(), weights.sum()])
        self._partial = sums if self._partial is None else self._partial.to(sums.device) + sums
        self._values, self._weights = [], []

    def _stack(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._values:
            return torch.empty(0), torch.empty(0)
        values = torch.stack(_on_one_device(self._values))
        if any(isinstance(weight, torch.Tensor) for weight in self._weights):
            weights = [torch.as_tensor(weight, device=values.device).detach() for weight in self._weights]
            return values, torch.stack(weights)
        return values, torch.tensor(self._weights, dtype=torch.float64)


def _on_one_device(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Move what lies on the CPU to the others: a step may return a number now and a tensor of the device then."""
    devices = {value.device for value in values}
    if len(devices) == 1:
        return values
    device = next(device for device in devices if device.type != "cpu")
    return [value.to(device) for value in values]


def exact_sum(values: Sequence[float]) -> float:
    """Add up without rounding in between, or plainly where that overflows or meets both infinities."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):
        return sum(values)


class _Mean:
    def __init__(self) -> None:
        self._total = self._weight = 0.0

    def add(self, total: float, weight: float) -> None:
        self._total += total
        self._weight += weight

    def take(self) -> float | None:
        mean = self._total / self._weight if self._weight else None
        self._total = self._weight = 0.0
        return mean

    def state_dict(self) -> dict[str, float]:
        return {"total": self._total, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._total, self._weight = state["total"], state["weight"]


class TrainingWindow:
    """The training values since the last row of the log, and the loss since the last evaluation.

    Args:
        device: Where processes can add up.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._loss = WeightedSum()
        self._others: dict[str, WeightedSum] = {}
        self._since_log = _Mean()
        self._since_evaluation = _Mean()

    def add(self, loss: torch.Tensor, weight: Weight, others: Mapping[str, torch.Tensor] | None = None) -> None:
        """Add the loss of one batch, and what else its step returned.

        Args:
            loss: The detached mean loss of the batch.
            weight: Its samples, or the weight that the step returned.
            others: Further detached scalars by name.
        """
        self._loss.add(loss, weight)
        for name, value in (others or {}).items():
            self._others.setdefault(name, WeightedSum()).add(value, weight)

    def take_row(self, loss_name: str) -> dict[str, float]:
        """Return the weighted means since the last row, over all processes.

        Processes: collective.

        Returns:
            Means by name, the loss under `loss_name`; empty if nothing was added.
        """
        has_others = self._collect()
        loss = self._since_log.take()
        row = {} if loss is None else {loss_name: loss}
        return self._take_others() | row if has_others else row

    def take_since_evaluation(self) -> float | None:
        """Return the mean loss since the last call, over all processes; None if nothing was added.

        Processes: collective.
        """
        self._collect()
        return self._since_evaluation.take()

    def state_dict(self) -> dict[str, Any]:
        """Return the values that no row has yet, those of each process.

        Processes: collective.
        """
        own = {"loss": self._loss.state_dict(), "others": {name: s.state_dict() for name, s in self._others.items()}}
        return {
            "processes": gather_objects(own),
            "since_log": self._since_log.state_dict(),
            "since_evaluation": self._since_evaluation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; with another number of processes the main one takes all."""
        self._loss, self._others = WeightedSum(), {}
        self._since_log.load_state_dict(state["since_log"])
        self._since_evaluation.load_state_dict(state["since_evaluation"])
        saved = state["processes"]
        own = [saved[process_index()]] if len(saved) == num_processes() else saved if is_main_process() else []
        for part in own:
            self._loss.add_state(part["loss"])
            for name, values in part["others"].items():
                self._others.setdefault(name, WeightedSum()).add_state(values)

    def _collect(self) -> bool:
        loss, weight, num_others = sum_over_processes((*self._loss.take(), len(self._others)), self._device)
        self._since_log.add(loss, weight)
        self._since_evaluation.add(loss, weight)
        return num_others > 0

    def _take_others(self) -> dict[str, float]:
        own = {name: window.take() for name, window in self._others.items()}
        self._others = {}
        means: dict[str, _Mean] = {}
        for sums in gather_objects(own):
            for name, (total, weight) in sums.items():
                means.setdefault(name, _Mean()).add(total, weight)
        return {name: value for name, mean in means.items() if (value := mean.take()) is not None}
