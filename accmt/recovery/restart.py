"""Continuing after a failure within one call of `fit`.

A run that recovers ends at a checkpoint, and `Trainer.fit` builds another that continues from there, as a program does
that is started again. So nothing has to be undone in memory, and all that holds for a resumed run holds here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accmt.processes import run_on_main_process

if TYPE_CHECKING:
    from accmt.run import Run


class Restart(Exception):  # noqa: N818 - no error: the run continues
    """Ends a run that another one continues at once; it never leaves `fit`."""


@dataclass
class Recovery:
    """What the runs of one call of `fit` know of those before them.

    Attributes:
        lessons: What features have learned, by their names: JSON values, which a checkpoint holds.
        rollbacks: How often in a row the run went back to the same checkpoint.
        rolled_back_to: The step of that checkpoint.
        checkpoint: The checkpoint that the next run continues from; None where no other run is due.
        is_temporary: Whether that checkpoint is there for the next run only.
    """

    lessons: dict[str, dict[str, Any]] = field(default_factory=dict)
    rollbacks: int = 0
    rolled_back_to: int | None = None
    checkpoint: Path | None = None
    is_temporary: bool = False

    def learn(self, lessons: Mapping[str, dict[str, Any]]) -> None:
        """Take what the run of a checkpoint had learned, unless this one has learned more since."""
        self.lessons = {**lessons, **self.lessons}

    def take_checkpoint(self) -> Path | None:
        """Return the checkpoint to continue from, once."""
        checkpoint, self.checkpoint = self.checkpoint, None
        return checkpoint

    def clear_up(self, checkpoint: Path) -> None:
        """Delete the checkpoint that was continued from, where nobody asked for checkpoints.

        Processes: collective.
        """
        if self.is_temporary:
            run_on_main_process(lambda: shutil.rmtree(checkpoint))
        self.is_temporary = False


def restart(run: Run, checkpoint: Path) -> NoReturn:
    """End the run, so that another one continues from a checkpoint.

    Processes: collective.
    """
    run.recovery.checkpoint = checkpoint
    raise Restart


def current_micro_batch_size(run: Run) -> int:
    """Return how many samples go through the model at once."""
    return run.settings.hps.train_batch_size // run.train_loader.source.micro_batches_per_batch


def free_memory(run: Run) -> None:
    """Give back the device's memory that gradients and broken steps hold."""
    from accelerate.utils.memory import clear_device_cache

    run.stepper.optimizer.zero_grad(set_to_none=True)
    clear_device_cache(garbage_collection=True)


def free_finished(run: Run) -> None:
    """Give back what a run that is over holds of the device's memory: the optimizer's state above all.

    Objects of a run know one another, and the module keeps its optimizer, so all that would still be there while the
    next run loads the same again.
    """
    run.stepper.optimizer.state.clear()
    free_memory(run)
