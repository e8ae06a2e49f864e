"""What the Trainer was told about evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accmt.settings.checks import raise_wrong_value, require_flags, require_int


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
    """

    evaluate_every_n_steps: int | float | None = None
    evaluate_every_n_epochs: int = 1
    eval_when_finish: bool = True
    eval_when_start: bool = False
    num_sanity_val_steps: int = 2
    inference_mode: bool = True
    report_loss_after_eval: bool = True
    metrics: Any = None

    def __post_init__(self) -> None:
        require_flags(self)
        require_int("evaluate_every_n_epochs", self.evaluate_every_n_epochs, at_least=1)
        require_int("num_sanity_val_steps", self.num_sanity_val_steps, at_least=-1)
        steps = self.evaluate_every_n_steps
        if steps is None:
            return
        is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1
        is_fraction = isinstance(steps, float) and 0.0 < steps <= 1.0
        if not (is_count or is_fraction):
            expected = "a whole number of updates from 1, a float fraction of an epoch up to 1.0, or None"
            raise_wrong_value("evaluate_every_n_steps", steps, expected, "evaluate_every_n_steps=None for every epoch")
        if self.evaluate_every_n_epochs != 1:
            expected = "either evaluate_every_n_steps or evaluate_every_n_epochs"
            raise_wrong_value("evaluate_every_n_epochs", self.evaluate_every_n_epochs, expected, "drop one of the two")
