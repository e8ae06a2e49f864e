"""Evaluations that are given up when the run is to be left: the run that continues does them again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accmt.data import Loader, MicroBatch
from accmt.failures import Interruption, Reason
from accmt.processes import gather_objects, num_processes
from accmt.recovery.shutdown import leave

if TYPE_CHECKING:
    from accmt.trainer import Trainer


class Abandonable:
    """The validation data of a run that trains; their micro-batches end early, on all processes, when it is to be left.

    A process that hears of it stops at once. At the end, where processes wait for one another anyway, it tells the
    others, and all leave the run there.

    Args:
        own: The loader.
        trainer: The Trainer of the run.
    """

    def __init__(self, own: Loader, trainer: Trainer) -> None:
        self.dataloader = own.dataloader
        self.micro_batches_per_batch = own.micro_batches_per_batch
        self.share = own.share
        self._own = own
        self._trainer = trainer

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch; processes that stop early leave the run at the end of them.

        Raises:
            KeyboardInterrupt: After Ctrl-C.
            Preempted: After SIGTERM or SIGUSR1.
        """
        reason: Reason | None = None
        may_stop = self._may_stop()
        for micro_batch in self._own.micro_batches(epoch, first):
            reason = self._interruption.reason_to_leave if may_stop else None
            if reason is not None:
                break
            yield micro_batch
        if may_stop:
            agreed = next((one for one in gather_objects(reason) if one is not None), None)
            if agreed is not None:
                leave(self._trainer.run, agreed)

    @property
    def num_micro_batches(self) -> int | None:
        """Micro-batches of an epoch at most; None for data without a length."""
        return self._own.num_micro_batches

    @property
    def _interruption(self) -> Interruption:
        return self._trainer.run.interruption

    def _may_stop(self) -> bool:
        """Return whether processes need not keep in step, and there is something to continue from."""
        keeps_in_step = num_processes() > 1 and not self._trainer.settings.evaluation.report_loss_after_eval
        return self._trainer.state.stage == "validate" and self._interruption.is_listening and not keeps_in_step

    def samples_in(self, first: int, last: int) -> int | None:
        """Return the samples of micro-batches `first` up to without `last` over all processes."""
        return self._own.samples_in(first, last)

    def samples_of(self, epoch: int, index: int) -> list[int] | None:
        """Return the samples that this process has in a micro-batch of the epoch in work."""
        return self._own.samples_of(epoch, index)

    def tell_epoch_again(self) -> None:
        """Call `set_epoch` of the data with the epoch in work."""
        self._own.tell_epoch_again()

    def end_workers(self) -> None:
        """End the processes that load data; the next epoch starts others."""
        self._own.end_workers()

    def position(self, epoch: int, num_micro_batches: int) -> dict[str, Any]:
        """Return where the data are after `num_micro_batches` micro-batches of an epoch."""
        return self._own.position(epoch, num_micro_batches)

    def continue_from(self, epoch: int, first_micro_batch: int, position: Mapping[str, Any]) -> None:
        """Let `epoch` go on from a position."""
        self._own.continue_from(epoch, first_micro_batch, position)
