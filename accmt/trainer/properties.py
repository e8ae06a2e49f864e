"""Properties of a Trainer: settings, counters, the components of its run, its callbacks."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

from accmt.callbacks import Callback, Hooks, build_callbacks, describe_hooks
from accmt.errors import CallbackNotFoundError, fail
from accmt.messages import say, speaking
from accmt.processes import is_main_process, num_processes
from accmt.registry import FormerNames

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accmt.addons.profilers import PhaseTimes
    from accmt.loaders import UserData
    from accmt.module import AcceleratorModule
    from accmt.options import HyperParameters, Settings
    from accmt.run import Run
    from accmt.state import TrainingState

C = TypeVar("C")

RAISE: Final = object()
"""The default of `get_callback`: a missing callback is an error."""


class TrainerProperties(FormerNames):
    """Properties of a Trainer; those about a run need a run that has started.

    Attributes:
        settings: The Trainer's arguments, checked and grouped.
        state: The counters of the current or last run.
        chosen_checkpoint: Folder of the checkpoint that the next run resumes from, if one was chosen.
        chosen_tracking: The tracking of the next runs in place of their own, if one was chosen.
        profile: Time per phase of the last run with `profiler="simple"`, on the main process; live during the run.
    """

    settings: Settings
    state: TrainingState
    profile: PhaseTimes | None = None
    chosen_checkpoint: Path | None = None
    chosen_tracking: Any = None
    _run: Run | None = None
    _dataloaders: Mapping[str, list[Any]] = MappingProxyType({})
    _evaluated: AcceleratorModule | None = None
    _user_data: UserData | None = None

    @property
    def hps(self) -> HyperParameters:
        """The hyper-parameters."""
        return self.settings.hps

    def config(self) -> dict[str, Any]:
        """Return the arguments to recreate this Trainer, without those at their default."""
        return self.settings.to_arguments()

    @property
    def is_main_process(self) -> bool:
        """Whether this is the main process."""
        return is_main_process()

    is_main = is_main_process

    @property
    def is_distributed(self) -> bool:
        """Whether several processes train together."""
        return num_processes() > 1

    @property
    def run(self) -> Run:
        """The current or last run.

        Raises:
            RuntimeError: There has been none yet.
        """
        if self._run is None:
            raise RuntimeError("there is no run yet: call fit first")
        return self._run

    @property
    def model(self) -> nn.Module:
        """The model to call in steps; during training, it is wrapped to reduce gradients."""
        # A module that is validated while another one trains.
        if self._evaluated is not None and self.state.fn not in (None, "fit"):
            return self._evaluated.model
        return self.run.module.model

    @property
    def device(self) -> torch.device:
        """The device of the run's model and batches."""
        return self.run.device

    @property
    def global_step(self) -> int:
        """Number of completed optimizer steps."""
        return self.state.global_step

    @property
    def current_epoch(self) -> int:
        """Index of the current epoch."""
        return self.state.epoch

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last of its epoch."""
        return self.state.is_last_training_batch

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C ended the last run."""
        return self.state.interrupted

    @property
    def should_stop(self) -> bool:
        """Whether training ends early. Set it on any process: all processes end together a few steps later.

        Raises:
            RuntimeError: It is set, but there has been no run yet.
        """
        return self._run is not None and (self.run.interruption.is_asked or self.run.interruption.ends_training)

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        """End training early, if `value` is true."""
        from accmt.failures import Reason

        # The first reason is the one that the end of the run names.
        if value and not self.run.interruption.ends_training:
            self.run.interruption.request(Reason("trainer.should_stop", "finish"))

    @property
    def train_dataloader(self) -> Any:
        """The torch DataLoader of the training data."""
        return self.run.train_loader.source.dataloader

    @property
    def val_dataloaders(self) -> list[Any]:
        """The torch DataLoaders of the validation data."""
        return [loader.source.dataloader for loader in self.run.val_loaders.values()]

    @property
    def test_dataloaders(self) -> list[Any]:
        """The torch DataLoaders of the current or last test; empty before."""
        return list(self._dataloaders.get("test", ()))

    @property
    def predict_dataloaders(self) -> list[Any]:
        """The torch DataLoaders of the current or last prediction; empty before."""
        return list(self._dataloaders.get("predict", ()))

    @property
    def train_step_batch_size(self) -> int:
        """Samples per call of the training step: `batch_size`, or a divisor of it within `max_micro_batch_size`."""
        if self._run is None:
            return self.hps.train_step_batch_size
        return self._run.micro_batch_size

    @property
    def estimated_global_steps_per_epoch(self) -> int | None:
        """Optimizer steps in the current epoch; None if the data have no length."""
        return self.run.steps_per_epoch(self.state.epoch)

    @property
    def estimated_stepping_batches(self) -> float:
        """Optimizer steps in the whole run; infinite without a limit."""
        steps = self.run.total_steps
        if steps is None:
            return math.inf
        return steps

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder."""
        return self.settings.checkpoint_folder

    @property
    def logged_metrics(self) -> dict[str, float]:
        """The newest value of each name sent to trackers."""
        return dict(self.run.module.logs.logged)

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest values that the module logged with `prog_bar=True`."""
        return dict(self.run.module.logs.shown)

    @property
    def callback_metrics(self) -> dict[str, float]:
        """The newest value of each name: from rows, the progress bar and the last evaluation."""
        return {**self.state.metrics, **self.progress_bar_metrics, **self.logged_metrics}

    @property
    def log_dir(self) -> Path:
        """The run's log folder, the same on every process."""
        return self.run.tracking.run_folder

    @property
    def loggers(self) -> list[Any]:
        """The trackers of the current run, on the main process."""
        return list(self.run.tracking.loggers)

    @property
    def logger(self) -> Any:
        """The first of `loggers`, or None."""
        return next(iter(self.loggers), None)

    tracker = logger

    def get_tracker(self, name: str, *, unwrap: bool = False) -> Any:
        """Return a tracker of the current run by name.

        Args:
            name: "tensorboard", "mlflow", or the name of a custom tracker.
            unwrap: Whether to return the wrapped object: a `SummaryWriter`, an MLflow run.

        Raises:
            ArgumentError: No tracker with this name is running.
        """
        return self.run.tracking.get_tracker(name, unwrap=unwrap)

    @property
    def dashboard_command(self) -> str | None:
        """The command that shows the run in a browser, or None if no tracker has one."""
        command = self.run.tracking.dashboard_command()
        if not command:
            return None
        beside_python = Path(sys.executable).parent / command[0]
        if shutil.which(command[0]) is None and beside_python.exists():  # an inactive virtual environment
            command = [os.path.relpath(beside_python), *command[1:]]
        return shlex.join(command)

    def get_callback(self, cls: type[C], default: Any = RAISE) -> C | Any:
        """Return the first callback of a class or a subclass.

        Args:
            cls: The class.
            default: Returned if there is none.

        Raises:
            CallbackNotFoundError: There is none, and there is no default.
        """
        callbacks = self._own_callbacks()
        chosen = next((callback for callback in callbacks if isinstance(callback, cls)), default)
        # None is a valid default, so it cannot mean that there is none.
        if chosen is RAISE:
            where = f"get_callback({cls.__name__})"
            expected = "one of: " + (", ".join(type(callback).__name__ for callback in callbacks) or "no callbacks")
            do = f"Trainer(callbacks={cls.__name__}(...)), or get_callback({cls.__name__}, default=None)"
            raise fail(CallbackNotFoundError, where, got="no callback of that class", expected=expected, do=do)
        return chosen

    def describe_callbacks(self) -> str:
        """Return the callbacks at each hook, in order, as a Markdown table; also logged unless `verbose=False`.

        After the start of a run, it includes the module and accmt's built-in callbacks.

        Raises:
            ModuleContractError: A callback has a method that looks like a hook but is not.
        """
        hooks = Hooks(self._own_callbacks(), is_main_process=self.is_main) if self._run is None else self._run.hooks
        table = describe_hooks(hooks.callbacks)
        with speaking(verbose=self.settings.running.verbose):
            say(f"callbacks by hook\n{table}")
        return table

    def _own_callbacks(self) -> list[Callback]:
        if self._run is None:
            return build_callbacks(self.settings.running.callbacks)
        return list(self._run.callbacks)
