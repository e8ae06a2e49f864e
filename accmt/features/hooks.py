"""The hooks of features: a wider table than that of callbacks, private to accmt.

A feature is a class derived from `Feature` that defines some of its methods. When a run is built, each hook becomes a
tuple of the methods that define it; a hook that no feature of the run defines costs a look at an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import torch

    from accmt.data import MicroBatch, Window
    from accmt.loop.weighting import AccumulationWindow
    from accmt.metrics.averages import Weight
    from accmt.module import AcceleratorModule
    from accmt.options import Settings
    from accmt.state import Place


class Steps(Protocol):
    """What trains windows."""

    def train(self, window: Window) -> bool:
        """Train on a window, and return whether that ends an optimizer step, so that its stages follow."""


class Feature:
    """Something that a run can do, or watches; it defines the methods that it needs.

    Attributes:
        name: Under which a checkpoint holds its state.
        needs_snapshot: Whether the step snapshot is taken for it, also where the run writes no checkpoints.
    """

    name: ClassVar[str]
    needs_snapshot: ClassVar[bool] = False

    @classmethod
    def for_run(cls, run: Any) -> Feature | None:
        """Return the feature of a run; None where the run does not need it.

        Args:
            run: A `Run` where it trains; an `EvaluationRun` where data are evaluated or predicted without that.
        """
        raise NotImplementedError

    def during(self) -> AbstractContextManager[None]:
        """Return a context around the whole run."""
        return nullcontext()

    @classmethod
    def check(cls, settings: Settings, module: AcceleratorModule, train_data: Any) -> None:
        """Check, before a run is built, that the feature can do what the settings ask."""

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a crash: JSON values.

        What the next run has to know before it is built belongs in `run.recovery.lessons`.

        Processes: collective, unless the main one acts alone.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def on_start(self) -> None:
        """Act when all that training writes to is ready."""

    def on_end(self, error: BaseException | None) -> None:
        """Act when the run has ended, unless another one continues it at once.

        Args:
            error: What ended it; None where it finished.
        """

    def on_training_start(self) -> None:
        """Act before the hooks of users at the start of training.

        Processes: all.
        """

    def why_not_tried(self) -> str:
        """Return why the largest micro-batch is not tried before training."""
        return ""

    def keeps_apart(self) -> bool:
        """Return whether processes may not communicate in forward and backward, since one may leave them."""
        return False

    def skips_window(self, samples_before: int) -> bool:
        """Return whether the accumulation window that begins after so many samples is not trained on."""
        return False

    def make_steps(self) -> Steps:
        """Return what trains the windows of an epoch, in the place of the automatic loop."""
        raise NotImplementedError

    def has_unfinished_step(self) -> bool:
        """Return whether there is an optimizer step that no checkpoint can hold, because it is not finished."""
        return False

    def saving_last(self) -> AbstractContextManager[None]:
        """Return a context in which the weights at the end of the run are saved."""
        return nullcontext()

    def before_emergency_checkpoint(self) -> None:
        """Act before the step snapshot is saved because of an error."""

    def before_batch(self, micro_batch: MicroBatch) -> None:
        """Act when a micro-batch of training has been read."""

    def before_forward(self, batch: Any) -> None:
        """Act before a training step, after the hooks of users.

        Args:
            batch: The batch as it was read, on the host.
        """

    def after_forward(self) -> None:
        """Act after a training step."""

    def on_step_error(self, error: Exception, batch: Any) -> None:
        """Act on an error that a training or validation step raised, and which is raised again.

        Args:
            batch: The batch as it was read: after a failed assertion a GPU shows none of its memory.
        """

    def weigh(self, loss: Any, *, is_given: bool) -> torch.Tensor | None:
        """Return what a batch's loss weighs; None where the feature does not know. The first answer counts.

        Args:
            loss: What the step returned as its loss.
            is_given: Whether the step or the data say what it weighs, so that an answer is not used.
        """
        return None

    def on_first_batch(self, batch: Any, *, is_hint_wanted: bool) -> None:
        """Act after the first training step of a run.

        Args:
            batch: The batch as it was read.
            is_hint_wanted: Whether batches weigh samples, and that matters: there are several in an optimizer step.
        """

    def scale_loss(self, window: AccumulationWindow, loss: torch.Tensor, factor: Weight) -> Weight:
        """Return what the loss of a batch is multiplied by before backward."""
        return factor

    def after_batch(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        """Act after forward and backward of a batch, with its detached loss and what that weighs."""

    def recovers_from(self, error: Exception) -> bool:
        """Return whether the run can go on after an error in forward or backward, where processes are kept apart."""
        return False

    def before_optimizer_step(self, window: AccumulationWindow) -> None:
        """Act before the gradients of a finished window are reduced.

        Processes: all.
        """

    def allows_step(self, window: AccumulationWindow) -> bool:
        """Return whether to step with the gradients of a window, which are reduced; the same on all processes."""
        return True

    def on_skipped_step(self, window: AccumulationWindow) -> None:
        """Act after a window that ended without an optimizer step."""

    def before_use(self) -> None:
        """Act before the weights are evaluated or saved: an error here keeps them from it.

        Processes: all.
        """

    def before_row(self) -> None:
        """Act before a row of training values may be logged.

        Processes: all.
        """

    def add_to_row(self, row: dict[str, float]) -> None:
        """Add values to a row that is logged."""

    def after_row(self, row: Mapping[str, float]) -> None:
        """Act after a row of training values was logged.

        Processes: all.
        """

    def before_set(self) -> None:
        """Act before the first batch of a set that is evaluated or predicted."""

    def before_set_batch(self, micro_batch: MicroBatch) -> None:
        """Act when a micro-batch of such a set has been read."""

    def before_set_forward(self) -> None:
        """Act before a validation step, after the hooks of users."""

    def after_set(self, key: str, *, has_batch: bool) -> None:
        """Act after the last batch of such a set.

        Processes: all.

        Args:
            key: The name of the set.
            has_batch: Whether this process had a batch.
        """


class Features:
    """The features of a run, by hook: for each method of `Feature` a tuple of the methods that override it.

    Args:
        kinds: The classes, in the order in which they act.
        run: The run.

    Attributes:
        all: The features of the run.
        needs_snapshot: Whether one of them needs the step snapshot.
    """

    during: tuple[Callable[[], AbstractContextManager[None]], ...]
    on_start: tuple[Callable[[], None], ...]
    on_end: tuple[Callable[[BaseException | None], None], ...]
    on_training_start: tuple[Callable[[], None], ...]
    why_not_tried: tuple[Callable[[], str], ...]
    keeps_apart: tuple[Callable[[], bool], ...]
    skips_window: tuple[Callable[[int], bool], ...]
    make_steps: tuple[Callable[[], Steps], ...]
    has_unfinished_step: tuple[Callable[[], bool], ...]
    saving_last: tuple[Callable[[], AbstractContextManager[None]], ...]
    before_emergency_checkpoint: tuple[Callable[[], None], ...]
    before_batch: tuple[Callable[[MicroBatch], None], ...]
    before_forward: tuple[Callable[[Any], None], ...]
    after_forward: tuple[Callable[[], None], ...]
    on_step_error: tuple[Callable[[Exception, Any], None], ...]
    weigh: tuple[Callable[..., torch.Tensor | None], ...]
    on_first_batch: tuple[Callable[..., None], ...]
    scale_loss: tuple[Callable[[AccumulationWindow, torch.Tensor, Weight], Weight], ...]
    after_batch: tuple[Callable[[torch.Tensor, Weight, Place], None], ...]
    recovers_from: tuple[Callable[[Exception], bool], ...]
    before_optimizer_step: tuple[Callable[[AccumulationWindow], None], ...]
    allows_step: tuple[Callable[[AccumulationWindow], bool], ...]
    on_skipped_step: tuple[Callable[[AccumulationWindow], None], ...]
    before_use: tuple[Callable[[], None], ...]
    before_row: tuple[Callable[[], None], ...]
    add_to_row: tuple[Callable[[dict[str, float]], None], ...]
    after_row: tuple[Callable[[Mapping[str, float]], None], ...]
    before_set: tuple[Callable[[], None], ...]
    before_set_batch: tuple[Callable[[MicroBatch], None], ...]
    before_set_forward: tuple[Callable[[], None], ...]
    after_set: tuple[Callable[..., None], ...]

    def __init__(self, kinds: Sequence[type[Feature]], run: Any) -> None:
        found = (kind.for_run(run) for kind in kinds)
        self.all = tuple(feature for feature in found if feature is not None)
        self.needs_snapshot = any(feature.needs_snapshot for feature in self.all)
        for hook in HOOKS:
            own = getattr(Feature, hook)
            acting = (feature for feature in self.all if getattr(type(feature), hook) is not own)
            setattr(self, hook, tuple(getattr(feature, hook) for feature in acting))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the states of the features by their names.

        Processes: collective, unless the main one acts alone.
        """
        return {feature.name: state for feature in self.all if (state := feature.state_dict())}

    def load_state_dict(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        for feature in self.all:
            if feature.name in states:
                feature.load_state_dict(states[feature.name])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enter what features need around a whole run; the first in the tuple is entered first, and left last."""
        with ExitStack() as stack:
            for during in self.during:
                stack.enter_context(during())
            yield

    def call_training_step(self, step: Callable[[Any], Any], batch: Any, *, read: Any) -> Any:
        """Return what a training step returns, with what features do around it.

        Args:
            step: The step.
            batch: The batch on the device.
            read: The batch as it was read.
        """
        for before_forward in self.before_forward:
            before_forward(read)
        try:
            outputs = step(batch)
        except Exception as error:
            for on_step_error in self.on_step_error:
                on_step_error(error, read)
            raise
        for after_forward in self.after_forward:
            after_forward()
        return outputs

    def find_weight(self, loss: Any, *, is_given: bool) -> torch.Tensor | None:
        """Return what the first feature that knows it says of a loss's weight."""
        found = (weigh(loss, is_given=is_given) for weigh in self.weigh)
        return next((weight for weight in found if weight is not None), None)


_NO_HOOKS = ("name", "needs_snapshot", "for_run", "check", "state_dict", "load_state_dict")
HOOKS = tuple(name for name in vars(Feature) if not name.startswith("_") and name not in _NO_HOOKS)
"""The names of all hooks."""
