"""Writes checkpoints during training, which pauses only for a copy in memory; a thread writes the files.

A storage failure (a full disk, a read-only folder) never stops training: it is passed to `on_failure`, older
checkpoints are kept, and the next save tries again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

from accmt.checkpoint.contents import CollectedState, HostSnapshot, StateCollector, require_numbers, write_state
from accmt.checkpoint.store import CheckpointStore, Staging
from accmt.errors import CheckpointError
from accmt.options.saving import Checkpointer


class CheckpointWriter:
    """Writes the checkpoints of a run, one at a time, during training.

    A program that exits without `close` first finishes the checkpoint that is being written.

    Args:
        store: Where checkpoints go. Nothing else may use it between a `save` and the next `wait`; with several
            processes it needs a separate group (`new_cpu_group`), in which the threads communicate.
        is_async: Whether a thread writes from a copy in host memory; otherwise training waits and nothing is copied.
        on_failure: Called on the main thread of every process with the same error when a checkpoint could not be
            written: immediately if not asynchronous, otherwise at the next `save` or `wait`.

    Attributes:
        on_published: Called with each checkpoint that was published, on the thread that writes.
    """

    on_published: Sequence[Callable[[Path], None]] = ()

    def __init__(
        self,
        store: CheckpointStore,
        collector: StateCollector,
        *,
        is_async: bool,
        on_failure: Callable[[CheckpointError], None],
    ) -> None:
        self._store = store
        self._collector = collector
        self._on_failure = on_failure
        self._snapshot = HostSnapshot()
        self._thread = futures.ThreadPoolExecutor(1, thread_name_prefix="accmt-checkpoint") if is_async else None
        self._in_flight: futures.Future[None] | None = None

    def prepare(self, part_states: Mapping[str, Any]) -> None:
        """Check early that the state can be stored, and let the thread allocate the memory for its copy.

        Call it after the first step, once the optimizer has its state: the first save is then as fast as the following
        ones, and a state that cannot be stored is reported before hours of training.

        Processes: collective.
        """
        self.wait()
        collected = self._collector.collect(part_states)
        if self._thread is not None:
            self._in_flight = self._thread.submit(self._snapshot.reserve, collected.pieces.tensors)

    def save(self, step: int, part_states: Mapping[str, Any], info: Mapping[str, Any], *, force: bool = False) -> None:
        """Save the current state of the run; training may change all of it when this returns.

        Raises an error that names what cannot be stored. Processes: collective, after an optimizer step.

        Args:
            step: The optimizer step.
            part_states: The states besides model and optimizer.
            info: What is readable without loading the checkpoint.
            force: Unused: every checkpoint is written. Custom storage may leave out those that are not forced.
        """
        self.wait()
        collected = self._collector.collect(part_states)
        # With a copy of `info`: the thread writes it while training goes on.
        self._report_failure(lambda: self._start(step, collected, copy.deepcopy(dict(info))))

    def wait(self) -> None:
        """Wait until the last checkpoint is durable or has failed. Processes: collective."""
        if self._in_flight is None:
            return
        futures.wait([self._in_flight])  # if Ctrl-C interrupts this, it stays in flight
        finished, self._in_flight = self._in_flight, None
        self._report_failure(finished.result)

    def close(self) -> None:
        """Wait for the last checkpoint, then release the thread and the memory. Nothing can be saved afterwards.

        Processes: collective.
        """
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._snapshot = HostSnapshot()

    def _start(self, step: int, collected: CollectedState, info: Mapping[str, Any]) -> None:
        staging = self._store.begin(step)
        if self._thread is None:
            self._write(staging, collected, info)
        else:
            copied = collected.copied_by(self._snapshot, self._thread)
            self._in_flight = self._thread.submit(self._write, staging, copied, info)

    def _write(self, staging: Staging, collected: CollectedState, info: Mapping[str, Any]) -> None:
        staging.write(partial(_write_files, collected))
        folder = self._store.publish(staging, info)
        for on_published in self.on_published:
            on_published(folder)

    def _report_failure(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as error:
            self._on_failure(error)


class CustomWriter:
    """Passes the checkpoints of a run to custom storage, with the interface of `CheckpointWriter`; training waits.

    Args:
        checkpointer: The storage.
        collector: Collects the states of model and optimizer.

    Attributes:
        on_published: Unused: the folder is gone once it is stored.
    """

    on_published: Sequence[Callable[[Path], None]] = ()

    def __init__(self, checkpointer: Checkpointer, collector: StateCollector) -> None:
        self._storage = checkpointer
        self._collector = collector

    def prepare(self, part_states: Mapping[str, Any]) -> None:
        """Check early that the state can be stored.

        Processes: collective.
        """
        self._collector.collect(part_states)

    def save(self, step: int, part_states: Mapping[str, Any], info: Mapping[str, Any], *, force: bool = False) -> None:
        """Store the current state of the run.

        Processes: collective, after an optimizer step.
        """
        collected = self._collector.collect(part_states)
        self._storage.save(lambda folder: write_state(collected, folder), step, force=force)

    def wait(self) -> None:
        """Do nothing: what is saved is stored."""

    def close(self) -> None:
        """Do nothing: what is saved is stored."""


def _write_files(collected: CollectedState, folder: Path) -> None:
    require_numbers(collected)
    write_state(collected, folder)
