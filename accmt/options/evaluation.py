"""Trainer arguments about evaluation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from accmt.options.checks import Expected, Group, Off, Options, Range, raise_wrong_value, write_argument
from accmt.options.units import Every, read_every, read_size

Choice: TypeAlias = Callable[[str], bool] | Sequence[str]
"""Results to average: a function of a result's name, or a list of names."""


_AVERAGES = Expected(
    "a dict from names of averages to functions of a result's name, or lists of names",
    '{"mean_accuracy": ["accuracy"]}',
)
_DERIVED = Expected('a function of the values of "averages"', "my_function")


def _read_interval(name: str, value: Any) -> Every:
    """Return the interval between evaluations; "never" is longer than any run."""
    if value == "never":
        return Every(sys.maxsize, "step")
    also = '; None means every epoch, and "never" not at all'
    return read_every(name, value, ("epoch", "step"), plain="step", fractions=True, also=also)


@dataclass(frozen=True, kw_only=True)
class MetricOptions(Options):
    """Averages of results, and how predictions are gathered.

    Args:
        averages: Results to average. Each key is the name of an average, and its value selects results: a function of a
            result's name, such as `{"mean_accuracy": lambda name: name.startswith("accuracy")}`, or a list of names.
            Losses are not included. `best_mean_accuracy` and `patience` can monitor an average.
        derived: A function that receives a dict with the list of values of each average, and returns further results
            as a dict.
        report_all: Whether to also log results that are part of an average.
        gather_chunk_size: Size of the chunks in which predictions are sent to the main process: bytes, or a string such
            as "32MB". None sends everything in one chunk.
    """

    averages: Annotated[Mapping[str, Choice] | None, _AVERAGES, Off()] = None
    derived: Annotated[Callable[[dict[str, list[float]]], dict[str, float]] | None, _DERIVED, Off()] = None
    report_all: bool = False
    gather_chunk_size: Annotated[int | str | None, read_size, Off()] = "32MB"

    def check(self, name: str) -> None:
        """Check the names of averages and the results they select."""
        for mean, choice in (self.averages or {}).items():
            # With a separator in its name, an average would look like the result of a validation set.
            if not mean or "__" in mean or "@" in mean or "/" in mean:
                expected = "a name without '__', '@' and '/', which separate the names of metrics and sets"
                do = write_argument(f"{name}.averages", '{"mean_accuracy": ["accuracy"]}')
                raise_wrong_value(f"{name}.averages", mean, expected, do)
            # An empty list selects no result.
            if not choice:
                do = write_argument(f"{name}.averages", f'{{{mean!r}: lambda name: name.startswith("accuracy")}}')
                raise_wrong_value(f"{name}.averages", choice, "a function of a result's name, or a list of names", do)
        if self.derived is not None and not self.averages:
            expected = 'a function of the values of "averages", and "averages" itself'
            do = write_argument(f"{name}.averages", '{"mean_accuracy": ["accuracy"]}') + " too"
            raise_wrong_value(f"{name}.derived", self.derived, expected, do)

    @property
    def chunk_bytes(self) -> int | None:
        """How many bytes of each process's predictions are sent at a time; None means all."""
        size = self.gather_chunk_size
        if size is None:
            return None
        return read_size("metric_options.gather_chunk_size", size)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings(Group):
    """Evaluation on validation data.

    Args:
        evaluate_every_n_steps: Steps or interval between evaluations, such as "500 steps" or "0.25 epochs", counted
            across epochs. None: at the end of each epoch. "never": not at all, for example because `accmt evaluate`
            does it in another process.
        eval_when_finish: Whether to evaluate at the end of training if the last step has not been evaluated yet and
            evaluations do not follow epochs.
        eval_when_start: Whether to evaluate before the first optimizer step, logged at step 0; saves no model.
        num_sanity_val_steps: Validation batches to run before training, so that errors show early. 0 is off, -1 runs
            all batches.
        inference_mode: Whether validation runs under `torch.inference_mode`; False: `torch.no_grad`.
        report_loss_after_eval: True logs the mean validation loss once per evaluation, False the loss of every
            `log_every`-th validation batch.
        metrics: Metrics over all samples of a validation set: names such as "f1", `Metric` or `torchmetrics` objects,
            or metrics from `evaluate`; one, a list, a dict by name, or a dict of lists by validation set.
            `{"perplexity": "min"}` sets the direction of a value that a step or a hook reports.
        metric_options: Which results to average, and how to gather predictions: `MetricOptions(averages=...)`, or a
            dict.
    """

    evaluate_every_n_steps: Annotated[int | float | str | None, _read_interval] = None
    eval_when_finish: bool = True
    eval_when_start: bool = False
    num_sanity_val_steps: Annotated[int, Range(ge=-1), Off(0)] = 2
    inference_mode: bool = True
    report_loss_after_eval: bool = True
    metrics: Annotated[Any, Off()] = None
    metric_options: Annotated[MetricOptions, Off()] = None  # type: ignore[assignment]  # set in __post_init__

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
        return _read_interval("evaluate_every_n_steps", steps)
