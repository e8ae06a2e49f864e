"""The checkpoints of a run: when one is due, what to do if it cannot be written, and the last one."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accmt.checkpoint.contents import StateCollector
from accmt.checkpoint.manifest import MANIFEST_NAME, step_name
from accmt.checkpoint.retention import move_back
from accmt.checkpoint.state_dicts import require_complete
from accmt.checkpoint.store import CheckpointStore
from accmt.checkpoint.writer import CheckpointWriter, CustomWriter
from accmt.errors import CheckpointError, NoCheckpointError, fail
from accmt.messages import say, warn, warn_once
from accmt.options import Settings
from accmt.processes import close_cpu_group, manages_disk, new_cpu_group
from accmt.run.restart import describe_launch
from accmt.run.resume import find_newest
from accmt.run.run import Run
from accmt.run.run_state import collect_others
from accmt.secrets import hide

_UNFINISHED = (
    "a checkpoint is due in the middle of a step: since its last backward, the module has not called step_optimizer, "
    "or it did not call zero_grad before that backward. Checkpoints do not include gradients, so it will be "
    "written after a later step"
)


class Checkpoints:
    """Writes the checkpoints of one run.

    Args:
        settings: The Trainer's settings.
        model: The wrapped model.
        optimizer: The optimizer.
    """

    def __init__(self, settings: Settings, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        options = settings.checkpoints
        self.folder = (
            settings.checkpoint_folder.absolute()
        )  # a program may change its working directory during training
        self._launch = describe_launch()
        self._settings = settings
        has_replicas = not settings.failures.compare_replicas
        self._collector = StateCollector(model, [optimizer], has_replicas=has_replicas)
        self._is_failing = False
        self.is_prepared = False
        self._saved: tuple[dict[str, Any], int] | None = None
        self.began_elsewhere = False
        self._newest: Path | None = None
        self._latest: Path | None = None
        self._previous: Path | None = None
        self.requests: list[Path | None] = []  # not yet served
        self._group = new_cpu_group() if options.writes_to_folder else None
        self._store = self._open_store(self._group)
        custom = options.checkpointer
        self._custom = None if custom is None else CustomWriter(custom, self._collector)
        self._writer: CheckpointWriter | CustomWriter | None = self._custom
        if options.writes_to_folder:
            is_async, on_failure = options.checkpoint_options.async_checkpointing, self._report_failure
            self._writer = CheckpointWriter(self._store, self._collector, is_async=is_async, on_failure=on_failure)
        self._has_begun = False

    def _open_store(self, group: Any = None) -> CheckpointStore:
        options = self._settings.checkpoints.checkpoint_options
        return CheckpointStore(
            self.folder, max_checkpoints=options.max_checkpoints, keep_every=options.keeps, group=group
        )

    def continue_from(self, folder: Path) -> None:
        """Record the checkpoint that the run starts from."""
        self._newest = folder.absolute()
        self.began_elsewhere = self._newest.parent != self.folder

    def owns(self, folder: Path) -> bool:
        """Return whether a checkpoint is or was in this run's folder; if not, the run is a branch."""
        place, parent = str(self.folder), str(folder.absolute().parent)
        # `set_aside_previous` moves checkpoints beside the folder or, if that is another disk, into it.
        return self._custom is not None or parent == place or parent.startswith((f"{place}.previous", f"{place}/"))

    @property
    def are_written(self) -> bool:
        """Whether the run writes checkpoints, either regularly or on failure."""
        return self._settings.checkpoints.every is not None or bool(self._settings.handling.kinds)

    @property
    def has_saved(self) -> bool:
        """Whether the run has written a checkpoint, or tried to."""
        return self._latest is not None

    def find_newest_known(self) -> Path | None:
        """Return the newest checkpoint that this run wrote or started from, if it still exists.

        Unlike `newest`, this verifies no files and is not collective.
        """
        for folder in (self._latest, self._newest):
            if folder is not None and (folder / MANIFEST_NAME).is_file():
                return folder
        return None

    def begin(self, run: Run) -> None:
        """Take over the checkpoint folder for this run.

        Processes: collective.
        """
        if self._writer is not None:
            self._writer.on_published = run.features.on_checkpoint
        if self._settings.checkpoints.writes_to_folder:
            self._store.claim()
            self._begin_folder(run, self._store)

    def _begin_folder(self, run: Run, store: CheckpointStore) -> None:
        # Checkpoints of an earlier run in this folder would be resumed from, or deleted, as if they were of this one.
        if not (run.is_resumed or self._has_begun):
            self._previous = store.set_aside_previous()
            self._remove_surplus(at_least=1)
        self._has_begun = True

    def try_collecting(self, run: Run) -> None:
        """Check that everything can be stored: before training, and once the optimizer has its state.

        Processes: collective.
        """
        require_complete(run.model)
        self._collector.collect(collect_others(run))

    def request(self, folder: Path | None) -> None:
        """Request a checkpoint after the current step."""
        self.requests.append(folder)

    def save_requested(self, run: Run, *, is_due: bool) -> None:
        """Save after an optimizer step, once everything else that follows it is done.

        Processes: collective.

        Args:
            run: The run.
            is_due: Whether a regular checkpoint is due, in addition to requested ones.
        """
        if any(has_unfinished_step() for has_unfinished_step in run.features.has_unfinished_step):
            if is_due or self.requests:
                warn_once(_UNFINISHED, about="unfinished step")
            return
        if not self.is_prepared:  # find what cannot be stored at the first step, not at the first checkpoint
            if self._writer is not None:
                self._writer.prepare(collect_others(run))
            elif run.settings.failures.preflight and self.are_written:
                self.try_collecting(run)
            self.is_prepared = True
        has_saved = self._serve_requests(run)
        if is_due and not has_saved:
            self._save(run, force=False)

    def _serve_requests(self, run: Run) -> bool:
        """Write the requested checkpoints, and return whether one of them is in the run's folder."""
        requests, self.requests = self.requests, []
        for folder in dict.fromkeys(requests):
            self.save(run, folder)
        return None in requests

    def save_last(self, run: Run) -> None:
        """Save the end of the run, unless the last checkpoint contains it.

        Processes: collective.
        """
        if any(has_unfinished_step() for has_unfinished_step in run.features.has_unfinished_step):
            warn_once(_UNFINISHED, about="unfinished step")
            return
        self._serve_requests(run)
        if self._settings.checkpoints.every is not None and self._saved != (
            run.state.state_dict(),
            run.snapshot.next_stage,
        ):
            self._save(run, force=True)

    def save_snapshot(self, run: Run, *, is_alone: bool = False) -> None:
        """Save the step snapshot, whatever the run has done since, and wait until it is durable.

        Processes: collective, unless the main process is alone.
        """
        options, snapshot = self._settings.checkpoints, run.snapshot
        state = snapshot.state or {}
        # The regular checkpoint of this step is written already.
        if self._saved == (state["parts"]["state"], snapshot.next_stage):
            return
        with snapshot.restored(run):
            if is_alone and self._custom is not None:
                name = type(options.checkpointer).__name__
                where = f"the emergency checkpoint is in {self.folder}: resume={str(self.folder)!r} continues from it"
                warn(f"{name} needs all processes, of which some have exited; {where}")
            if is_alone or self._writer is None:
                store = self._open_store()
                self._begin_folder(run, store)
                collector = StateCollector(run.model, [run.stepper.optimizer])  # a new plan for these processes
                self._writer = CheckpointWriter(store, collector, is_async=False, on_failure=_raise)
                self._writer.on_published = run.features.on_checkpoint
            self._save(run, force=True, at=state)
        if self._writer is not None:
            self._writer.wait()

    def save(self, run: Run, folder: Path | None = None) -> None:
        """Save immediately.

        Processes: collective.
        """
        if folder is None and self._writer is not None:
            self._save(run, force=True)
            return
        run.require_equal_replicas()
        if folder is None:
            self._begin_folder(run, self._store)
        store = self._store
        if folder is not None:
            store = CheckpointStore(folder, max_checkpoints=sys.maxsize)
        writer = CheckpointWriter(store, self._collector, is_async=False, on_failure=_raise)
        with run.features.doing("checkpoint"):
            writer.save(run.state.global_step, collect_others(run), self._describe(run, run.state.state_dict()))
        self._note(run, store.folder / step_name(run.state.global_step))

    def _save(self, run: Run, *, force: bool, at: Mapping[str, Any] | None = None) -> None:
        with run.features.doing("checkpoint"):
            run.require_equal_replicas()
            state = collect_others(run, at)
            counters = state["parts"]["state"]
            step = counters["global_step"]
            if self._writer is not None:
                self._writer.save(step, state, self._describe(run, counters), force=force)
            self._saved = counters, run.snapshot.next_stage
            self._note(run, self.folder / step_name(step))

    def _describe(self, run: Run, counters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the information that is readable without loading a checkpoint, and which launch wrote it."""
        return {**describe(run, counters), "launch": self._launch}

    def _note(self, run: Run, folder: Path) -> None:
        if folder.absolute().parent == self.folder:
            self._newest = self.find_newest_known()  # the result of the previous save is known by now
            self._latest = folder
        for hook in run.hooks.on_save_checkpoint:
            hook(folder=folder)

    def wait(self) -> None:
        """Wait until the current checkpoint is durable.

        Processes: collective.
        """
        if self._writer is not None:
            self._writer.wait()

    def newest(self) -> Path:
        """Return the newest checkpoint of the run once it is durable, with every file verified.

        Processes: collective.
        """
        self.wait()
        folder = find_newest(self._settings)
        if folder is None:
            do = "see above why it could not be written"
            raise fail(
                NoCheckpointError, "resuming from a checkpoint", got=f"none in {self.folder}", expected="one", do=do
            )
        return folder

    def close(self, *, has_result: bool) -> None:
        """Wait until the last checkpoint is durable.

        Processes: collective.
        """
        if self._writer is not None:
            self._writer.close()
            self._writer = self._custom  # which has nothing to close
        # A run that fails at its start must not cost the earlier run its checkpoints.
        if not has_result and self._previous is not None and manages_disk():
            self._put_back(self._previous)
        elif self._previous is not None and self._latest is not None:
            self._remove_surplus()
        self._store.release()
        self._store = self._open_store()
        close_cpu_group(self._group)
        self._group = None

    def _remove_surplus(self, *, at_least: int = 0) -> None:
        """Delete the oldest earlier runs' checkpoints; the last run's are kept until this run has a result."""
        keep = self._settings.checkpoints.checkpoint_options.max_previous_runs
        if keep is None or not manages_disk():
            return
        try:
            self._store.remove_surplus(max(keep, at_least))
        except OSError as error:
            warn(f"could not delete the checkpoints of earlier runs: {error}")

    def _put_back(self, previous: Path) -> None:
        if self.find_newest_known() is not None:
            return
        try:
            move_back(previous, self.folder)
        except OSError as error:
            warn(f"could not move the checkpoints of an earlier run back from {previous}: {error}")
        else:
            say(f"no checkpoint was written, so the earlier run's checkpoints were moved back to {self.folder}")

    def _report_failure(self, error: CheckpointError) -> None:
        if not self._is_failing:
            warn(f"{error}\nTraining continues; the next checkpoint will be tried when it is due.")
        self._is_failing = True


def _raise(error: CheckpointError) -> None:
    raise error


def describe(run: Run, counters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the information that is readable without loading a checkpoint."""
    is_uncounted = run.state.now.is_last_training_batch is True and counters["train_step"] > 0  # the epoch is over
    return {
        **counters,
        "epochs_done": counters["epoch"] + is_uncounted,
        "best": dict(run.state.best),
        "run_name": run.tracking.run_name,
        "run_id": run.saver.run_id,
        "attempt": run.tracking.attempt,
        "seed": run.seed,
        "hps": hide(run.settings.hps.to_dict()["hps"]),
        "mixed_precision": str(run.accelerator.mixed_precision),
    }
