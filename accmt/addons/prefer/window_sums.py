"""Losses with a term that is a mean over the whole batch: over an optimizer step, and over a validation set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from accmt.data import MicroBatch, Window
from accmt.metrics import Metric
from accmt.metrics.averages import sum_exactly
from accmt.precisions import autocast
from accmt.run import EvaluationRun
from accmt.run.features import Feature


class SumsWindows(Protocol):
    """A module whose loss depends on sums over the whole optimizer step.

    Attributes:
        needs_window_sums: Whether it does.
        window_sums: During training: the sums over the micro-batches of the current step, on all processes.
    """

    needs_window_sums: bool
    window_sums: list[float] | None

    def sum_for_window(self, batch: Any) -> torch.Tensor:
        """Return what a micro-batch adds: the weighted sum of a value, and the sum of weights `[2]`."""

    def make_metric(self, loss_name: str) -> Metric:
        """Return the metric that computes the results of a whole validation set, under this name for the loss."""


class WindowSums(Feature):
    """Reads each window whole, and computes its sums before the first of its micro-batches is trained on.

    The weights are those of the step's forward passes, so the sums are those of one big batch, for any accumulation,
    token budget and number of processes. The results of an evaluation are computed at its end, from what the validation
    step returns for each row.
    """

    name = "window_sums"

    def __init__(self, run: EvaluationRun, module: SumsWindows) -> None:
        self._run = run
        self._module = module
        self._error: Exception | None = None

    @classmethod
    def for_run(cls, run: EvaluationRun) -> WindowSums | None:
        module: Any = run.module
        return cls(run, module) if getattr(module, "needs_window_sums", False) else None

    @contextmanager
    def during(self) -> Iterator[None]:
        before = self._module.window_sums  # those of a training step, within which a user evaluates
        try:
            yield
        finally:
            self._module.window_sums = before

    def make_metrics(self) -> Sequence[Metric]:
        """Return the metric of the module."""
        return (self._module.make_metric(self._run.loss_name),)

    def reading(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Compute the sums of each window.

        Processes: collective.
        """
        for window in windows:
            micro_batches = list(window.units)
            self._module.window_sums = self._sum(micro_batches)
            yield window._replace(units=micro_batches)

    def before_forward(self, batch: Any) -> None:
        """Raise the error that occurred while summing, here, where the run can continue after it."""
        if (error := self._error) is not None:
            self._error = None
            raise error

    def _sum(self, micro_batches: list[MicroBatch]) -> list[float]:
        run = self._run
        addends = [torch.zeros(2)]
        try:
            with torch.no_grad(), run.engine.unwrapped():
                for micro_batch in micro_batches:
                    is_counted = micro_batch.batch is not None
                    batch = (micro_batch.borrowed or micro_batch).batch
                    if batch is None:  # none of its samples could be read, on any process
                        continue
                    with autocast(run.accelerator), run.engine.running(micro_batch):
                        sums = self._module.sum_for_window(run.place(batch))
                    if is_counted:
                        addends.append(sums)
        except Exception as error:
            if not any(recovers_from(error) for recovers_from in run.features.recovers_from):
                raise
            self._error = error.with_traceback(None)  # whose frames keep memory
        return sum_exactly(*zip(*(sums.tolist() for sums in addends), strict=True))
