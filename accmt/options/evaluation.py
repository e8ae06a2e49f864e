"""The Trainer's arguments about evaluations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypedDict

from accmt.options.checks import meant, raise_wrong_value, require_flags, require_int, require_mapping, require_options
from accmt.options.units import Every, read_every, read_size

Choice: TypeAlias = Callable[[str], bool] | Sequence[str]
"""Which results go into a mean: a function of a result's name, or their names."""


class MetricOptions(TypedDict, total=False):
    """What becomes of results, and how predictions travel; described at `metric_options`."""

    means: Mapping[str, Choice]
    further: Callable[[dict[str, list[float]]], dict[str, float]]
    report_all: bool
    gather_chunk_size: int | str | None


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
        metric_options: A dict. "means": results of which the mean is taken, by the name of that mean: a function of a
            result's name, such as `{"mean_accuracy": lambda name: name.startswith("accuracy")}`, or the names, such as
            `["accuracy__en", "accuracy__de"]`; losses are not among them; `best_mean_accuracy` and `patience` can go by
            it. "further": a function that gets the values of each such mean in a list by its name, and returns further
            results by name. "report_all": whether results that have gone into a mean are logged too; they are not
            unless it is True. "gather_chunk_size": how much of each process's predictions travels to the main process
            at a time, where a metric or `predict` needs them there: bytes, or text such as "32MB" (the default); None
            is all at once.
    """

    evaluate_every_n_steps: int | float | str | None = None
    eval_when_finish: bool = True
    eval_when_start: bool = False
    num_sanity_val_steps: int = 2
    inference_mode: bool = True
    report_loss_after_eval: bool = True
    metrics: Any = None
    metric_options: MetricOptions | None = None

    def __post_init__(self) -> None:
        require_flags(self)
        require_options("metric_options", self.metric_options, MetricOptions)
        self._check_means()
        if self.gather_chunk_size is not None:
            read_size("metric_options.gather_chunk_size", self.gather_chunk_size)
        require_int("num_sanity_val_steps", self.num_sanity_val_steps, at_least=-1)
        if self.evaluate_every_n_steps is not None:
            _read_rhythm(self.evaluate_every_n_steps)

    def _check_means(self) -> None:
        means = self.consolidate_metrics
        require_mapping("metric_options.means", means)
        for name, choice in (means or {}).items():
            if not isinstance(name, str) or not name or any(mark in name for mark in ("__", "@", "/")):
                expected = "a name without '__', '@' and '/', which separate the names of metrics and sets"
                do = 'metric_options={"means": {"mean_accuracy": ...}}'
                raise_wrong_value("metric_options.means", name, expected, do)
            if not (callable(choice) or _are_names(choice)):
                expected = "a function of a result's name, or a list of names"
                do = f'{{{name!r}: lambda name: name.startswith("accuracy")}}'
                raise_wrong_value("metric_options.means", choice, expected, do)
        further = self.additional_metric_consolidation
        if further is not None and not (callable(further) and means):
            expected = 'a function of the values of "means", beside these'
            raise_wrong_value("metric_options.further", further, expected, 'metric_options={"means": {...}} too')
        if not isinstance(self.report_all_metrics, bool):
            raise_wrong_value("metric_options.report_all", self.report_all_metrics, "True or False", "True")

    @property
    def every(self) -> Every:
        """The distance between evaluations."""
        steps = self.evaluate_every_n_steps
        return Every(1, "epoch") if steps is None else _read_rhythm(steps)

    @property
    def consolidate_metrics(self) -> Mapping[str, Choice] | None:
        """Results of which the mean is taken."""
        return (self.metric_options or {}).get("means")

    @property
    def additional_metric_consolidation(self) -> Callable[[dict[str, list[float]]], dict[str, float]] | None:
        """What makes further results of the values of each mean."""
        return (self.metric_options or {}).get("further")

    @property
    def report_all_metrics(self) -> bool:
        """Whether results that have gone into a mean are logged too."""
        return (self.metric_options or {}).get("report_all", False)

    @property
    def gather_chunk_size(self) -> int | str | None:
        """How much of each process's predictions travels at a time, as written."""
        return (self.metric_options or {}).get("gather_chunk_size", "32MB")

    @property
    def chunk_bytes(self) -> int | None:
        """How much of each process's predictions travels at a time; None is all."""
        size = self.gather_chunk_size
        return None if size is None else read_size("metric_options.gather_chunk_size", size)


def _read_rhythm(steps: Any) -> Every:
    name = "evaluate_every_n_steps"
    if isinstance(steps, str) and any(map(str.isalpha, steps)):
        return read_every(name, steps, ("epoch", "step"), fractions=True)
    if not _is_rhythm(steps):
        expected = 'a whole number of steps from 1, a float fraction of an epoch up to 1.0, or text such as "2 epochs"'
        raise_wrong_value(name, steps, expected, f"{name}={meant(steps, _is_rhythm, 500)}, or None for every epoch")
    return Every(steps, "epoch" if isinstance(steps, float) else "step")


def _is_rhythm(steps: Any) -> bool:
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    return is_count or isinstance(steps, float) and 0.0 < steps <= 1.0


def _are_names(choice: Any) -> bool:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
    return is_list and all(isinstance(name, str) for name in choice)
