"""The Trainer's arguments about evaluations."""

from __future__ import annotations

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
"""Which results go into a mean: a function of a result's name, or their names."""


def _require_size(name: str, value: Any) -> None:
    read_size(name, value)


@dataclass(frozen=True, kw_only=True)
class MetricOptions(Options):
    """What becomes of results, and how predictions travel.

    Args:
        averages: Results of which the mean is taken, by the name of that mean: a function of a result's name, such as
            `{"mean_accuracy": lambda name: name.startswith("accuracy")}`, or the names, such as
            `["accuracy__en", "accuracy__de"]`. Losses are not among them; `best_mean_accuracy` and `patience` can go
            by it.
        derived: A function that gets the values of each such mean in a list by its name, and returns further results
            by name.
        report_all: Whether results that have gone into a mean are logged too.
        gather_chunk_size: How much of each process's predictions travels to the main process at a time, where a metric
            or `predict` needs them there: bytes, or text such as "32MB"; None is all at once.
    """

    averages: Mapping[str, Choice] | None = None
    derived: Callable[[dict[str, list[float]]], dict[str, float]] | None = None
    report_all: bool = False
    gather_chunk_size: Annotated[int | str, _require_size] | None = "32MB"

    def check(self, name: str) -> None:
        """Check the names of means, and what chooses their members."""
        require_mapping(f"{name}.averages", self.averages)
        for mean, choice in (self.averages or {}).items():
            if not isinstance(mean, str) or not mean or any(mark in mean for mark in ("__", "@", "/")):
                expected = "a name without '__', '@' and '/', which separate the names of metrics and sets"
                raise_wrong_value(f"{name}.averages", mean, expected, 'MetricOptions(averages={"mean_accuracy": ...})')
            if not (callable(choice) or _are_names(choice)):
                expected = "a function of a result's name, or a list of names"
                do = f'{{{mean!r}: lambda name: name.startswith("accuracy")}}'
                raise_wrong_value(f"{name}.averages", choice, expected, do)
        if self.derived is not None and not (callable(self.derived) and self.averages):
            expected = 'a function of the values of "averages", beside these'
            raise_wrong_value(f"{name}.derived", self.derived, expected, "MetricOptions(averages={...}) too")

    @property
    def chunk_bytes(self) -> int | None:
        """How much of each process's predictions travels at a time; None is all."""
        size = self.gather_chunk_size
        return None if size is None else read_size("metric_options.gather_chunk_size", size)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When and how validation data are evaluated.

    Args:
        evaluate_every_n_steps: Optimizer steps from one evaluation to the next, counted over epochs; as a float up to
            1.0 the fraction of an epoch's steps; or text such as "500 steps", "2 epochs", "0.25 epochs". None: at the
            end of each epoch.
        eval_when_finish: Whether to evaluate at the end where evaluations are between epochs and the last step was not
            evaluated yet.
        eval_when_start: Whether to evaluate before the first optimizer step, logged at step 0; saves no model.
        num_sanity_val_steps: Validation batches tried before training, so that a mistake there shows at once; it leaves
            no trace. 0 is off, -1 is all batches.
        inference_mode: Whether validation runs under `torch.inference_mode`; False: `torch.no_grad`.
        report_loss_after_eval: True logs the mean validation loss once per evaluation; False logs the loss of
            validation batches, every `log_every` of them.
        metrics: What is computed over all samples of a validation set: `Metric`s, `torchmetrics` metrics, names such as
            "f1", metrics of `evaluate`, a list of them, a dict of them by name, or a dict of lists by validation set.
            In a dict of names "min" or "max" is the better direction of a value that a step or a hook reports itself,
            as in `{"perplexity": "min"}`.
        metric_options: Means over results, and how predictions travel: `MetricOptions(averages=...)`, or a dict of its
            arguments.
    """

    evaluate_every_n_steps: int | float | str | None = None
    eval_when_finish: bool = True
    eval_when_start: bool = False
    num_sanity_val_steps: int = 2
    inference_mode: bool = True
    report_loss_after_eval: bool = True
    metrics: Any = None
    metric_options: MetricOptions = None  # type: ignore[assignment]  # which is read when this is made

    def __post_init__(self) -> None:
        require_flags(self)
        set_field(self, "metric_options", MetricOptions.read("metric_options", self.metric_options))
        require_int("num_sanity_val_steps", self.num_sanity_val_steps, at_least=-1)
        self.every  # noqa: B018 - raises what is wrong with it

    @property
    def every(self) -> Every:
        """The distance between evaluations."""
        steps = self.evaluate_every_n_steps
        if steps is None:
            return Every(1, "epoch")
        also = "; None is every epoch"
        return read_every("evaluate_every_n_steps", steps, ("epoch", "step"), plain="step", fractions=True, also=also)


def _are_names(choice: Any) -> bool:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
    return is_list and all(isinstance(name, str) for name in choice)
