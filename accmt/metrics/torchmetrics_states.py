"""The states of torchmetrics' metrics: begun anew, kept on the CPU, and put together over processes.

Their own synchronisation hands every state to every process, and on the device; it fails where a process without a
batch has an empty state of another shape, and averages states that are means without regard to samples.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from accmt.errors import MetricError, explain
from accmt.metrics.gathering import gather_on_main_process, to_cpu
from accmt.processes import num_processes

if TYPE_CHECKING:
    import torchmetrics

State = dict[str, Any]


def every_metric(metric: torchmetrics.Metric) -> list[torchmetrics.Metric]:
    """Return the metric and those that it wraps."""
    import torchmetrics

    return [module for module in metric.modules() if isinstance(module, torchmetrics.Metric)]


def begin_anew(metric: torchmetrics.Metric) -> None:
    """Empty a metric, let it compute in double precision, and never let it talk to other processes by itself.

    A metric with a network of its own keeps its precision.
    """
    metric.reset()
    for each in every_metric(metric):
        each.distributed_available_fn = _alone
        for name in _list_states(each):
            setattr(each, name, [])  # members of a collection may have shared one list
    if not has_network(metric):
        metric.to("cpu")
        _set_precision(metric, torch.float64)


def _alone() -> bool:
    return False


def place(metric: torchmetrics.Metric, device: torch.device) -> None:
    """Move a metric to where its inputs are."""
    if metric.device == device:
        return
    if device.type == "mps" and not has_network(metric):  # which has no double precision
        _set_precision(metric, torch.float32)
    metric.to(device)


def has_network(metric: torchmetrics.Metric) -> bool:
    """Return whether a metric has weights, as those of images and texts have that judge by a model."""
    return next(metric.parameters(), None) is not None


def _set_precision(metric: torchmetrics.Metric, dtype: torch.dtype) -> None:
    for each in every_metric(metric):
        each.set_dtype(dtype)


def _list_states(metric: torchmetrics.Metric) -> list[str]:
    return [name for name, default in metric._defaults.items() if isinstance(default, list)]


class KeptLists:
    """Moves what a metric appends to its lists to the CPU, so that no more than one batch stays on the device.

    Args:
        metric: The metric, just begun anew.
    """

    def __init__(self, metric: torchmetrics.Metric) -> None:
        self._metrics = every_metric(metric)
        self._num_moved: dict[tuple[int, str], int] = defaultdict(int)

    def move_new(self) -> None:
        """Move what was appended since the last call."""
        for index, metric in enumerate(self._metrics):
            for name in _list_states(metric):
                values = getattr(metric, name)
                first = self._num_moved[index, name]
                values[first:] = to_cpu(values[first:])
                self._num_moved[index, name] = len(values)


def bring_together(metric: torchmetrics.Metric, chunk_bytes: int | None) -> list[list[tuple[int, State]]]:
    """Bring the states of a metric, and of those that it wraps, to the main process.

    Processes: collective.

    Args:
        metric: The metric.
        chunk_bytes: As in `gather_on_main_process`.

    Returns:
        For each of `every_metric`, on the main process, the number of updates and the state of each process that made
        any; nothing on the others, or where there is one process.
    """
    return [] if num_processes() == 1 else [_bring_one(each, chunk_bytes) for each in every_metric(metric)]


def _bring_one(metric: torchmetrics.Metric, chunk_bytes: int | None) -> list[tuple[int, State]]:
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


def put_together(metric: torchmetrics.Metric, gathered: list[list[tuple[int, State]]]) -> None:
    """Give a metric the states of all processes, on the device where it is.

    Args:
        metric: The metric.
        gathered: What `bring_together` returned on the main process; nothing leaves the metric as it is.

    Raises:
        MetricError: A state is averaged over processes, and differs between them.
    """
    for each, states in zip(every_metric(metric) if gathered else [], gathered, strict=True):
        for name in each.metric_state if states else ():
            setattr(each, name, _reduce(each, name, [state[name] for _, state in states]))
        each._update_count = sum(num_updates for num_updates, _ in states)


def _reduce(metric: torchmetrics.Metric, name: str, states: list[Any]) -> Any:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_mean

    reduction: Any = metric._reductions[name]
    if isinstance(states[0], list):
        items = [item for state in states for item in state]
        return items if reduction in (None, dim_zero_cat) or len(states) == 1 else reduction(items)
    if len(states) == 1:
        return states[0].to(metric.device)
    stacked = torch.stack(states).to(metric.device)
    if reduction is dim_zero_mean:
        return _require_equal(metric, name, stacked)
    return stacked if reduction is None else reduction(stacked)


def _require_equal(metric: torchmetrics.Metric, name: str, stacked: torch.Tensor) -> torch.Tensor:
    if not bool((stacked == stacked[0]).all()):
        got = f"the state {name!r} is averaged over processes (dist_reduce_fx='mean'), which counts no samples"
        do = "keep a sum and a count, each with dist_reduce_fx='sum'"
        raise MetricError(explain(f"metric {type(metric).__name__}", got, "states that can be put together", do))
    return stacked[0]
