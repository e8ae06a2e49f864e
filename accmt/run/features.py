"""The hooks of features: internal callbacks with more hooks than `Callback` has.

A feature subclasses `Feature` and overrides some of its methods. When a run is built, the overrides of each hook are
collected in a tuple, so a hook that no feature overrides costs one loop over an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from accmt.data import MicroBatch, Window
    from accmt.metrics import Metric
    from accmt.metrics.averages import Rider, Weight
    from accmt.module import AcceleratorModule
    from accmt.options import Settings
    from accmt.run.weighting import AccumulationWindow
    from accmt.state import Place, Stage


Activity: TypeAlias = Literal["evaluating", "checkpoint", "saving", "data"]
"""What a run does besides training: evaluates, pauses for a checkpoint, or saves a model."""


class Steps(Protocol):
    """Trains accumulation windows."""

    def train(self, window: Window) -> bool:
        """Train on a window, and return whether it completed an optimizer step, after which the stages run."""


class Feature:
    """Base class of features; a subclass overrides the hooks it needs.

    Attributes:
        name: The key of its state in a checkpoint.
        needs_snapshot: Whether it needs step snapshots even if the run writes no checkpoints.
    """

    name: ClassVar[str]
    needs_snapshot: ClassVar[bool] = False

    @classmethod
    def for_run(cls, run: Any) -> Feature | None:
        """Create the feature for a run, or return None if the run does not need it.

        Args:
            run: A `Run` during `fit`; an `EvaluationRun` during a separate `validate`, `test` or `predict`.
        """
        raise NotImplementedError

    def during(self) -> AbstractContextManager[None]:
        """Return a context manager that is active during the whole run."""
        return nullcontext()

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        """Check, before a run is built, that the feature supports these settings."""

    @classmethod
    def before_resume(cls, settings: Settings) -> Path | None:
        """Act before a run looks for the checkpoint to resume from; return one to use in place of `resume`.

        Processes: collective.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in checkpoints, as JSON values.

        State that the next run needs before it is built belongs in `run.recovery.lessons`.

        Processes: collective, unless only the main process calls it.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`."""

    def on_start(self) -> None:
        """Called when logs, trackers and folders are ready."""

    def on_end(self, error: BaseException | None) -> None:
        """Called at the end of the run, unless another run continues it immediately.

        Args:
            error: The exception that ended the run; None if it finished.
        """

    def on_training_start(self) -> None:
        """Called at the start of training, before the users' hooks.

        Processes: all.
        """

    def during_activity(self, activity: Activity) -> AbstractContextManager[None]:
        """Return a context manager that is active while the run does something besides training.

        Processes: all.
        """
        return nullcontext()

    def reading(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Return the windows of an epoch through an iterator that observes them, or reads each whole."""
        return windows

    def is_checkpoint_due(self) -> bool:
        """Return whether to write a checkpoint here, in addition to those that the run's cadence requests.

        Processes: all; must be the same on all of them.
        """
        return False

    def why_not_tried(self) -> str:
        """Return the reason to skip the trial of the largest micro-batch before training; "" if there is none."""
        return ""

    def skips_window(self, samples_before: int) -> bool:
        """Return whether to skip the accumulation window that starts after `samples_before` samples."""
        return False

    def make_steps(self) -> Steps:
        """Return the object that trains the windows of an epoch instead of the automatic loop."""
        raise NotImplementedError

    def has_unfinished_step(self) -> bool:
        """Return whether an optimizer step is incomplete, so that no checkpoint can be written now."""
        return False

    def has_work_left(self) -> bool:
        """Return whether a run that has no step left still has something to do in `on_training_end`."""
        return False

    def on_training_end(self) -> None:
        """Called after the last step and evaluation, before the last model and checkpoint are saved.

        Processes: all.
        """

    def saving_last(self) -> AbstractContextManager[None]:
        """Return a context manager that is active while the weights at the end of the run are saved."""
        return nullcontext()

    def on_checkpoint(self, folder: Path) -> None:
        """Act when a checkpoint was published in the run's folder; called on the thread that writes checkpoints.

        Processes: all.
        """

    def before_emergency_checkpoint(self) -> None:
        """Called before the step snapshot is saved after an error."""

    def before_batch(self, micro_batch: MicroBatch) -> None:
        """Called when a training micro-batch has been loaded."""

    def before_forward(self, batch: Any) -> None:
        """Called before a training step, after the users' hooks.

        Args:
            batch: The batch as loaded, on the CPU.
        """

    def after_forward(self, outputs: Any) -> None:
        """Called after a training step, with what it returned."""

    def on_step_error(self, error: Exception, batch: Any) -> None:
        """Called with an error that a training or validation step raised, before it propagates.

        Args:
            error: The error.
            batch: The batch as loaded, on the CPU: after a device-side assertion, GPU memory can no longer be read.
        """

    def weigh(self, loss: Any, *, is_given: bool) -> torch.Tensor | None:
        """Return the weight of a batch's loss, or None. The first weight that a feature returns is used.

        Args:
            loss: The loss that the step returned.
            is_given: Whether the step or the data already set the weight; the return value is then ignored.
        """
        return None

    def on_first_batch(self, batch: Any, *, is_hint_wanted: bool) -> None:
        """Called after the first training step of a run.

        Args:
            batch: The batch as loaded, on the CPU.
            is_hint_wanted: Whether batches are weighted by samples and an optimizer step has several batches, so that
                a hint about weights is useful.
        """

    def scale_loss(self, window: AccumulationWindow, loss: torch.Tensor, factor: Weight) -> Weight:
        """Return the factor by which a batch's loss is multiplied before backward."""
        return factor

    def after_batch(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        """Called after forward and backward of a batch, with its detached loss and the weight of that loss."""

    def recovers_from(self, error: Exception) -> bool:
        """Return whether the run recovers from an error in forward or backward on this process.

        The process then waits for the end of the window, in which `before_optimizer_step` has to restart the run on all
        of them.
        """
        return False

    def before_optimizer_step(self, window: AccumulationWindow) -> None:
        """Called before the gradients of a finished window are reduced.

        Processes: all.
        """

    def on_gradients(self) -> None:
        """Act on the reduced gradients of a window, before they are clipped.

        Processes: all.
        """

    def allows_step(self, window: AccumulationWindow) -> bool:
        """Return whether to step with the reduced gradients of a window; must be the same on all processes."""
        return True

    def on_skipped_step(self, window: AccumulationWindow) -> None:
        """Called after a window that ended without an optimizer step."""

    def after_window(self, *, made_step: bool) -> None:
        """Act after a window was counted.

        Processes: all.

        Args:
            made_step: Whether it ended in an optimizer step.
        """

    def before_use(self) -> None:
        """Called before the weights are evaluated or saved; raise an error to prevent it.

        Processes: all.
        """

    def before_row(self) -> None:
        """Called before a row of training values is logged, even if it is not due.

        Processes: all.
        """

    def exchange(self) -> Rider:
        """Return numbers to exchange between the processes together with the values of a row.

        Processes: all.
        """
        raise NotImplementedError

    def add_to_row(self, row: dict[str, float]) -> None:
        """Add values to a row before it is logged."""

    def after_row(self, row: Mapping[str, float]) -> None:
        """Called after a row of training values has been logged.

        Processes: all.
        """

    def make_metrics(self) -> Sequence[Metric]:
        """Return metrics of a validation set that is about to be evaluated, in addition to the user's.

        A metric whose input the validation step does not return is left out. The results replace averages of the same
        name.
        """
        return ()

    def before_set(self) -> None:
        """Called before the first batch of a validation, test or prediction set."""

    def before_set_batch(self, micro_batch: MicroBatch) -> None:
        """Called when a micro-batch of such a set has been loaded."""

    def before_set_forward(self) -> None:
        """Called before a validation step, after the users' hooks."""

    def add_to_outputs(self, key: str, batch: Any, outputs: Any) -> Any:
        """Return the output of a validation step, with what else is to be evaluated.

        Called like the step itself: also where a process takes part in the step of another one, whose output is not
        used.

        Args:
            key: The name of the set.
            batch: The batch on the device.
            outputs: The output of the step.
        """
        return outputs

    def after_set(self, key: str, *, has_batch: bool) -> None:
        """Called after the last batch of such a set.

        Processes: all.

        Args:
            key: The name of the set.
            has_batch: Whether this process had a batch.
        """

    def add_results(self, stage: Stage) -> dict[str, float]:
        """Return further results of an evaluation, by name, after those of the sets.

        Processes: collective; the same on all of them.

        Args:
            stage: The kind of evaluation; "sanity_check" is the trial before training, in which only names count.
        """
        return {}


class Features:
    """The features of a run: for each hook, a tuple of the methods that override it.

    Args:
        kinds: The feature classes, in the order in which their hooks are called.
        run: The run.

    Attributes:
        all: The features of the run.
        needs_snapshot: Whether one of them needs step snapshots.
    """

    if TYPE_CHECKING:

        def __getattr__(self, hook: str) -> tuple[Callable[..., Any], ...]: ...

    def __init__(self, kinds: Sequence[type[Feature]], run: Any) -> None:
        features = [kind.for_run(run) for kind in kinds]
        self.all = tuple(feature for feature in features if feature is not None)
        self.needs_snapshot = any(feature.needs_snapshot for feature in self.all)
        for hook in HOOKS:
            unused = getattr(Feature, hook)
            overriding = [feature for feature in self.all if getattr(type(feature), hook) is not unused]
            setattr(self, hook, tuple(getattr(feature, hook) for feature in overriding))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the state of each feature by name.

        Processes: collective, unless only the main process calls it.
        """
        return {feature.name: state for feature in self.all if (state := feature.state_dict())}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore state from `state_dict`."""
        for feature in self.all:
            if feature.name in states:
                feature.load_state_dict(states[feature.name])

    def drop(self, hook: Callable[..., Any]) -> None:
        """Stop calling a feature's hook: it has done its work."""
        name = hook.__name__
        setattr(self, name, tuple(method for method in getattr(self, name) if method != hook))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the features' `during` contexts active, entered in order and left in reverse."""
        with ExitStack() as stack:
            for during in self.during:
                stack.enter_context(during())
            yield

    @contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Keep the features' contexts of an activity active."""
        with ExitStack() as stack:
            for during_activity in self.during_activity:
                stack.enter_context(during_activity(activity))
            yield

    def call_training_step(self, step: Callable[[Any], Any], batch: Any, *, read: Any) -> Any:
        """Call a training step with the features' hooks around it, and return its result.

        Args:
            step: The step.
            batch: The batch on the device.
            read: The batch as loaded, on the CPU.
        """
        for before_forward in self.before_forward:
            before_forward(read)
        try:
            outputs = step(batch)
        except Exception as error:
            # Here, where the batch is known: further up, an error names only the line of the model.
            for on_step_error in self.on_step_error:
                on_step_error(error, read)
            raise
        for after_forward in self.after_forward:
            after_forward(outputs)
        return outputs

    def find_weight(self, loss: Any, *, is_given: bool) -> torch.Tensor | None:
        """Return the first weight that a feature returns for a loss, or None."""
        for weigh in self.weigh:
            weight: torch.Tensor | None = weigh(loss, is_given=is_given)
            if weight is not None:
                return weight
        return None


_NO_HOOKS = ("name", "needs_snapshot", "for_run", "check", "before_resume", "state_dict", "load_state_dict")
HOOKS = tuple(name for name in vars(Feature) if not name.startswith("_") and name not in _NO_HOOKS)
"""The names of all hooks."""
