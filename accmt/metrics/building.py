"""Builds the metrics of `Trainer(metrics=...)`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import isfunction
from itertools import chain
from typing import Any

from accmt.errors import MetricError, fail
from accmt.metrics.metric import Metric, ReportedValue
from accmt.metrics.results import describe
from accmt.registry import addon, find, names


def is_torch_metric(value: Any) -> bool:
    """Return whether a value is a `torchmetrics.Metric` or `MetricCollection`, without importing the package."""
    package = sys.modules.get("torchmetrics")
    return package is not None and isinstance(value, package.Metric | package.MetricCollection)


def is_evaluation_module(value: Any) -> bool:
    """Return whether a value is a metric of `evaluate`, without importing the package."""
    names = ("EvaluationModule", "CombinedEvaluations")
    return any(kind.__module__ == "evaluate.module" and kind.__name__ in names for kind in type(value).__mro__)


_WHERE = "Trainer(metrics=...)"
_EXPECTED = "accmt.Metric or torchmetrics.Metric objects, a MetricCollection, metrics of evaluate, or names of "


def build_metrics(value: Any) -> tuple[Metric, ...]:
    """Return the metrics for the value of `Trainer(metrics=...)`.

    Args:
        value: None, a `Metric`, a `torchmetrics.Metric` or `MetricCollection`, a metric of `evaluate`, a built-in
            metric's name such as "f1", "module:function" for a function of texts, a list or tuple of these, or a dict
            of them by name; "min" or "max" in a dict is the direction of a value reported under that name.
    """
    if value is None:
        return ()
    items = value if isinstance(value, list | tuple) else [value]
    metrics: list[Metric] = []
    for item in items:
        if isinstance(item, Mapping) and not is_torch_metric(item):  # a MetricCollection is a Mapping, too
            metrics += [_build_metric(metric, name) for name, metric in item.items()]
        else:
            metrics.append(_build_metric(item, None))
    _require_distinct([metric.name for metric in metrics])
    _require_distinct(list(chain.from_iterable(metric.directions for metric in metrics)))
    return tuple(metrics)


def _build_metric(value: Any, name: str | None) -> Metric:
    if name is not None and not isinstance(name, str):  # {F1(): "f1"}
        raise _wrong_value(f"the name {describe(name)}", 'metrics={"f1": F1()}')
    if isinstance(value, str):
        return _build_from_text(value, name)
    wrapped: Metric
    if is_torch_metric(value):
        wrapped = addon("torch_metric")(value, name)
        return wrapped
    if is_evaluation_module(value):
        wrapped = addon("evaluation_metric")(value, name)
        return wrapped
    if isfunction(value):  # `compute_metrics` of transformers, or a function of scikit-learn
        called = f"{value.__name__}(predictions, references)"
        do = f"class Mine(Metric): def compute(self, predictions, references): return {{self.name: {called}}}; then "
        do += f"pass metrics=Mine({value.__name__!r}) and return (predictions, references) under that name from "
        do += "validation_step. See docs/coming-from.md for this and for compute_metrics of transformers"
        raise _wrong_value(f"the function {value.__name__}", do)
    if isinstance(value, type):  # the parentheses are missing
        raise _wrong_value(f"the class {value.__name__}", f"metrics=[{value.__name__}()]")
    if not isinstance(value, Metric):
        raise _wrong_value(describe(value), "metrics=[Accuracy()]")
    if name not in (None, value.name):  # the step would have to return it under both
        got = f"the name {name!r} for a {type(value).__name__} named {value.name!r}"
        raise _wrong_value(got, f"{type(value).__name__}(..., name={name!r}), or metrics=[...] without names")
    return value


def _build_from_text(text: str, name: str | None) -> Metric:
    if text in ("min", "max") and name is not None:
        return ReportedValue(name, greater_is_better=text == "max")
    if ":" in text:  # "module:function"
        function: Metric = addon("text_function")(text, name)
        return function
    build = _find_by_name(text)
    return build() if name is None else build(name)


def _find_by_name(name: str) -> Callable[..., Metric]:
    try:
        metric: Callable[..., Metric] = find("accmt.metrics", name)
    except KeyError:
        known_names = names("accmt.metrics")
        similar = [known for known in known_names if known.startswith(name.lower())]
        similar = similar or get_close_matches(name.lower(), known_names, n=1)
        do = f"metrics=[{similar[0]!r}]" if similar else "a custom metric: class MyMetric(Metric)"
        raise _wrong_value(repr(name), do) from None
    return metric


def _require_distinct(names: list[str]) -> None:
    if len(set(names)) != len(names):  # the results of one would replace those of the other
        raise fail(MetricError, _WHERE, got=f"the names {names}", expected="unique names", do="rename one")


def _wrong_value(got: str, do: str) -> MetricError:
    return fail(MetricError, _WHERE, got=got, expected=_EXPECTED + ", ".join(names("accmt.metrics")), do=do)
