"""Settings of trial runs: `fast_dev_run` saves nothing, `overfit_batches` trains and validates on the same data."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accmt.options.settings import Settings


def apply_trials(settings: Settings) -> Settings:
    """Return settings with `fast_dev_run` and `overfit_batches` applied."""
    if settings.data.overfit_batches:
        settings = _for_overfitting(settings)
    return _for_fast_dev_run(settings) if settings.running.fast_dev_run else settings


def without_traces(settings: Settings) -> Settings:
    """Return settings for a run without models, checkpoints and trackers."""
    return replace(
        settings,
        saving=replace(settings.saving, model_saving=None, patience=None),
        checkpoints=replace(
            settings.checkpoints, checkpoint=None, resume=False, checkpoint_every=None, checkpointer=None, fork=None
        ),
        evaluation=replace(settings.evaluation, eval_when_start=False),
        tracking=replace(settings.tracking, log_with=None),
        handling=replace(settings.handling, handlers=None),
    )


def _for_fast_dev_run(settings: Settings) -> Settings:
    number = int(settings.running.fast_dev_run)
    hps = copy.copy(settings.hps)
    hps.epochs, hps.max_steps, hps.max_samples, hps.max_target_tokens = 1, number, None, None
    quiet = without_traces(settings)
    return replace(
        quiet,
        hps=hps,
        data=replace(quiet.data, limit_batches=number),
        evaluation=replace(quiet.evaluation, num_sanity_val_steps=0, evaluate_every_n_steps=None),
        running=replace(quiet.running, min_length=None, max_time=None),
    )


def _for_overfitting(settings: Settings) -> Settings:
    number = settings.data.overfit_batches
    data = replace(
        settings.data,
        limit_batches={
            "train": number,
            "val": number,
            "test": settings.data.limits.test,
            "predict": settings.data.limits.predict,
        },
        shuffle_train=False,
        shuffle_validation=False,
        sampler=None,
    )
    return replace(settings, data=data)
