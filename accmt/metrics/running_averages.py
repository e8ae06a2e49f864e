"""Running averages of the training values: since the last log row, since the last evaluation, and of the epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from accmt.metrics.logged import LoggedValues, combine
from accmt.metrics.weighted_sum import Weight, WeightedSum
from accmt.processes import data_index, gather_from_data, is_main_process, num_data_processes, sum_over_data


class _Mean(NamedTuple):
    """A weighted mean in the making; adding to it makes another one, so copies may share it."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, total: float, weight: float) -> _Mean:
        return _Mean(self.total + total, self.weight + weight)

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


class RunningAverages:
    """Means of training values since the last log row, and of the loss since the last evaluation and of the epoch."""

    def __init__(self, logged: LoggedValues | None = None) -> None:
        self._loss = WeightedSum()
        self._logged = LoggedValues() if logged is None else logged
        self._since_log = _Mean()
        self._since_evaluation = _Mean()
        self._of_epoch = _Mean()
        self._is_epoch_over = False

    def add(
        self,
        loss: torch.Tensor,
        weight: Weight,
        others: Mapping[str, torch.Tensor] | None = None,
        others_weight: Weight | None = None,
    ) -> None:
        """Add the detached mean loss of one batch, and what it weighs.

        Args:
            others: Further detached scalars that its step returned.
            others_weight: What these weigh, and what the step has logged; None is the same.
        """
        self._loss.add(loss, weight)
        self._logged.end_batch(weight if others_weight is None else others_weight, others)

    def take_row(self, loss_name: str) -> dict[str, float]:
        """Return the weighted means (and sums, where asked for) since the last row, over all processes.

        Processes: collective.

        Returns:
            Values by name, the loss under `loss_name`; empty if nothing was added.
        """
        has_others = self._collect()
        loss, self._since_log = self._since_log.value, _Mean()
        row = {} if loss is None else {loss_name: loss}
        return combine(gather_from_data(self._logged.take())) | row if has_others else row

    def take_since_evaluation(self) -> float | None:
        """Return the mean loss since the last call, over all processes; None if nothing was added.

        Processes: collective.
        """
        self._collect()
        loss, self._since_evaluation = self._since_evaluation.value, _Mean()
        return loss

    @property
    def epoch_loss(self) -> float | None:
        """The mean loss of the epoch as of the last row or evaluation; until then that of the epoch before."""
        return self._of_epoch.value

    def end_epoch(self) -> None:
        """Start a new mean of the epoch with the next batch; to be called right after `take_row`."""
        self._is_epoch_over = True

    def copy(self) -> RunningAverages:
        """Return a copy, of which nothing is read: that would wait for the device."""
        copied = object.__new__(RunningAverages)
        copied.__dict__.update(self.__dict__)
        copied._loss, copied._logged = self._loss.copy(), self._logged.copy()
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the values of each process that no row has yet, and the current means.

        Processes: collective.
        """
        own = {"loss": self._loss.state_dict(), "logged": self._logged.state_dict()}
        return {
            "processes": gather_from_data(own),
            "since_log": self._since_log._asdict(),
            "since_evaluation": self._since_evaluation._asdict(),
            "of_epoch": {**self._of_epoch._asdict(), "is_over": self._is_epoch_over},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; with another number of processes the main one takes all."""
        self._loss = WeightedSum()
        self._logged.take()
        self._since_log = _Mean(**state["since_log"])
        self._since_evaluation = _Mean(**state["since_evaluation"])
        of_epoch = dict(state["of_epoch"])
        self._is_epoch_over = of_epoch.pop("is_over")
        self._of_epoch = _Mean(**of_epoch)
        saved = state["processes"]
        own = [saved[data_index()]] if len(saved) == num_data_processes() else saved if is_main_process() else []
        for part in own:
            self._loss.add_state(part["loss"])
            self._logged.add_state(part["logged"])

    def _collect(self) -> bool:
        loss, weight, num_others = sum_over_data((*self._loss.take(), len(self._logged)))
        self._since_log = self._since_log.plus(loss, weight)
        self._since_evaluation = self._since_evaluation.plus(loss, weight)
        if self._is_epoch_over and weight:
            self._of_epoch, self._is_epoch_over = _Mean(), False
        self._of_epoch = self._of_epoch.plus(loss, weight)
        return num_others > 0
