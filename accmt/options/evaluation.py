"""Trainer arguments about evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from accmt.options.checks import (
    Options,
    raise_wrong_value,
    require_flags,
    require_int,
    require_mapping,
    set_field,
)
from accmt.options.units import Every, read_every, read_size

Choice: TypeAlias = Callable[[str], bool] | Sequence[str]
"""Results to average: a function of a result's name, or a list of names."""


def _require_size(name: str, value: Any) -> None:
    read_size(name, value)


@dataclass(frozen=True, kw_only=True)
class MetricOptions(Options):
    """Averages of results, and how predictions are gathered.

    Args:
        averages: Results to average. Each key is the name of an average, and its value selects results: a function of a
            result's name, such as `{"mean_accuracy": lambda name: name.startswith("accuracy")}`, or a list of names,
            such as `["accuracy__en", "accuracy__de"]`. Losses are not included. `best_mean_accuracy` and `patience` can
            monitor an average.
        derived: A function that receives a dict with the list of values of each average, and returns further results
            as a dict.
        report_all: Whether to also log results that are part of an average.
        gather_chunk_size: Size of the chunks in which each process sends predictions to the main process, if a metric
            or `predict` needs them there: bytes, or a string such as "32MB". None sends everything in one chunk.
    """

    averages: Mapping[str, Choice] | None = None
    derived: Callable[[dict[str, list[float]]], dict[str, float]] | None = None
    report_all: bool = False
    gather_chunk_size: Annotated[int | str, _require_size] | None = "32MB"

    def check(self, name: str) -> None:
        """Check the names of averages and the results they select."""
        require_mapping(f"{name}.averages", self.averages)
        for mean, choice in (self.averages or {}).items():
            if not isinstance(mean, str) or not mean or any(mark in mean for mark in ("__", "@", "/")):
                expected = "a name without '__', '@' and '/', which separate the names of metrics and sets"
                raise_wrong_value(f"{name}.averages", mean, expected, 'MetricOptions(averages={"mean_accuracy": ...})')
            is_list = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
            if not (callable(choice) or (is_list and all(isinstance(one, str) for one in choice))):
                expected = "a function of a result's name, or a list of names"
                do = f'{{{mean!r}: lambda name: name.startswith("accuracy")}}'
                raise_wrong_value(f"{name}.averages", choice, expected, do)
        if self.derived is not None and not (callable(self.derived) and self.averages):
            expected = 'a function of the values of "averages", and "averages" itself'
            raise_wrong_value(f"{name}.derived", self.derived, expected, "MetricOptions(averages={...}) too")

    @property
    def chunk_bytes(self) -> int | None:
        """How many bytes of each process's predictions are sent at a time; None means all."""
        size = self.gather_chunk_size
        return None if size is None else read_size("metric_options.gather_chunk_size", size)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Evaluation on validation data.

    Args:
        evaluate_every_n_steps: Optimizer steps between evaluations, counted across epochs; a float up to 1.0 is a
            fraction of an epoch's steps; or a string such as "500 steps", "2 epochs", "0.25 epochs". None: at the end
            of each epoch. "never": not at all, for example because `accmt evaluate` does it in another process.
        eval_when_finish: Whether to evaluate at the end of training if evaluations do not follow epochs and the last
            step has not been evaluated yet.
        eval_when_start: Whether to evaluate before the first optimizer step, logged at step 0; saves no model.
        num_sanity_val_steps: Validation batches to run before training, so that errors show early; they have no other
            effect. 0 is off, -1 runs all batches.
        inference_mode: Whether validation runs under `torch.inference_mode`; False: `torch.no_grad`.
        report_loss_after_eval: True logs the mean validation loss once per evaluation. False logs the loss of every
            `log_every`-th validation batch.
        metrics: Metrics over all samples of a validation set: names such as "f1", `Metric` or `torchmetrics` objects,
            or metrics from `evaluate`; one of them, a list, a dict by name, or a dict of lists by validation set.
            `{"perplexity": "min"}` declares that lower is better, for a value that a step or a hook reports.
        metric_options: Which results to average, and how to gather predictions: `MetricOptions(averages=...)`, or a
            dict of its arguments.
    """

    evaluate_every_n_steps: int | float | str | None = None
    eval_when_finish: bool = True
    eval_when_start: bool = False
    num_sanity_val_steps: int = 2
    inference_mode: bool = True
    report_loss_after_eval: bool = True
    metrics: Any = None
    metric_options: MetricOptions = None  # type: ignore[assignment]  # set in __post_init__

    def __post_init__(self) -> None:
        require_flags(self)
        set_field(self, "metric_options", MetricOptions.read("metric_options", self.metric_options))
        require_int("num_sanity_val_steps", self.num_sanity_val_steps, at_least=-1)
        self.every  # noqa: B018 - raises if invalid

    @property
    def is_off(self) -> bool:
        """Whether training is never interrupted by an evaluation."""
        return self.evaluate_every_n_steps == "never"

    @property
    def every(self) -> Every:
        """The interval between evaluations."""
        steps = self.evaluate_every_n_steps
        if steps is None:
            return Every(1, "epoch")
        if self.is_off:
            return Every(sys.maxsize, "step")
        also = '; None means every epoch, and "never" not at all'
        return read_every("evaluate_every_n_steps", steps, ("epoch", "step"), plain="step", fractions=True, also=also)
