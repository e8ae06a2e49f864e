"""Running out of memory in a training step: the run goes on with smaller micro-batches."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from accmt.errors import ArgumentError, explain, is_out_of_memory
from accmt.features.hooks import Feature
from accmt.loop.weighting import AccumulationWindow
from accmt.messages import warn
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.processes import sum_over_processes
from accmt.recovery.restart import current_micro_batch_size, free_memory, restart
from accmt.run import EvaluationRun, Run


class OutOfMemory(Feature):
    """Halves the micro-batch where memory runs out, on all processes after the window in which it did on one."""

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
        where, expected = "max_micro_batch_size: auto", "a run that can recover like this"
        if module.uses_manual_optimization:
            got, do = "a module that steps by itself beside it", "a number, or leave it out"
            raise ArgumentError(explain(where, got, expected, do))
        if isinstance(train_data, DataLoader) or settings.data.batch_sampler is not None:
            got = "batches that a DataLoader or a batch sampler of yours cuts beside it"
            do = "give the dataset itself, and its sizes in the hyper-parameters"
            raise ArgumentError(explain(where, got, expected, do))

    def why_not_tried(self) -> str:
        return "max_micro_batch_size: auto finds out what fits"

    def keeps_apart(self) -> bool:
        """Return whether a micro-batch can be halved; then a process may leave one that memory does not suffice for."""
        return current_micro_batch_size(self._run) > 1

    def recovers_from(self, error: Exception) -> bool:
        return is_out_of_memory(error)

    def before_optimizer_step(self, window: AccumulationWindow) -> None:
        """End the run at its last step snapshot where a process left the window, to continue with halved micro-batches.

        Processes: collective.

        Raises:
            Restart: A process ran out of memory.
        """
        if sum_over_processes((float(window.is_left),))[0] == 0:
            return
        run = self._run
        free_memory(run)
        size = current_micro_batch_size(run)
        smaller = run.settings.hps.micro_batch_size_within(max(1, size // 2))
        run.recovery.lessons[self.name] = {"max_micro_batch_size": smaller}
        change = f"micro-batches have {smaller} samples from here on instead of {size}"
        warn(f"out of memory after step {run.state.global_step}: {change}; the effective batch stays what it is")
        run.checkpoints.save_snapshot(run)
        run.recovery.is_temporary = run.settings.checkpoints.every is None
        restart(run, run.checkpoints.newest())
