"""The stateful parts of a run, in the order in which a checkpoint is restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from accmt.callbacks import Callback, name_by_class
from accmt.callbacks.callback import find_hooks
from accmt.checkpoint.contents import load_state, rejecting_other_forms
from accmt.checkpoint.state_dicts import copy_state
from accmt.data import UnshardedSource
from accmt.data.planned import PlannedSource
from accmt.errors import CheckpointError, fail
from accmt.glances import digest_state
from accmt.huggingface import is_peft_model
from accmt.libraries.private_names import buffers_of, count_writes, note_optimizer_step
from accmt.messages import say, warn, warn_once
from accmt.module import defines
from accmt.optimization.resuming import group_arguments, restore_scheduler
from accmt.options.changes import Change, changed_arguments
from accmt.precisions import WITH_STATISTICS
from accmt.processes import gather_if_different, num_processes
from accmt.registry import addon
from accmt.run.resume import Resumed
from accmt.run.run import Run
from accmt.secrets import hide
from accmt.sharded_tensors import write_into
from accmt.state import Stateful


class Part(NamedTuple):
    """A part of a run's state.

    Attributes:
        name: Its name in a checkpoint.
        owner: What has the state.
        scope: "shared": the main process's state is saved and restored on every process; "process": each process's.
    """

    name: str
    owner: Stateful
    scope: Literal["shared", "process"] = "shared"


def list_parts(run: Run) -> list[Part]:
    """Return the parts of a run besides model, optimizer, scheduler and place in the data, in the order of restoring.

    Whatever of the user's has `state_dict` and `load_state_dict` is one: the module, callbacks, the training dataset,
    its sampler. Attributes of module and callbacks that training changes are another one.
    """
    owners = {
        "state": run.state,
        "weighting": run.weighting,
        "running_averages": run.running_averages,
        "selection": run.saver.selection,
        "tracking": run.tracking,
        "clock": run.clock,
        "trained": run.trained,
        "patience": run.saver.patience,
        "scaler": run.accelerator.scaler,
        "adalora": addon("adalora_ranks")(run.unwrapped_model) if is_peft_model(run.unwrapped_model) else None,
        "features": run.features,
        "trainer": _TrainerState(run.module.trainer) if run.module.trainer.has_state else None,
    }
    parts = [Part(name, owner) for name, owner in owners.items() if owner is not None]
    parts += [Part(name, owner) for name, owner in _user_owners(run).items()]
    parts.append(Part("attributes", run.attributes))
    if run.attributes.of_process is not None:
        parts.append(Part("process_attributes", run.attributes.of_process, "process"))
    return parts


def _user_owners(run: Run) -> dict[str, Stateful]:
    """Return the user's objects that define `state_dict` and `load_state_dict`, by their names in a checkpoint."""
    owners: dict[str, Any] = {f"callbacks.{name}": callback for name, callback in _stateful_callbacks(run).items()}
    # The `state_dict` of `nn.Module` would contain the model again; the other parts of such a module are attributes.
    kind: Any = type(run.module)
    if defines(run.module, "state_dict") and kind.state_dict is not nn.Module.state_dict:
        owners["module"] = run.module
    owners |= {name: value for name, value in run.loaders.inputs_with_state().items() if isinstance(value, Stateful)}
    return owners


def _stateful_callbacks(run: Run) -> dict[str, Callback]:
    """Name each stateful callback by its class and a number, so that the next start finds its state."""
    default = (Callback.state_dict, Callback.load_state_dict)
    return name_by_class(
        callback for callback in run.callbacks if (type(callback).state_dict, type(callback).load_state_dict) != default
    )


class _TrainerState:
    """The state of a Trainer, to which a subclass may add."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return dict(self._trainer.get_state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._trainer.update_state(state)


def collect_others(run: Run, at: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of everything besides model and optimizer, after an optimizer step.

    Processes: collective; a checkpoint stores what the main process returns, and what each returns in "process".

    Args:
        at: The state of the step snapshot, if the run has continued since; None to collect the current state.
    """
    run.engine.share_buffers()  # any process may change them, and training continues with the main process's
    local = LocalState(run).collect() if at is None else dict(at)
    place, states = local.pop("place"), dict(local["parts"])
    copies = local.pop("attributes")
    states["running_averages"] = states["running_averages"].state_dict()
    parts = list_parts(run)
    with run.attributes.at(copies):
        states |= {part.name: part.owner.state_dict() for part in parts if part.name not in states}
    _warn_of_differences(run, states)
    process = {part.name: states.pop(part.name) for part in parts if part.scope == "process"}
    return {
        "seed": run.seed,
        "run_name": run.tracking.run_name,
        "run_id": run.saver.run_id,
        "hps": hide(run.settings.hps.to_dict()["hps"]),
        "scheduler_length": run.scheduler_length,
        "scheduler_class": _name_of(run.scheduler),
        "plan": run.length.plan(),
        **local,
        "data": run.train_loader.source.position(*place) if local["data"] is None else local["data"],
        "parts": states,
        "lessons": run.recovery.lessons,
        "next_stage": run.snapshot.next_stage,
        "made_step": run.snapshot.made_step,
        **({"process": process} if process else {}),
    }


def _warn_of_differences(run: Run, states: Mapping[str, Any]) -> None:
    """Warn about state of the user's objects that differs between processes: only the main process's is restored.

    Processes: collective, with one small message.
    """
    if num_processes() == 1:
        return
    digests = dict(run.attributes.shared_digests)
    digests |= {name: digest_state(states[name]) for name in _user_owners(run)}
    of_processes = gather_if_different(digests)
    for name in sorted(set().union(*of_processes)):
        # A buffer of DQN that each process fills by itself was restored on all from the main process, without a word.
        if len({digests.get(name) for digests in of_processes}) == 1:
            continue
        what = f"{name} differs between processes, and checkpoints contain the main process's"
        attribute = name.rpartition(".")[2]
        do = f"write process_state = ({attribute!r},) in its class to save and restore each process's"
        if name in states:  # by a `state_dict`
            do = "keep what differs in an attribute, and name it in process_state = (...) of the class"
        warn_once(f"{what}; if the next step needs it, {do}", about=f"difference {name}")


_CHANGED_BY_STAGES = ("selection", "tracking", "trained", "patience")
"""Parts that change in the stages after a step and at the start of an epoch, but not in a step."""


class LocalState:
    """The part of a run's state that changes between optimizer steps, read without waiting for device or processes.

    The snapshot is taken after every training step, so constant parts are looked up only once.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        owners = {part.name: part.owner for part in list_parts(run)}
        self._user_parts = {name: owners.pop(name) for name in (*_user_owners(run), "trainer") if name in owners}
        # The scaler changes only with the optimizer, and reading it would wait for the device.
        for name in ("scaler", "features", "running_averages", "attributes", "process_attributes"):
            owners.pop(name, None)
        self._stage_parts = {name: owners.pop(name) for name in _CHANGED_BY_STAGES if name in owners}
        self._of_stages: dict[str, Any] = {}
        self._parts = owners

    def collect(self, *, after_step: bool = False, compares: bool = False, copies: bool = False) -> dict[str, Any]:
        """Return a copy of that state; running averages are copied as an object, without reading their values.

        Args:
            after_step: Whether nothing but a step was made since the last call.
            compares: Whether to compare all attributes.
            copies: Whether to copy attributes.
        """
        run, state = self._run, self._run.state
        if not (after_step and self._of_stages):
            self._of_stages = {name: part.state_dict() for name, part in self._stage_parts.items()}
        parts = dict(self._of_stages)
        for name, part in self._parts.items():
            parts[name] = part.state_dict()
        for name, part in self._user_parts.items():
            parts[name] = copy_structure(part.state_dict())
        parts["running_averages"] = run.running_averages.copy()
        source, position = run.train_loader.source, None
        # Unsharded data would wait for other processes. Planned data are a function of epoch and micro-batch, except
        # between two epochs, where the position still refers to the previous epoch. These positions are computed when a
        # checkpoint is written.
        if not (isinstance(source, UnshardedSource) or (state.train_step and isinstance(source, PlannedSource))):
            position = source.position(state.epoch, state.train_step)
        return {
            "place": (state.epoch, state.train_step),
            "is_last_batch": state.now.is_last_training_batch is True,  # a stream is not read on to find out
            "metrics": dict(state.metrics),
            "best_metrics": dict(state.best_metrics),
            "lr": [deepcopy(group["lr"]) for group in run.stepper.optimizer.param_groups],  # may be tensors
            "data": position,
            "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
            "parts": parts,
            "attributes": run.attributes.capture(compares=compares) if copies else None,
        }


def copy_structure(value: Any) -> Any:
    """Copy containers; tensors are shared, because copying weights at each step would cost more than the step."""
    kind = type(value)
    if kind is dict:
        return {key: entry if type(entry) in _PLAIN else copy_structure(entry) for key, entry in value.items()}
    if kind is list:
        return [copy_structure(entry) for entry in value] if value and type(value[0]) in _CONTAINERS else value.copy()
    return value.copy() if kind is set else value


_CONTAINERS = (dict, list, set, tuple)
_PLAIN = {float, int, str, bool, type(None), torch.Tensor, torch.device}


def restore(run: Run, resumed: Resumed) -> None:
    """Load the state of a checkpoint into every part of a newly built run.

    Processes: collective.

    Raises:
        CheckpointError: The checkpoint is from another model or optimizer.
    """
    resets_optimizer = run.settings.checkpoints.checkpoint_options.reset_optimizer_on_resume
    built = group_arguments(run.stepper.optimizer)
    # Checkpoints hold training weights. An optimizer that keeps its mode beside its state would move them once more.
    run.stepper.begin_training()
    with rejecting_other_forms(resumed.folder):
        saved = load_state(run.model, None if resets_optimizer else [run.stepper.optimizer], resumed.folder)
        built += group_arguments(run.stepper.optimizer)[len(built) :]
        if not resets_optimizer:
            _restore_scheduler(run, saved, built, resumed.changes)
        states = {**saved["parts"], **saved.get("process", {})}
        run.state.metrics, run.state.best_metrics = saved["metrics"], saved["best_metrics"]
    user_owners = _user_owners(run)
    for part in list_parts(run):
        if part.name in states:
            # Errors of the user's own `load_state_dict` are raised unchanged.
            with nullcontext() if part.name in user_owners else rejecting_other_forms(resumed.folder):
                part.owner.load_state_dict(states[part.name])
        elif part.name.startswith("callbacks."):
            name = part.name.removeprefix("callbacks.")
            say(f"the callback {name} is new in this run: it starts without a state")
    for name in states.keys() - {part.name for part in list_parts(run)}:
        if name.startswith("callbacks.") and states[name]:
            name = name.removeprefix("callbacks.")
            warn(f"the checkpoint contains the state of a callback {name}, which this run does not have: ignored")
    with rejecting_other_forms(resumed.folder):
        run.saver.forget_missing(run.settings.model_folder, saved["run_id"])
        if run.checkpoints.owns(resumed.folder):
            run.saver.run_id = saved["run_id"]
        run.state.now.is_last_training_batch = saved["is_last_batch"]
        run.snapshot.next_stage, run.snapshot.made_step = saved["next_stage"], saved["made_step"]
        run.checkpoints.continue_from(resumed.folder)
    size, user_size = run.settings.hps.train_batch_size, run.loaders.user_batch_size
    is_changed = any(change.key == "batch_size" for change in resumed.changes)
    if is_changed and run.loaders.takes_user_batches and user_size != size:
        what = f"the new batch_size={size} of the hyper-parameters has no effect"
        warn(f"{what}: the DataLoader has batch_size={user_size}")


@contextmanager
def keeping_state(run: Run) -> Iterator[None]:
    """Restore the state of the module and callbacks after the hooks of an epoch that a resumed run continues.

    They ran when the epoch began: a counter that they set to 0 would count only the rest of the epoch.
    """
    owners = _user_owners(run)
    states = {name: copy_state(owner.state_dict()) for name, owner in owners.items()}
    with run.attributes.keeping():
        yield
    for name, owner in owners.items():
        owner.load_state_dict(states[name])


def _restore_scheduler(
    run: Run, saved: Mapping[str, Any], built: list[dict[str, Any]], changes: Sequence[Change]
) -> None:
    kind = _name_of(run.scheduler)
    if saved["scheduler_class"] != kind:
        got, expected = f"a {kind}", f"the checkpoint's {saved['scheduler_class']}"
        reset = 'Trainer(checkpoint_options={"reset_optimizer_on_resume": True})'
        do = f"build it as in the saved run, or start with a new scheduler: {reset}"
        raise fail(CheckpointError, "the learning-rate scheduler", got=got, expected=expected, do=do)
    lines = restore_scheduler(
        run.stepper.optimizer,
        run.scheduler,
        saved["scheduler"],
        built,
        changed=changed_arguments(changes),
        is_stretched=saved["scheduler_length"] != run.scheduler_length,
    )
    for line in lines:
        warn(line)
    note_optimizer_step(run.stepper.optimizer)


def _name_of(scheduler: Any) -> str | None:
    return None if scheduler is None else type(scheduler).__qualname__


# ---- The step snapshot: the run after its last optimizer step, for a checkpoint if something fails before the next.
#
# Weights and optimizer change only in the optimizer step, so they need no copy. The rest that changes until the next
# step is small: counters, running averages, buffers such as batch norm's. It is copied once after each step, without
# waiting for the device or another process, and again only if a stage after the step has changed something.


class StepSnapshot:
    """A run after its last optimizer step, and its progress in the stages that follow that step.

    Args:
        is_kept: Whether a checkpoint may ever be requested; if not, and no feature needs it, nothing is copied.

    Attributes:
        next_stage: The next stage: its index in `accmt.loop.stages.STAGES`, or the length of that list when training
            continues.
        made_step: Whether the last accumulation window ended in an optimizer step, not in a skipped one.
        may_change_in_step_hooks: Whether the hooks after a step may change what the snapshot contains.
        state: The return value of `LocalState.collect`; None before the first capture.
    """

    def __init__(self, model: nn.Module, *, is_kept: bool) -> None:
        self.next_stage = 0
        self.made_step = True
        self._is_valid = False
        self.state: dict[str, Any] | None = None
        self.may_change_in_step_hooks = False
        self._is_kept = is_kept
        self._num_captures = 0
        self._has_compared = False
        self._local_state: LocalState | None = None
        self._buffers = _Buffers(model)
        self._weights = _Weights()

    def capture_all(self, run: Run) -> None:
        """Copy the current state with all attributes that are small.

        Called before the first step and before evaluations, which change attributes that did not change before.
        """
        if self._is_valid:
            self.capture(run, self.next_stage, compares=True)

    def capture(self, run: Run, next_stage: int, *, after_step: bool = False, compares: bool = False) -> None:
        """Copy the current state of the run.

        Args:
            run: The run.
            next_stage: The next stage.
            after_step: Whether nothing but a step was made since the last capture.
            compares: Whether attributes of the user's objects may change, or have changed, that did not change before:
                all of them are compared, and copied if they are small.
        """
        self.next_stage, self._is_valid = next_stage, True
        compares = compares or (after_step and not self._has_compared)  # what steps change is known after the first
        self._has_compared = self._has_compared or after_step
        if not (self._is_kept or run.features.needs_snapshot):
            return
        if self._local_state is None:
            self._local_state = LocalState(run)
            self._weights = _Weights(run.engine.quiet_weights())
            # accmt's own hooks, such as the progress bar's, change nothing in a checkpoint.
            users = (*run.callbacks, run.module)
            self.may_change_in_step_hooks = any("on_update_end" in find_hooks(user) for user in users)
        self.state = self._local_state.collect(after_step=after_step, compares=compares, copies=True)
        self._weights.capture()
        if compares or self._num_captures < _NUM_FIRST:  # layers may register buffers in their first calls
            self._buffers.find()
        self._num_captures += 1
        if self._buffers.places:
            self._buffers.copy()

    def invalidate(self) -> None:
        """Mark the weights as different from the snapshot, or never to be saved, until the next capture.

        In the middle of an optimizer step they match neither the snapshot nor the next state.
        """
        if self._is_valid and self.state is not None:
            self._weights.note_changes()
        self._is_valid = False

    def find_obstacle(self, run: Run) -> str | None:
        """Return what prevents saving the state after the last step; None if nothing does."""
        if self.state is None or not self._is_valid:
            return "the run is in the middle of a step, or its loss is wrong"
        # Weight clipping and normalization in a step write into weights before the optimizer does.
        if run.state.now.stage == "train" and not self._weights.can_be_restored():
            return "the failed step has changed the model's weights in place"
        changed = run.attributes.find_changed(self.state["attributes"])
        if changed:
            return f"{', '.join(changed)} may have changed in the failed step"
        return None

    @contextmanager
    def restored(self, run: Run) -> Iterator[None]:
        """Restore the snapshot's weights, buffers and learning rates while they are saved."""
        groups = run.stepper.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, (self.state or {})["lr"], strict=False):  # a group may be new since
            group["lr"] = deepcopy(rate)  # a tensor shared by two owners could not be written
        self._weights.restore()
        self._buffers.restore()
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


_VERSION = attrgetter("_version")  # increases with each write in place
_LARGEST_COPIES = 1 << 20
"""Bytes of all weights that are copied after each step, if steps change them in place."""
_NUM_FIRST = 3


class _Weights:
    """The weights after an optimizer step, in case a step of the user's changes them in place and then fails.

    They are copied only if steps have done so before, and if they are small.
    """

    def __init__(self, weights: Sequence[nn.Parameter] = ()) -> None:
        self._weights = weights
        self._writes: list[int] = []
        self._are_copied = False
        self._copies: list[torch.Tensor] = []

    def capture(self) -> None:
        self._writes = list(map(_VERSION, self._weights))
        if self._are_copied:
            self._copies = [weight.detach().clone() for weight in self._weights]

    def note_changes(self) -> None:
        """Note, before the optimizer writes, whether the step has."""
        if not self._are_copied and self._have_changed():
            self._are_copied = sum(weight.nbytes for weight in self._weights) <= _LARGEST_COPIES

    def can_be_restored(self) -> bool:
        return bool(self._copies) or not self._have_changed()

    def restore(self) -> None:
        if self._have_changed():
            for weight, copied in zip(self._weights, self._copies, strict=False):
                write_into(weight, copied)

    def _have_changed(self) -> bool:
        return bool(self._writes) and self._writes != list(map(_VERSION, self._weights))


class _Buffers:
    """Copies of the buffers, refreshed only where training has changed them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.places: list[tuple[nn.Module, str]] = []
        self._copies: list[torch.Tensor | None] = []
        self._versions: list[tuple[int, int] | None] = []

    def find(self) -> None:
        """Find the buffers again: layers may register some."""
        places = [(module, name) for module in self._model.modules() for name in buffers_of(module)]
        if places == self.places:
            return
        self.places = places
        self._copies = [None] * len(places)
        self._versions = [None] * len(places)

    def copy(self) -> None:
        for index, (module, name) in enumerate(self.places):
            buffer = buffers_of(module).get(name)
            version = None if buffer is None or isinstance(module, WITH_STATISTICS) else _version_of(buffer)
            if buffer is None or (version is not None and version == self._versions[index]):
                continue
            self._versions[index] = version
            copied = self._copies[index]
            if copied is None or copied.shape != buffer.shape:
                self._copies[index] = buffer.detach().clone()
            else:
                copied.copy_(buffer)

    def restore(self) -> None:
        for index, (module, name) in enumerate(self.places):
            buffer, copied = buffers_of(module).get(name), self._copies[index]
            if buffer is None or copied is None:
                continue
            version = None if isinstance(module, WITH_STATISTICS) else _version_of(buffer)
            if version is None or version != self._versions[index]:  # otherwise unchanged, and may be read-only
                write_into(buffer, copied)


def _version_of(buffer: torch.Tensor) -> tuple[int, int] | None:
    """Return a value that changes whenever the tensor does; None if there is none.

    The kernel that writes the running statistics of batch norm does not increase the version counter.
    """
    return None if buffer.is_inference() else (id(buffer), count_writes(buffer))
