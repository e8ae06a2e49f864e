"""Continuing after a failure within one call of `fit`, and what a run has learned from it.

A run that recovers ends at a checkpoint, and `Trainer.fit` builds another that continues from there, as a program does
that is started again. So nothing has to be undone in memory, and all that holds for a resumed run holds here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch.utils.data import DataLoader

from accmt.checkpoint.engine import read_others
from accmt.errors import ArgumentError, NonFiniteError, explain
from accmt.messages import warn
from accmt.module import AcceleratorModule, ExtendedAcceleratorModule
from accmt.options import Settings
from accmt.processes import run_on_main_process

if TYPE_CHECKING:
    from accmt.run import Run

MAX_ROLLBACKS = 10
"""How often in a row a run goes back to the same checkpoint before it gives up."""


class Restart(Exception):  # noqa: N818 - no error: the run continues
    """Ends a run that another one continues at once; it never leaves `fit`."""


@dataclass
class Recovery:
    """What a run has learned from failures that it survived; checkpoints hold it.

    Attributes:
        max_micro_batch_size: Samples of a micro-batch that fit in memory at most; None where memory never ran out.
        skipped_windows: Windows that are not trained on, each by the samples seen before it.
        careful_until: Windows that begin before so many samples are judged before the optimizer steps.
        rollbacks: How often in a row the run went back to the same checkpoint.
        rolled_back_to: The step of that checkpoint.
        checkpoint: The checkpoint that the next run continues from; None where no other run is due.
        is_temporary: Whether that checkpoint is there for the next run only.
    """

    max_micro_batch_size: int | None = None
    skipped_windows: set[int] = field(default_factory=set)
    careful_until: int = 0
    rollbacks: int = 0
    rolled_back_to: int | None = None
    checkpoint: Path | None = None
    is_temporary: bool = False

    def state_dict(self) -> dict[str, Any]:
        """Return what a later run has to know; JSON can hold it."""
        return {
            "max_micro_batch_size": self.max_micro_batch_size,
            "skipped_windows": sorted(self.skipped_windows),
            "careful_until": self.careful_until,
        }

    def learn(self, state: Mapping[str, Any]) -> None:
        """Add what the run of a checkpoint had learned to what this one knows already."""
        limits = [self.max_micro_batch_size, state["max_micro_batch_size"]]
        self.max_micro_batch_size = min((limit for limit in limits if limit is not None), default=None)
        self.skipped_windows |= set(state["skipped_windows"])
        self.careful_until = max(self.careful_until, state["careful_until"])

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


def check_restarts(settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
    """Check that the run can recover as its settings ask."""
    reaction = settings.failures.on_nonfinite
    steps_itself = isinstance(module, ExtendedAcceleratorModule)
    if reaction in ("skip", "rollback") and steps_itself:
        _reject(
            f'failures={{"on_nonfinite": {reaction!r}}}',
            "a module that steps by itself",
            'failures={"on_nonfinite": "stop"}',
        )
    if reaction == "rollback" and settings.checkpoints.every is None:
        _reject('failures={"on_nonfinite": "rollback"}', "checkpoint_every=None", 'checkpoint_every="epoch"')
    if settings.optimization.auto_micro_batch and steps_itself:
        _reject("auto_micro_batch=True", "a module that steps by itself", "auto_micro_batch=False")
    owns_batches = isinstance(train_data, DataLoader) or settings.data.batch_sampler is not None
    if settings.optimization.auto_micro_batch and owns_batches:
        do = "give the dataset itself, and its sizes in the hyper-parameters"
        _reject("auto_micro_batch=True", "batches that a DataLoader or a batch sampler of yours cuts", do)


def _reject(argument: str, got: str, do: str) -> NoReturn:
    raise ArgumentError(explain(f"Trainer({argument})", f"{got} beside it", "a run that can recover like this", do))


def restart_with_smaller_batches(run: Run) -> NoReturn:
    """End the run at its last step snapshot, to continue with micro-batches half as large and as many more of them.

    Processes: collective.
    """
    free_memory(run)
    size = current_micro_batch_size(run)
    smaller = run.settings.hps.micro_batch_size_within(max(1, size // 2))
    run.recovery.max_micro_batch_size = smaller
    change = f"micro-batches have {smaller} samples from here on instead of {size}"
    warn(f"out of memory after step {run.state.global_step}: {change}; the effective batch stays what it is")
    run.checkpoints.save_snapshot(run)
    run.recovery.is_temporary = run.settings.checkpoints.every is None
    _restart(run, run.checkpoints.newest())


def roll_back(run: Run, window: int, why: str, *, is_skipped: bool) -> NoReturn:
    """End the run, to continue from its newest checkpoint and skip a step.

    A loss that is not finite may come from the step before it, whose gradients were not. So the windows up to this one
    are trained on again, each judged before the optimizer steps.

    Processes: collective; the same window on all.
    """
    recovery, checkpoint = run.recovery, run.checkpoints.newest()
    step = read_others(checkpoint)["parts"]["state"]["global_step"]
    recovery.rollbacks = recovery.rollbacks + 1 if step == recovery.rolled_back_to else 1
    recovery.rolled_back_to = step
    if recovery.rollbacks > MAX_ROLLBACKS:
        got = f"{why}, after {MAX_ROLLBACKS} rollbacks to step {step}"
        do = "look at the data and at the learning rate: skipping single steps does not help"
        raise NonFiniteError(explain("the training loss", got, "finite losses after skipping a few steps", do))
    recovery.skipped_windows |= {window} if is_skipped else set()
    recovery.careful_until = window + 1
    warn(f"{why}: back to the checkpoint of step {step}, from where the faulty step is skipped")
    _restart(run, checkpoint)


def _restart(run: Run, checkpoint: Path) -> NoReturn:
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
