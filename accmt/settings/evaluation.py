"""What the Trainer was told about evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from accmt.settings.checks import meant, raise_wrong_value, require_flags, require_int, require_mapping
from accmt.settings.sizes import read_size


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When and how validation data are evaluated.

    Args:
        evaluate_every_n_steps: Updates from one evaluation to the next, counted over epochs, or as a float up to 1.0
            the fraction of an epoch's updates. None: at the end of epochs.
        evaluate_every_n_epochs: Epochs from one evaluation to the next, where `evaluate_every_n_steps` is None.
        eval_when_finish: Whether to evaluate at the end where `evaluate_every_n_steps` is given and the last update was
            not evaluated yet.
        eval_when_start: Whether to evaluate before the first update, logged at step 0; saves no model.
        num_sanity_val_steps: Validation batches tried before training, so that a mistake there shows at once; it leaves
            no trace. 0 is off, -1 is all batches.
        inference_mode: Whether validation runs under `torch.inference_mode`; False: `torch.no_grad`.
        report_loss_after_eval: True logs the mean validation loss once per evaluation; False logs the loss of
            validation batches, every `log_every` of them.
        metrics: What is computed over all samples of a validation set: `Metric`s, `torchmetrics` metrics, names such as
            "f1", a list of them, a dict of them by name, or a dict of lists by validation set.
        consolidate_metrics: Results of which the mean is taken, by the name of that mean: a function of a result's
            name, such as `{"mean_accuracy": lambda name: name.startswith("accuracy")}`, or the names, such as
            `["accuracy__en", "accuracy__de"]`. Losses are not among them. `best_mean_accuracy` and `patience` can go
            by it.
        additional_metric_consolidation: A function that gets the values of each consolidated result in a list by its
            name, and returns further results by name.
        report_all_metrics: Whether results that were consolidated are logged too.
        gather_chunk_size: How much of each process's predictions travels to the main process at a time, where a metric
            or `predict` needs them there: bytes, or text such as "32MB"; None is all at once.
    """

    evaluate_every_n_steps: int | float | None = None
    evaluate_every_n_epochs: int = 1
    eval_when_finish: bool = True
    eval_when_start: bool = False
    num_sanity_val_steps: int = 2
    inference_mode: bool = True
    report_loss_after_eval: bool = True
    metrics: Any = None
    consolidate_metrics: Mapping[str, Any] | None = None
    additional_metric_consolidation: Callable[[dict[str, list[float]]], dict[str, float]] | None = None
    report_all_metrics: bool = False
    gather_chunk_size: int | str | None = "32MB"

    def __post_init__(self) -> None:
        require_flags(self)
        self._check_consolidation()
        if self.gather_chunk_size is not None:
            read_size("gather_chunk_size", self.gather_chunk_size)
        require_int("evaluate_every_n_epochs", self.evaluate_every_n_epochs, at_least=1)
        require_int("num_sanity_val_steps", self.num_sanity_val_steps, at_least=-1)
        steps = self.evaluate_every_n_steps
        if steps is None:
            return
        if not _is_rhythm(steps):
            expected = "a whole number of updates from 1, a float fraction of an epoch up to 1.0, or None"
            do = f"evaluate_every_n_steps={meant(steps, _is_rhythm, 500)}, or None for every epoch"
            raise_wrong_value("evaluate_every_n_steps", steps, expected, do)
        if self.evaluate_every_n_epochs != 1:
            expected = "either evaluate_every_n_steps or evaluate_every_n_epochs"
            raise_wrong_value("evaluate_every_n_epochs", self.evaluate_every_n_epochs, expected, "drop one of the two")

    def _check_consolidation(self) -> None:
        require_mapping("consolidate_metrics", self.consolidate_metrics)
        for name, choice in (self.consolidate_metrics or {}).items():
            if not isinstance(name, str) or not name or any(mark in name for mark in ("__", "@", "/")):
                expected = "a name without '__', '@' and '/', which separate the names of metrics and sets"
                raise_wrong_value("consolidate_metrics", name, expected, 'consolidate_metrics={"mean_accuracy": ...}')
            if not (callable(choice) or _are_names(choice)):
                expected = "a function of a result's name, or a list of names"
                do = f'{{{name!r}: lambda name: name.startswith("accuracy")}}'
                raise_wrong_value("consolidate_metrics", choice, expected, do)
        further = self.additional_metric_consolidation
        if further is not None and not (callable(further) and self.consolidate_metrics):
            expected = "a function of the values of consolidate_metrics, beside these"
            raise_wrong_value("additional_metric_consolidation", further, expected, "consolidate_metrics={...} too")

    @property
    def chunk_bytes(self) -> int | None:
        """How much of each process's predictions travels at a time; None is all."""
        size = self.gather_chunk_size
        return None if size is None else read_size("gather_chunk_size", size)


def _is_rhythm(steps: Any) -> bool:
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
    return is_count or isinstance(steps, float) and 0.0 < steps <= 1.0


def _are_names(choice: Any) -> bool:
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
    return is_list and all(isinstance(name, str) for name in choice)
