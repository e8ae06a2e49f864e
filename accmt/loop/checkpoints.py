"""The checkpoints of a run: when one is due, what is said when it cannot be written, and the last one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from accmt.checkpoint.engine import StateCollector, write_state
from accmt.checkpoint.names import step_name
from accmt.checkpoint.store import CheckpointStore
from accmt.checkpoint.writer import CheckpointWriter
from accmt.errors import CheckpointError
from accmt.loop.parts import collect_others
from accmt.loop.run import Run
from accmt.messages import warn
from accmt.processes import new_cpu_group
from accmt.settings import Settings


class Checkpointer(Protocol):
    """What stores checkpoints instead of accmt: `Trainer(checkpointer=...)` takes any object with these two methods.

    Both are called on every process, together.
    """

    def save(self, write: Callable[[Path], object], step: int, *, force: bool) -> None:
        """Store a checkpoint.

        Args:
            write: Puts this process's files into an existing empty folder, the same for all processes.
            step: Updates done.
            force: Whether it was asked for, rather than due by `checkpoint_every`: it should not be left out.
        """

    def load(self) -> Path | None:
        """Return a folder with the files of the checkpoint to continue from; None where there is none."""


class Checkpoints:
    """Writes the checkpoints of one run.

    Args:
        settings: What the Trainer was told.
        model: The model, wrapped.
        optimizer: Its optimizer.
    """

    def __init__(self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        told = settings.checkpoints
        self.folder = settings.checkpoint_folder
        self._settings = settings
        self._collector = StateCollector(model, [optimizer])
        self._checkpointer: Checkpointer | None = told.checkpointer
        self._is_failing = False
        self._is_prepared = False
        self._saved: dict[str, Any] | None = None
        self._requests: list[Path | None] = []
        self._writer = None if told.every is None or told.checkpointer is not None else self._build_writer()

    def _build_writer(self) -> CheckpointWriter:
        told = self._settings.checkpoints
        store = CheckpointStore(self.folder, max_checkpoints=told.max_checkpoints, group=new_cpu_group())
        return CheckpointWriter(
            store, self._collector, is_async=told.async_checkpointing, on_failure=self._report_failure
        )

    def begin(self, run: Run) -> None:
        """Make room for a new run.

        Processes: collective.

        Raises:
            CheckpointError: An earlier run's checkpoints cannot be moved away.
        """
        if self._writer is None:
            return
        if not run.is_resumed:
            CheckpointStore(self.folder).set_aside_previous()

    def request(self, folder: Path | None) -> None:
        """Ask for a checkpoint at the end of the update in work.

        Args:
            folder: A folder of checkpoints of its own, in which none is deleted; None is that of the run.
        """
        self._requests.append(folder)

    def save_if_due(self, run: Run, *, epoch_ended: bool = False, evaluated: bool = False) -> None:
        """Save at an update boundary, after everything else that is due there.

        Processes: collective.
        """
        self._prepare_once(run)
        requests, self._requests = self._requests, []
        for folder in dict.fromkeys(requests):
            self.save(run, folder)
        is_due = run.cadence.is_checkpoint_due(run.state, epoch_ended=epoch_ended, evaluated=evaluated)
        if is_due and None not in requests:
            self._save(run, force=False)

    def _prepare_once(self, run: Run) -> None:
        """Find at the first update, not at the first checkpoint, what no checkpoint can hold."""
        if self._writer is not None and not self._is_prepared:
            self._writer.prepare(collect_others(run))
        self._is_prepared = True

    def save_last(self, run: Run) -> None:
        """Save the end of the run, unless the last checkpoint holds it.

        Processes: collective.
        """
        if self._settings.checkpoints.every is not None and self._saved != run.state.state_dict():
            self._save(run, force=True)

    def save(self, run: Run, folder: Path | None = None) -> None:
        """Save at once.

        Processes: collective.

        Args:
            run: The run, at an update boundary.
            folder: As in `request`; it is waited until the checkpoint is durable.

        Raises:
            CheckpointError: It cannot be written to `folder`.
        """
        if folder is None and (self._writer is not None or self._checkpointer is not None):
            self._save(run, force=True)
            return
        num_kept = self._settings.checkpoints.max_checkpoints if folder is None else sys.maxsize
        store = CheckpointStore(folder or self.folder, max_checkpoints=num_kept)
        writer = CheckpointWriter(store, self._collector, is_async=False, on_failure=_raise)
        writer.save(run.state.global_step, collect_others(run), describe(run))
        self._tell_hooks(run, store.folder)

    def _save(self, run: Run, *, force: bool) -> None:
        step, others = run.state.global_step, collect_others(run)
        if self._checkpointer is not None:
            collected = self._collector.collect(others)
            self._checkpointer.save(lambda folder: write_state(collected, folder), step, force=force)
        elif self._writer is not None:
            self._writer.save(step, others, describe(run))
        self._saved = run.state.state_dict()
        self._tell_hooks(run, self.folder)

    @staticmethod
    def _tell_hooks(run: Run, folder: Path) -> None:
        for hook in run.hooks.on_save_checkpoint:
            hook(folder=folder / step_name(run.state.global_step))

    def close(self) -> None:
        """Wait until the last checkpoint is durable.

        Processes: collective.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _report_failure(self, error: CheckpointError) -> None:
        if not self._is_failing:
            warn(f"{error}\nTraining goes on, and the next checkpoint is tried when it is due.")
        self._is_failing = True


def _raise(error: CheckpointError) -> None:
    raise error


def describe(run: Run) -> dict[str, Any]:
    """Return what people want to know of a checkpoint without loading it."""
    state = run.state
    return {
        **state.state_dict(),
        "best": dict(state.best),
        "run_name": run.tracking.run_name,
        "seed": run.seed,
        "hps": run.settings.hps.to_dict()["hps"],
        "mixed_precision": str(run.accelerator.mixed_precision),
    }
