"""Metrics of torchmetrics: updated batch by batch, joined over processes, and computed once.

torchmetrics' own synchronization sends every state to every process on the device. It fails if a process without a
batch has an empty state of another shape, and averages mean states without weighting by samples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from accmt.errors import MetricError, fail
from accmt.libraries.private_names import reduction_of, set_update_count
from accmt.libraries.versions import require
from accmt.metrics.building import is_torch_metric
from accmt.metrics.gathering import CHUNK_BYTES, Position, gather_on_main_process, to_cpu
from accmt.metrics.metric import Accumulation, IsBetter, Metric
from accmt.metrics.results import describe, find_scalar, is_pair, metric_error
from accmt.processes import num_processes, run_on_main_process

if TYPE_CHECKING:
    import torchmetrics

_INPUT_ERRORS = (TypeError, ValueError, IndexError, RuntimeError)  # raised by torchmetrics for wrong inputs

State = dict[str, Any]


def load_torch_metric(name: str, path: str, **arguments: Any) -> torchmetrics.Metric:
    """Build a metric of torchmetrics, such as "classification.BinaryF1Score", for the metric `name`."""
    module, _, kind = path.rpartition(".")
    require("torchmetrics", f"metric {name!r}")
    loaded = import_module(f"torchmetrics.{module}")
    metric: torchmetrics.Metric = getattr(loaded, kind)(**arguments)
    return metric


class TorchMetric(Metric):
    """A metric of torchmetrics, or a collection of metrics with the same inputs.

    The module's `validation_step` returns the arguments of `update` under this name: `(predictions, references)`, a
    tuple of another length, a dict of named arguments, or a single value. Arrays and lists of numbers become tensors,
    and floats double precision, so that the result does not depend on how samples are batched.

    Results: a single number has the metric's name; elements of a vector are named `<name>_<index>`; entries of a dict
    and members of a collection keep their names.

    Args:
        metric: A `torchmetrics.Metric` or `MetricCollection`; it is reset at the start of each validation set.
        name: The key under which `validation_step` returns the inputs; None means the class name in snake case.
        greater_is_better: The direction; None uses the metric's `higher_is_better`.
        main_metric: The result entry for model selection; None means the name, or each member of a collection.

    Raises:
        MetricError: `metric` has another type.
    """

    def __init__(
        self,
        metric: Any,
        name: str | None = None,
        *,
        greater_is_better: bool | None = None,
        main_metric: str | None = None,
    ) -> None:
        if not is_torch_metric(metric):
            expected = "a torchmetrics.Metric or MetricCollection"
            raise fail(
                MetricError,
                "TorchMetric(...)",
                got=describe(metric),
                expected=expected,
                do="TorchMetric(MeanSquaredError())",
            )
        if not name:  # the class name in snake case
            words = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])"
            name = re.sub(words, "_", type(metric).__name__).lower()
        is_collection = isinstance(metric, nn.ModuleDict)
        self.members: dict[str, torchmetrics.Metric] = dict(metric.items()) if is_collection else {name: metric}
        self._is_main_required = main_metric is not None
        members = list(self.members.values())
        self._greater = {}
        for entry in self.members if main_metric is None else [main_metric]:
            member = self.members.get(entry, members[0] if len(members) == 1 else None)
            own = None if member is None else member.higher_is_better
            self._greater[entry] = own if greater_is_better is None else greater_is_better
        first, greater = next(iter(self._greater.items()))
        super().__init__(name, greater_is_better=greater, main_metric=first)

    def prepare(self, entry: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the positional and named arguments of `update`; None if there is nothing to add.

        Args:
            entry: The value that `validation_step` returned under the metric's name.
        """
        if isinstance(entry, Mapping):
            return (), dict(entry)
        return (tuple(entry) if isinstance(entry, tuple) or is_pair(entry) else (entry,)), {}

    @property
    def directions(self) -> Mapping[str, IsBetter]:
        """For each entry of the result that models can be selected by, whether a new value beats an old one."""
        return {entry: partial(self._is_better, entry) for entry in self._greater}

    def is_better(self, new: float, best: float) -> bool:
        """Return whether `new` beats `best` in the main metric's direction; NaN never does.

        Raises:
            MetricError: torchmetrics does not define the direction, and you did not set it.
        """
        return self._is_better(self.main_metric, new, best)

    def _is_better(self, entry: str, new: float, best: float) -> bool:
        greater = self._greater[entry]
        if greater is None:
            got = f"no direction for {entry!r}: torchmetrics does not define whether higher is better"
            do = f"TorchMetric(metric, {self.name!r}, greater_is_better=True) from accmt.metrics, or False"
            raise metric_error(self.name, got, "a direction for model selection", do)
        return new > best if greater else new < best

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Compute the metric over all predictions and references, on this process only."""
        accumulation = _States(self)
        accumulation.add((predictions, references), 0)
        return accumulation.compute_here([])

    def accumulate(self) -> Accumulation:
        return _States(self)

    def read(self) -> dict[str, float]:
        """Return the values of the metric's current states.

        Raises:
            MetricError: There are values other than numbers, vectors and dicts of them, or the main metric is missing.
        """
        values: dict[str, float] = {}
        for name, member in self.members.items():
            values |= _flatten(self.name, name, member.compute())
        if self._is_main_required and self.main_metric not in values:
            got, do = f"compute returned the entries {list(values)}", f"main_metric={next(iter(values), None)!r}"
            raise metric_error(self.name, got, f"the entry {self.main_metric!r}", do)
        return values


class _States:
    """The state of a torchmetrics metric for one validation set."""

    def __init__(self, metric: TorchMetric) -> None:
        self._metric = metric
        self._members = list(metric.members.values())
        for member in self._members:
            _reset(member)
        self._kept = [_KeptLists(member) for member in self._members]
        self._dtype = None if any(map(_has_network, self._members)) else torch.float64

    def add(self, entry: Any, position: Position) -> None:
        from accelerate.utils import find_device

        inputs = self._metric.prepare(entry)
        if inputs is None:
            return
        arguments, named = _to_tensors(inputs, self._dtype)
        device = find_device((arguments, named))
        for member, kept in zip(self._members, self._kept, strict=True):
            if device is not None:
                _move(member, device)
            try:
                member.update(*arguments, **named)
            except torch.OutOfMemoryError:
                raise
            except _INPUT_ERRORS as error:
                shown = [*map(describe, arguments), *(f"{name}: {describe(value)}" for name, value in named.items())]
                raise self._wrong_inputs(f"{', '.join(shown)}: {error}") from error
            kept.move_new()

    def compute(self, chunk_bytes: int | None = CHUNK_BYTES) -> dict[str, float]:
        # On the main process, for each member and the metrics that it wraps, the number of updates and the state of
        # each process with updates; nothing on the others, or with one process.
        several = num_processes() > 1
        gathered = [
            [_gather_states(each, chunk_bytes) for each in _every_metric(member)] if several else []
            for member in self._members
        ]
        values = run_on_main_process(lambda: self.compute_here(gathered))
        for member in self._members:
            _reset(member)  # keeps no samples until the next evaluation
        return values

    def compute_here(self, gathered: list[Any]) -> dict[str, float]:
        """Compute from the states of all processes, on the CPU unless the metric has a network."""
        for index, member in enumerate(self._members):
            if not _has_network(member):
                _move(member, torch.device("cpu"))
            joined = gathered[index] if gathered else []  # if empty, the member keeps its own states
            for each, states in zip(_every_metric(member) if joined else [], joined, strict=True):
                for name in each.metric_state if states else ():
                    setattr(each, name, _reduce(each, name, [state[name] for _, state in states]))
                set_update_count(each, sum(num_updates for num_updates, _ in states))
        if not any(member.update_called for member in self._members):
            raise self._wrong_inputs("no samples: all references are ignored")
        try:
            with torch.inference_mode():  # like validation steps: their tensors cannot be modified in another mode
                return self._metric.read()
        except MetricError:
            raise
        except _INPUT_ERRORS as error:
            raise self._wrong_inputs(f"compute: {error}") from error

    def _wrong_inputs(self, got: str) -> MetricError:
        expected = "inputs for update of " + ", ".join(type(member).__name__ for member in self._members)
        do = "check what validation_step returns under this name"
        return metric_error(self._metric.name, got, expected, do)


def _to_tensors(value: Any, dtype: torch.dtype | None) -> Any:
    """Return the value with arrays and lists of numbers as tensors, and floats in `dtype` if the device supports it."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.as_tensor(value)
    if isinstance(value, list) and value and all(isinstance(item, Real) for item in value):
        value = torch.tensor(value)
    if isinstance(value, torch.Tensor):
        is_cast = dtype is not None and value.is_floating_point() and value.device.type != "mps"
        return value.detach().to(dtype) if is_cast else value.detach()
    if isinstance(value, Mapping):
        return {key: _to_tensors(item, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_to_tensors(item, dtype) for item in value)
    return value


def _flatten(metric: str, name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {key: item for entry in value for key, item in _flatten(metric, str(entry), value[entry]).items()}
    scalar = find_scalar(value)
    if scalar is not None:
        return {name: float(scalar)}
    if not isinstance(value, torch.Tensor) or value.ndim != 1:
        got, expected = (
            f"compute returned {name!r}: {describe(value)}",
            "a number, one number per class, or a dict of these",
        )
        raise metric_error(metric, got, expected, "choose a metric that returns numbers, for example an average")
    return {f"{name}_{index}": item for index, item in enumerate(value.tolist())}


def _every_metric(metric: torchmetrics.Metric) -> list[torchmetrics.Metric]:
    """Return the metric and the metrics it wraps."""
    import torchmetrics

    return [module for module in metric.modules() if isinstance(module, torchmetrics.Metric)]


def _reset(metric: torchmetrics.Metric) -> None:
    """Reset a metric, and set it to double precision without its own communication.

    A metric that contains a network keeps its precision.
    """
    metric.reset()
    for each in _every_metric(metric):
        each.distributed_available_fn = bool  # False
        for name in _list_states(each):
            setattr(each, name, [])  # members of a collection may have shared one list
    if not _has_network(metric):
        metric.to("cpu")
        _set_precision(metric, torch.float64)


def _move(metric: torchmetrics.Metric, device: torch.device) -> None:
    if metric.device == device:
        return
    if device.type == "mps" and not _has_network(metric):  # which has no double precision
        _set_precision(metric, torch.float32)
    metric.to(device)


def _has_network(metric: torchmetrics.Metric) -> bool:
    """Return whether a metric has weights: some metrics for images and text use a model."""
    return next(metric.parameters(), None) is not None


def _set_precision(metric: torchmetrics.Metric, dtype: torch.dtype) -> None:
    for each in _every_metric(metric):
        each.set_dtype(dtype)


class _KeptLists:
    """Moves new entries of a metric's lists to the CPU, so that only one batch stays on the device."""

    def __init__(self, metric: torchmetrics.Metric) -> None:
        self._metrics = _every_metric(metric)
        self._num_moved: dict[tuple[int, str], int] = defaultdict(int)

    def move_new(self) -> None:
        """Move the entries added since the last call."""
        for index, metric in enumerate(self._metrics):
            for name in _list_states(metric):
                values = getattr(metric, name)
                first = self._num_moved[index, name]
                values[first:] = to_cpu(values[first:])
                self._num_moved[index, name] = len(values)


def _list_states(metric: torchmetrics.Metric) -> list[str]:
    """Return the names of a metric's states that are lists."""
    return [name for name, value in metric.metric_state.items() if isinstance(value, list)]


def _gather_states(metric: torchmetrics.Metric, chunk_bytes: int | None) -> list[tuple[int, State]]:
    lists = _list_states(metric)
    tensors = {name: to_cpu(value) for name, value in metric.metric_state.items() if name not in lists}
    counted = gather_on_main_process([(metric.update_count, tensors)], chunk_bytes)
    items = gather_on_main_process([(name, item) for name in lists for item in getattr(metric, name)], chunk_bytes)
    states = []
    for [(num_updates, state)], of_process in zip(counted, items, strict=True):
        state |= {name: [item for of_list, item in of_process if of_list == name] for name in lists}
        if num_updates:
            states.append((num_updates, state))
    return states


def _reduce(metric: torchmetrics.Metric, name: str, states: list[Any]) -> Any:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    reduction = reduction_of(metric, name)
    if isinstance(states[0], list):
        items = [item for state in states for item in state]
        return items if reduction in (None, dim_zero_cat) or len(states) == 1 else reduction(items)
    if len(states) == 1:
        return states[0].to(metric.device)
    stacked = torch.stack(states).to(metric.device)
    if reduction is dim_zero_mean:
        if not bool((stacked == stacked[0]).all()):
            got = f"the state {name!r} is averaged over processes (dist_reduce_fx='mean') without sample weights"
            do = "use a sum and a count as states, each with dist_reduce_fx='sum'"
            raise fail(
                MetricError,
                f"metric {type(metric).__name__}",
                got=got,
                expected="states that can be joined exactly",
                do=do,
            )
        return stacked[0]
    return stacked if reduction is None else reduction(stacked)
