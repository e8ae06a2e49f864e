"""Named types of Trainer arguments; only for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from accelerate.tracking import GeneralTracker
from torch.utils.data import Sampler

from accmt.metrics import Metric

if TYPE_CHECKING:
    from accmt.addons.trackers.spec import TrackerSpec


class TorchMetric(Protocol):
    """A `torchmetrics.Metric` or `MetricCollection`; torchmetrics need not be installed."""

    @property
    def update(self) -> Callable[..., Any]: ...
    @property
    def compute(self) -> Callable[..., Any]: ...
    @property
    def reset(self) -> Callable[..., Any]: ...


Tracker: TypeAlias = "str | TrackerSpec | type[TrackerSpec] | GeneralTracker | type[GeneralTracker]"
Trackers: TypeAlias = "bool | Tracker | Sequence[Tracker]"
"""Values of `log_with`."""

Samplers: TypeAlias = Sampler[Any] | Callable[[Any], Iterable[Any]] | Sequence[Any]
"""A sampler, a function that creates one from a dataset, a list of indices, or a list with one for each set."""

CollateFunction: TypeAlias = Callable[[list[Any]], Any]
Collate: TypeAlias = CollateFunction | Sequence[Callable[[Any], Any]]
"""One function, or several to apply one after the other."""

OneMetric: TypeAlias = str | Metric | TorchMetric
Metrics: TypeAlias = OneMetric | Sequence[OneMetric] | Mapping[str, OneMetric | Sequence[OneMetric]]
"""Values of `metrics`: a metric or its name, several, by name, or lists by validation set."""

Bound: TypeAlias = float | Mapping[str, float]
"""A threshold for all values, or one by name."""
