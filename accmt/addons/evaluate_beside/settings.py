"""Checks settings of a run that never evaluates, because another process does."""

from __future__ import annotations

from collections.abc import Sequence

from accmt.errors import ArgumentError, fail
from accmt.options import Settings
from accmt.options.optimizer_and_scheduler_arguments import watches_a_result
from accmt.options.saving import RegisteredSaving


def reject_without_evaluations(settings: Settings, registered: Sequence[RegisteredSaving]) -> None:
    """Reject settings that wait for an evaluation in a run that never evaluates."""
    beside = "`accmt evaluate RUN --watch --save-best best_valid_loss` saves the best model"
    every, scheduler = settings.checkpoints.every, settings.hps.scheduler_class
    rules = [*([settings.saving.rule] if settings.saving.rule else []), *(saving.name for saving in registered)]
    waiting = [
        (rules, f"model_saving={rules[0] if rules else None!r}", f'model_saving="last"; {beside}'),
        (settings.saving.patience is not None, "patience", "leave `patience` out"),
        (every is not None and every.unit == "eval", "checkpoint_every in evaluations", 'checkpoint_every="500 steps"'),
        (watches_a_result(scheduler), "a scheduler that monitors a result", "choose another scheduler"),
        (settings.evaluation.eval_when_start, "eval_when_start=True", "leave `eval_when_start` out"),
    ]
    for is_set, got, do in waiting:
        if is_set:
            where = 'Trainer(evaluate_every_n_steps="never")'
            raise fail(ArgumentError, where, got=got, expected="nothing that needs an evaluation in the run", do=do)
