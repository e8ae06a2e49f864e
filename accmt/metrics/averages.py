"""Averages of logged values and of training values: weighted sums that stay on the device until they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch

from accmt.errors import ModuleContractError, fail
from accmt.metrics.results import describe, find_scalar
from accmt.processes import (
    each_once,
    gather_from_data,
    gather_numbers,
    is_counted,
    is_main_process,
)

# ---- Exact sums: their bits depend neither on the order of the numbers nor on the process that has each of them


NUM_PARTS = 4
"""Numbers of an exact sum, each below half a unit in the last place of the one before."""


def exact_sum(values: Iterable[float]) -> float:
    """Return the exactly rounded sum, or the plain sum if that overflows or contains both infinities."""
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)


def exact_parts(values: Iterable[float]) -> list[float]:
    """Return the sum of some numbers as `NUM_PARTS` numbers, which together round nothing that matters.

    A sum of such parts of several processes is the same however the numbers were divided among them.
    """
    numbers = list(values)
    parts = [exact_sum(numbers)]
    while len(parts) < NUM_PARTS:
        numbers.append(-parts[-1])
        parts.append(exact_sum(numbers) if math.isfinite(parts[0]) else 0.0)
    return parts


def sum_exactly(*columns: Iterable[float]) -> list[float]:
    """Return the exact sum of each column over all processes; those that share batches count as one.

    Processes: collective; every process passes as many columns.
    """
    numbers = chain(*map(exact_parts, columns))
    of_processes = each_once(gather_numbers(list(numbers)))
    begins = range(0, NUM_PARTS * len(columns), NUM_PARTS)
    return [exact_sum(chain(*(row[begin : begin + NUM_PARTS] for row in of_processes))) for begin in begins]


# ---- A weighted sum on the device: adding to it does not synchronize


COMPACT_AT = 256
"""After this many small values on a device, they are stacked: a few kilobytes."""

_READ_AT = 1_024
"""After this many, they are read from the device, so that memory stays bounded."""

Weight: TypeAlias = float | torch.Tensor

Sum: TypeAlias = tuple[list[float], list[float]]
"""The sum of value x weight and the sum of weights, as exact parts."""


class WeightedSum:
    """An exact sum of weighted values. A value of weight 0 is ignored, even if it is not finite.

    Detached values are appended to a list, which is cheaper than adding on the device.
    """

    def __init__(self) -> None:
        self._values: list[torch.Tensor] = []
        self._weights: list[Weight] = []
        self._read: Sum = [], []

    def add(self, value: torch.Tensor, weight: Weight) -> None:
        """Add one value."""
        self._values.append(value)
        self._weights.append(weight)
        if len(self._values) >= _READ_AT:
            self._read = self.take()

    def take(self) -> Sum:
        """Return the sum, and reset. Waits for the device."""
        total = self.state_dict()
        self._values, self._weights, self._read = [], [], ([], [])
        return total

    def copy(self) -> WeightedSum:
        """Return a copy that shares the values, which are never modified."""
        copied = object.__new__(WeightedSum)
        copied._values, copied._weights, copied._read = self._values.copy(), self._weights.copy(), self._read
        return copied

    def state_dict(self) -> Sum:
        """Return the sum. Waits for the device."""
        totals, total_weights = map(list, self._read)
        for value, weight in zip(_read(self._values), _read(self._weights), strict=True):
            if weight:  # the loss of a batch without labels is NaN, and 0 * NaN is NaN
                totals.append(value * weight)
                total_weights.append(weight)
        return exact_parts(totals), exact_parts(total_weights)

    def add_state(self, state: Sequence[Sequence[float]]) -> None:
        """Add a `state_dict` of this or another process."""
        self._read = [*self._read[0], *state[0]], [*self._read[1], *state[1]]


def _read(values: Sequence[Weight]) -> list[float]:
    """Return the numbers, with a single transfer for those on a device, which waits for it."""
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)}
    if devices <= {"cpu"}:
        return [value.item() if isinstance(value, torch.Tensor) else value for value in values]
    return cast("list[float]", stack([torch.as_tensor(value) for value in values]).tolist())


def stack(values: list[torch.Tensor]) -> torch.Tensor:
    """Stack scalars on their device; a step may return a number now and a tensor on the device later.

    Numbers move to the device: the opposite direction would wait for the device.
    """
    devices = {value.device for value in values}
    if len(devices) > 1:
        device = next(device for device in devices if device.type != "cpu")
        values = [value.to(device, non_blocking=True) for value in values]
    return torch.stack(values)


# ---- Values logged by steps, until they are averaged over batches and processes


Totals: TypeAlias = dict[str, tuple[Sequence[float], Sequence[float] | None]]
"""By name, the addends of a sum and of its weight; the weight is None if the value is a total, not an average."""


class AttachedSums(Protocol):
    """Sums of an add-on, which are kept like logged values."""

    @property
    def is_empty(self) -> bool: ...
    def take(self) -> Totals: ...
    def copy(self) -> AttachedSums: ...
    def state_dict(self) -> dict[str, Any]: ...
    def add_state(self, state: Mapping[str, Any]) -> None: ...


class LoggedValues:
    """The logged values of one phase: training, or the evaluation of one set.

    A value has the weight of the batch during which it was logged, which is known when the batch is done. So values
    wait until `end_batch`; between batches, they have the weight of the last batch.

    Attributes:
        is_open: Whether values are accepted.
        weight: The weight of values that are logged between batches: that of the last batch, 1 before the first.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._sums: dict[str, WeightedSum] = {}
        self._totals: set[str] = set()
        self._attached: AttachedSums | None = None
        self._states_of_attached: list[Mapping[str, Any]] = []  # until they are attached
        self._waiting: list[tuple[str, torch.Tensor]] | None = None
        self.weight: Weight = 1.0

    def __len__(self) -> int:
        return len(self._sums) + (self._attached is not None and not self._attached.is_empty)

    def begin_batch(self) -> None:
        """Let values wait for the weight of the new batch; the waiting values of a failed batch are dropped."""
        self.is_open = True
        self._waiting = []

    def drop_batch(self) -> None:
        """Discard the values of the current batch."""
        self._waiting = None

    def close(self) -> None:
        """Accept no more values until a batch begins; waiting values get the weight of the last batch."""
        self.end_batch(self.weight)
        self.is_open = False

    def add(self, name: str, value: Any, *, is_total: bool = False) -> None:
        """Add one value, without synchronization and without keeping its graph.

        Args:
            name: Its name.
            value: A number, or a tensor of one element.
            is_total: Whether values are summed without weights instead of averaged.
        """
        if not self.is_open:  # between evaluations: it would be in no row
            do = "log in training_step or validation_step"
            raise _wrong_value(name, "a call outside a step", "a call in a step", do)
        scalar = find_scalar(value)
        if scalar is None:
            do = f"log({name!r}, value.mean())"
            raise _wrong_value(name, describe(value), "a number or a tensor of one element", do)
        if name in self._sums and (name in self._totals) != is_total:  # a mean of sums is neither
            raise _wrong_value(name, "both averages and totals under one name", "one of the two", "rename one of them")
        if is_total:
            self._totals.add(name)
        if isinstance(value, torch.Tensor):
            scalar = scalar.clone()  # the step may modify it later
        self._sums.setdefault(name, WeightedSum())
        if self._waiting is None:
            self._weigh(name, scalar)
        else:
            self._waiting.append((name, scalar))

    def attach(self, sums: AttachedSums) -> None:
        """Let sums travel with the logged values: into rows, copies and checkpoints."""
        self._attached = sums
        for state in self._states_of_attached:
            sums.add_state(state)
        self._states_of_attached = []

    def end_batch(
        self,
        weight: Weight,
        returned: Mapping[str, torch.Tensor] | None = None,
        weights: Mapping[str, Weight] | None = None,
    ) -> None:
        """Weight the values of a batch by `weight`, or by their entries in `weights`."""
        self.weight = weight
        waiting, self._waiting = self._waiting or (), None
        for name, value in waiting:
            if returned and name in returned:  # it would be averaged twice
                got, do = "a name that the step also returned", "rename one of them"
                raise _wrong_value(name, got, "unique names", do)
            self._weigh(name, value)
        for name, value in (returned or {}).items():
            self._sums.setdefault(name, WeightedSum()).add(value, (weights or {}).get(name, weight))

    def take(self) -> Totals:
        """Return the values logged on this process, and reset. Waits for the device."""
        totals: Totals = {}
        for name, values in self._sums.items():
            total, weight = values.take()
            if name in self._totals:
                totals[name] = (total, None)
            else:
                totals[name] = (total, weight)
        self._sums, self._totals = {}, set()
        if self._attached is not None:
            totals |= self._attached.take()
        return totals

    def copy(self) -> LoggedValues:
        """Return a copy that shares the values, which are never modified."""
        copied = object.__new__(LoggedValues)
        copied.__dict__.update(self.__dict__)
        copied._sums = {name: values.copy() for name, values in self._sums.items()}
        copied._totals = self._totals.copy()
        if self._attached is not None:
            copied._attached = self._attached.copy()
        if self._waiting is not None:
            copied._waiting = self._waiting.copy()
        return copied

    def without_values(self) -> LoggedValues:
        """Return a copy for the same sums, which are empty."""
        empty = self.copy()
        empty.take()
        empty._states_of_attached = []
        return empty

    def state_dict(self) -> dict[str, Any]:
        sums = {name: values.state_dict() for name, values in self._sums.items()}
        groups = list(self._states_of_attached)
        if self._attached is not None:
            groups.append(self._attached.state_dict())
        return {"sums": sums, "totals": sorted(self._totals), "weight": float(self.weight), "groups": groups}

    def add_state(self, state: Mapping[str, Any]) -> None:
        """Add a `state_dict` of this or another process."""
        for name, values in state["sums"].items():
            self._sums.setdefault(name, WeightedSum()).add_state(values)
        self._totals.update(state["totals"])
        self.weight = state["weight"]
        if self._attached is None:  # a checkpoint is loaded before its add-on is built
            self._states_of_attached += state["groups"]
            return
        for groups in state["groups"]:
            self._attached.add_state(groups)

    def _weigh(self, name: str, value: torch.Tensor) -> None:
        self._sums[name].add(value, 1.0 if name in self._totals else self.weight)


def combine(totals_of_processes: Iterable[Totals]) -> dict[str, float]:
    """Combine the results of `take` of each process; names without any weight are left out."""
    sums: dict[str, list[float]] = {}
    weights: dict[str, list[float]] = {}
    for totals in totals_of_processes:
        for name, (total, weight) in totals.items():
            sums.setdefault(name, []).extend(total)
            if weight is not None:
                weights.setdefault(name, []).extend(weight)
    values: dict[str, float] = {}
    for name, addends in sums.items():
        if name not in weights:  # a total, not an average
            values[name] = exact_sum(addends)
        elif weight_of_name := exact_sum(weights[name]):  # else only batches without samples logged it
            values[name] = exact_sum(addends) / weight_of_name
    return values


def _wrong_value(name: str, got: str, expected: str, do: str) -> ModuleContractError:
    return fail(ModuleContractError, f"the logged value {name!r}", got=got, expected=expected, do=do)


class _Mean(NamedTuple):
    """An immutable running weighted mean."""

    total: float = 0.0
    weight: float = 0.0

    def plus(self, total: float, weight: float) -> _Mean:
        return _Mean(self.total + total, self.weight + weight)

    @property
    def value(self) -> float | None:
        return self.total / self.weight if self.weight else None


class Rider(NamedTuple):
    """Numbers that travel with the exchange of a log row.

    Attributes:
        numbers: Those of this process; as many on every process.
        receive: Called with those of each process.
    """

    numbers: Sequence[float]
    receive: Callable[[list[tuple[float, ...]]], object]


class RunningAverages:
    """Averages of training values since the last row, and of the loss since the last evaluation and epoch start."""

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
        values: Mapping[str, torch.Tensor] | None = None,
        values_weight: Weight | None = None,
    ) -> None:
        """Add the detached mean loss of one batch and its weight.

        Args:
            values: Other detached scalars returned by the step.
            values_weight: The weight of these and of the values logged by the step; None means the same weight.
        """
        self._loss.add(loss, weight)
        self._logged.end_batch(weight if values_weight is None else values_weight, values)

    def take_row(self, loss_name: str, riders: Sequence[Rider] = ()) -> dict[str, float]:
        """Return the weighted averages, and the totals, since the last row, over all processes.

        Processes: collective.

        Args:
            loss_name: The name of the loss in the row.
            riders: What is exchanged with it.

        Returns:
            Values by name, the loss under `loss_name`; empty if nothing was added.
        """
        has_logged = self._collect(riders)
        loss, self._since_log = self._since_log.value, _Mean()
        row: dict[str, float] = {}
        if has_logged:  # on any process; otherwise the exchange of objects, which is slow, is saved
            row = combine(gather_from_data(self._logged.take()))
        if loss is not None:
            row[loss_name] = loss
        return row

    def take_since_evaluation(self) -> float | None:
        """Return the mean loss since the last call, over all processes; None if nothing was added.

        Processes: collective.
        """
        self._collect()
        loss, self._since_evaluation = self._since_evaluation.value, _Mean()
        return loss

    @property
    def epoch_loss(self) -> float | None:
        """The mean loss of the epoch as of the last row or evaluation; until then, that of the previous epoch."""
        return self._of_epoch.value

    def end_epoch(self) -> None:
        """Start a new epoch average with the next batch; call this right after `take_row`."""
        self._is_epoch_over = True

    def copy(self) -> RunningAverages:
        """Return a copy without reading values, which would wait for the device."""
        copied = object.__new__(RunningAverages)
        copied.__dict__.update(self.__dict__)
        copied._loss, copied._logged = self._loss.copy(), self._logged.copy()
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the sums that are not in a row yet, over all processes, and the current averages.

        Processes: collective.
        """
        states = gather_from_data((self._loss.state_dict(), self._logged.state_dict()))
        # The same numbers on any number of processes.
        loss, logged = WeightedSum(), self._logged.without_values()
        for loss_of_process, logged_of_process in reversed(states):  # `weight` is that of the main process
            loss.add_state(loss_of_process)
            logged.add_state(logged_of_process)
        return {
            "loss": loss.state_dict(),
            "logged": logged.state_dict(),
            "since_log": self._since_log._asdict(),
            "since_evaluation": self._since_evaluation._asdict(),
            "of_epoch": {**self._of_epoch._asdict(), "is_over": self._is_epoch_over},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore state from `state_dict`: the main process takes all sums."""
        self._loss = WeightedSum()
        self._logged.take()
        self._since_log = _Mean(**state["since_log"])
        self._since_evaluation = _Mean(**state["since_evaluation"])
        of_epoch = dict(state["of_epoch"])
        self._is_epoch_over = of_epoch.pop("is_over")
        self._of_epoch = _Mean(**of_epoch)
        if is_main_process():
            self._loss.add_state(state["loss"])
            self._logged.add_state(state["logged"])

    def _collect(self, riders: Sequence[Rider] = ()) -> bool:
        loss_parts, weight_parts = self._loss.take()
        numbers = [float(len(self._logged)), *loss_parts, *weight_parts]
        num_sums = len(numbers)
        if not is_counted():  # it shares its batches with another process, which counts them
            numbers = [0.0] * num_sums
        for rider in riders:
            numbers += rider.numbers
        numbers_of_processes = gather_numbers(numbers)
        columns = list(zip(*numbers_of_processes, strict=True))
        loss = exact_sum(chain(*columns[1 : 1 + NUM_PARTS]))
        weight = exact_sum(chain(*columns[1 + NUM_PARTS : num_sums]))
        begin = num_sums
        for rider in riders:
            end = begin + len(rider.numbers)
            rider.receive([numbers[begin:end] for numbers in numbers_of_processes])
            begin = end
        self._since_log = self._since_log.plus(loss, weight)
        self._since_evaluation = self._since_evaluation.plus(loss, weight)
        if self._is_epoch_over and weight:  # until then, `epoch_loss` is that of the previous epoch
            self._of_epoch, self._is_epoch_over = _Mean(), False
        self._of_epoch = self._of_epoch.plus(loss, weight)
        return any(columns[0])
