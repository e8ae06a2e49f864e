"""Continues with smaller micro-batches after a training step runs out of memory."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accmt.errors import ArgumentError, fail, is_out_of_memory
from accmt.messages import warn
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.processes import sum_over_processes
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.run.restart import free_memory
from accmt.run.weighting import AccumulationWindow


class OutOfMemory(Feature):
    """Halves the micro-batch on all processes after a window in which one ran out of memory."""

    name = "out_of_memory"
    needs_snapshot = True

    def __init__(self, run: Run) -> None:
        self._run = run

    @classmethod
    def for_run(cls, run: EvaluationRun) -> OutOfMemory | None:
        return cls(run) if isinstance(run, Run) and run.settings.hps.halves_micro_batches else None

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        if not settings.hps.halves_micro_batches:
            return
        where, expected = "max_micro_batch_size: auto", "a run that supports recovery"
        # The module may have stepped within the batch, which the step snapshot cannot undo.
        if module.uses_manual_optimization:
            got, do = "a module with manual optimization", "set a number, or remove it"
            raise fail(ArgumentError, where, got=got, expected=expected, do=do)
        # accmt does not make these batches, so it cannot halve them.
        if isinstance(train_data, DataLoader) or settings.data.data_options.batch_sampler is not None:
            got = "batches from your DataLoader or batch sampler"
            do = "pass the dataset, and set the batch size in the hyper-parameters"
            raise fail(ArgumentError, where, got=got, expected=expected, do=do)

    def why_not_tried(self) -> str:
        return "max_micro_batch_size: auto finds the size that fits"

    def recovers_from(self, error: Exception) -> bool:
        """Return whether memory ran out for a micro-batch that can be halved."""
        return self._run.micro_batch_size > 1 and is_out_of_memory(error)

    def before_optimizer_step(self, window: AccumulationWindow) -> None:
        """If a process failed in the window, restart the run from its last step snapshot with halved micro-batches.

        Processes: collective.

        Raises:
            Restart: A process ran out of memory.
        """
        # On all processes, because memory may have run out on one: the others would wait for it in the next step.
        if sum_over_processes((float(window.has_failed),))[0] == 0:
            return
        run = self._run
        free_memory(run.stepper.optimizer)  # first: a checkpoint needs memory too
        size = run.micro_batch_size
        smaller = run.settings.hps.micro_batch_size_within(max(1, size // 2))
        run.recovery.lessons[self.name] = {"max_micro_batch_size": smaller}
        change = f"continuing with micro-batches of {smaller} samples instead of {size}"
        warn(f"out of memory after step {run.state.global_step}: {change}; the effective batch size does not change")
        obstacle = run.snapshot.find_obstacle(run)
        if obstacle is not None:  # such as an attribute that is too large for a copy after each step
            warn(f"{obstacle}: it is repeated with the current values; change them after the step, in on_update_end")
        run.checkpoints.save_snapshot(run)
        run.recovery.is_temporary = run.settings.checkpoints.every is None
        run.recovery.restart(run.checkpoints.newest())
