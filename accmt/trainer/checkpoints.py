"""What a Trainer offers around checkpoints."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.errors import CheckpointError, explain
from accmt.trainer.control import TrainerControl

if TYPE_CHECKING:
    from accmt.checkpoint.manifest import Checkpoint
    from accmt.module import AcceleratorModule


class TrainerCheckpoints(TrainerControl):
    """Saves and chooses checkpoints, and adds to what is in one.

    Attributes:
        chosen_checkpoint: Folder of the checkpoint that the next run continues from, where one was chosen.
    """

    chosen_checkpoint: Path | None = None

    def save_checkpoint(self, path: str | PathLike[str] | None = None) -> None:
        """Save everything that a run needs to continue.

        While a run trains, the checkpoint is written at the end of the update in work, after what else is due there: a
        state in the middle of an update could not be continued from.

        Processes: collective.

        Args:
            path: A folder of checkpoints of its own, in which none is deleted; None is that of the run.

        Raises:
            RuntimeError: There was no run yet.
            CheckpointError: The folder cannot be written (`fit` raises that while a run trains), or the run has failed:
                its state may be that of the middle of an update.
        """
        folder = None if path is None else Path(path).absolute()
        if self.state.status in ("failed", "interrupted"):
            got = "a run that ended in the middle of an update"
            do = "Trainer(handlers=Handler.ALL), which saves the last finished update"
            raise CheckpointError(explain("save_checkpoint", got, "a run that is training, or came to its end", do))
        self.run.note_call("trainer.save_checkpoint")
        if self.state.status == "running":
            self.run.checkpoints.request(folder)
        else:
            self.run.checkpoints.save(self.run, folder)

    def load_checkpoint(self, path: str | PathLike[str] | None = None) -> Checkpoint | None:
        """Choose the checkpoint that the next `fit` continues from, whatever `resume` says.

        Processes: collective.

        Args:
            path: A checkpoint, or a folder of them, of which the newest is taken; None is the Trainer's own folder.

        Returns:
            The checkpoint, every file verified; None where `path` is None and there is none.

        Raises:
            NoCheckpointError: There is no checkpoint in `path`.
            CheckpointCorruptError: It is damaged.
        """
        from accmt.checkpoint.store import CheckpointStore
        from accmt.recovery.resume import find_checkpoint

        found = CheckpointStore(self.checkpoint_path).newest() if path is None else find_checkpoint(Path(path))
        self.chosen_checkpoint = None if found is None else found.folder
        return found

    def check_resume(self, module: AcceleratorModule, train_dataset: Any, val_dataset: Any = None) -> int:
        """Prove, in seconds, that interrupting and resuming changes no bit of this training.

        Copies of the module make four updates without, and four with an interruption in the middle; every batch, loss
        and tensor is compared. Nothing is written outside a temporary folder.

        Processes: collective.

        Args:
            module: The module; it stays as it is.
            train_dataset: As for `fit`.
            val_dataset: As for `fit`.

        Returns:
            How many batches, losses and tensors were compared.

        Raises:
            CheckpointError: Something differs; the message names the first difference, and what hides it.
        """
        from accmt.trainer.resume_check import check_resume

        return check_resume(self, module, train_dataset, val_dataset)

    def get_state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the Trainer itself; a subclass may add JSON values and tensors."""
        return {"epochs_finished": self.state.epoch}

    def update_state(self, state: dict[str, Any]) -> None:
        """Take back what `get_state` returned; a subclass that adds to it reads its part here."""
