"""What a program does with a run beside training: it begins the optimizer's state anew, and ends it for good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from accmt.trainer.callbacks import TrainerCallbacks

if TYPE_CHECKING:
    from types import TracebackType


class TrainerControl(TrainerCallbacks):
    """Controls a run from outside the loop, or from a hook."""

    def reset_optimizer(self) -> None:
        """Let the optimizer forget what it keeps of each parameter, such as momenta; learning rates stay.

        Processes: all, at the same update.

        Raises:
            RuntimeError: There was no run yet.
        """
        self.run.stepper.optimizer.state.clear()

    def close(self) -> None:
        """Give back what the last run holds, and leave the process group that it began.

        Without it the group lasts as long as the program. Afterwards each process is alone, and a launched program
        cannot train once more: close at the end, once for all its Trainers. A second call does nothing.

        Processes: all.

        Raises:
            RuntimeError: A run is in work.
        """
        from accmt.setup.accelerator import close_group

        if self.state.status == "running":
            raise RuntimeError("a run is in work: close the Trainer after it")
        self._forget_run()
        close_group()

    def __enter__(self) -> Self:
        """Return the Trainer, which is closed at the end of the `with` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the Trainer; after an error the group is left to the end of the program.

        Another process may still be in the middle of an exchange, for which closing would wait.
        """
        if kind is None:
            self.close()
        else:
            self._forget_run()

    def _forget_run(self) -> None:
        if self._run is not None and self._run.module.trainer is self:
            self._run.module.forget_run()
        self._run = self._evaluated = self._given = None
        self._dataloaders = {}
