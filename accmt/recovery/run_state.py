"""The stateful parts of a run, in the order in which a checkpoint is restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accmt.callbacks import Callback, MainProcessCallback, name_by_class
from accmt.callbacks.callback import find_hooks
from accmt.checkpoint.contents import load_state, rejecting_other_forms
from accmt.data import UnshardedSource
from accmt.data.planned import PlannedSource
from accmt.errors import CheckpointError, explain
from accmt.huggingface import AdaLoraRanks
from accmt.libraries.private_names import (
    buffers_of,
    count_writes,
    has_running_statistics,
    is_saved,
    note_optimizer_step,
)
from accmt.messages import say, warn, warn_once
from accmt.module import defines
from accmt.optimization.resuming import group_arguments, restore_scheduler
from accmt.options.changes import Change, changed_arguments
from accmt.processes import gather_objects, num_processes, process_index
from accmt.recovery.resume import Resumed, with_features
from accmt.run import Run
from accmt.secrets import hide
from accmt.sharded_tensors import write_into
from accmt.state import Stateful


def stateful_parts(run: Run) -> dict[str, Stateful]:
    """Return the parts of a run besides model, optimizer and scheduler, by their names in a checkpoint."""
    module: Any = run.module
    is_mixed = isinstance(module, nn.Module) and type(module).state_dict is nn.Module.state_dict
    parts: dict[str, Stateful] = {
        "state": run.state,
        "weighting": run.weighting,
        "running_averages": run.running_averages,
        "selection": run.saver.selection,
        "tracking": run.tracking,
        "module": _PartsBeside(module) if is_mixed else module,
        "trained": run.trained,
        "attributes": run.attributes,
        "clock": run.clock,
    }
    if run.saver.patience is not None:
        parts["patience"] = run.saver.patience
    if run.accelerator.scaler is not None:
        parts["scaler"] = run.accelerator.scaler
    ranks = AdaLoraRanks.of(run.unwrapped_model)
    if ranks is not None:
        parts["adalora"] = ranks
    return parts


class _PartsBeside:
    """The state of a module that is also an `nn.Module`: buffers and frozen parts besides the model and the teacher.

    Its own `state_dict` would contain the model again, under names that depend on the wrapper.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        state = nn.Module.state_dict(self._module)
        return {name: value for name, value in state.items() if name.split(".")[0] not in ("model", "teacher")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        nn.Module.load_state_dict(self._module, state, strict=False)


def collect_others(run: Run, at: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the state of everything besides model and optimizer, after an optimizer step.

    Processes: collective; a checkpoint stores what the main process returns.

    Args:
        at: The state of the step snapshot, if the run has continued since; None to collect the current state.
    """
    run.engine.share_buffers()  # any process may change them, and training continues with the main process's
    local = LocalState(run).collect() if at is None else dict(at)
    place, parts = local.pop("place"), dict(local["parts"])
    for name in ("running_averages", "attributes"):
        parts[name] = parts[name].state_dict()
    _warn_of_optimizers(run)
    _warn_of_data(run, parts["attributes"])
    if run.accelerator.scaler is not None:
        parts["scaler"] = run.accelerator.scaler.state_dict()
    # The user's callbacks that run on every process, where they may have another state each.
    own = {
        name
        for name, callback in _named(run.callbacks).items()
        if not (isinstance(callback, MainProcessCallback) or type(callback).__module__.startswith("accmt."))
    }
    callbacks = local["callbacks"] or {}
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
        "parts": parts,
        "features": run.features.state_dict(),
        "lessons": run.recovery.lessons,
        "next_stage": run.snapshot.next_stage,
        "made_step": run.snapshot.made_step,
        "own": {
            "module": parts["module"],
            "attributes": parts["attributes"],
            "trainer": local["trainer"],
            "callbacks": {name: state for name, state in callbacks.items() if name in own},
        },
    }


def _warn_of_optimizers(run: Run) -> None:
    """Warn about optimizers and schedulers in attributes that have stepped and whose state no checkpoint contains."""
    module, optimizer, scheduler = run.module, run.stepper.optimizer, run.scheduler
    if defines(module, "state_dict"):  # which may return their state
        return
    own = [optimizer, *getattr(optimizer, "optimizers", ()), *([] if scheduler is None else [scheduler])]
    parts = [part for used in own for part in vars(used).values()]  # one may hold others
    known = {id(one) for part in [own, parts, *parts] if isinstance(part, list | tuple) for one in part}
    for name, value in vars(module).items():
        held = [value, *(value.values() if type(value) is dict else value if type(value) in (list, tuple) else ())]
        unknown = [one for one in held if id(one) not in known]
        kind = "scheduler" if any(isinstance(one, LRScheduler) and one.last_epoch > 0 for one in unknown) else ""
        kind = "optimizer" if any(isinstance(one, Optimizer) and one.state for one in unknown) else kind
        if kind:
            what = f"self.{name} has a{'n' * (kind == 'optimizer')} {kind} that get_{kind} did not return"
            what += ", so its state is not in checkpoints"
            do = "return its state_dict from the module's `state_dict`, and restore it in load_state_dict"
            warn_once(f"{what}: {do}", about=f"optimizer {name}")


def _warn_of_data(run: Run, attributes: Mapping[str, Any]) -> None:
    """Warn about a dataset that processes share and that each of them changes in another way."""
    if num_processes() == 1 or run.train_loader.source.shard.count == 1:
        return
    own = run.attributes.digests_of_data(attributes)
    every = gather_objects(own)
    for name in sorted({name for one in every for name in one}):
        if any(one.get(name) != own.get(name) for one in every):
            what = f"{name} differs between processes, which share the samples but each change their own copy of it"
            do = "gather what each process writes (self.accelerator.gather), and write it on all of them"
            warn_once(f"{what}, so results depend on the number of processes: {do}", about=f"data {name}")


class LocalState:
    """The part of a run's state that changes between optimizer steps, read without waiting for device or processes.

    The snapshot is taken after every training step, so constant parts are looked up only once.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._parts = stateful_parts(run)
        self._parts.pop("scaler", None)  # changes only with the optimizer, and reading it would wait for the device
        del self._parts["running_averages"], self._parts["attributes"]
        self._callbacks = _named(run.callbacks)

    def collect(self) -> dict[str, Any]:
        """Return a copy of that state; running averages are copied as an object, without reading their values."""
        run, state = self._run, self._run.state
        parts: dict[str, Any] = {name: part.state_dict() for name, part in self._parts.items()}
        parts["module"] = parts["module"] and copy_structure(parts["module"])
        parts["running_averages"] = run.running_averages.copy()
        parts["attributes"] = run.attributes.capture()
        source, position = run.train_loader.source, None
        # Unsharded data would wait for other processes. Planned data are a function of epoch and micro-batch, except
        # between two epochs, where the position still refers to the previous epoch. These positions are computed when a
        # checkpoint is written.
        if not (isinstance(source, UnshardedSource) or (state.train_step and isinstance(source, PlannedSource))):
            position = source.position(state.epoch, state.train_step)
        return {
            "place": (state.epoch, state.train_step),
            "is_last_batch": state.now.is_last_training_batch,
            "metrics": dict(state.metrics),
            "best_metrics": dict(state.best_metrics),
            "lr": [deepcopy(group["lr"]) for group in run.stepper.optimizer.param_groups],  # may be tensors
            "data": position,
            "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
            "parts": parts,
            "callbacks": self._callbacks and {n: copy_structure(c.state_dict()) for n, c in self._callbacks.items()},
            "trainer": copy_structure(run.module.trainer.get_state()),
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
        others = load_state(run.model, None if resets_optimizer else [run.stepper.optimizer], resumed.folder)
        built += group_arguments(run.stepper.optimizer)[len(built) :]
        others = _with_own(with_features(others))
        if not resets_optimizer:
            _restore_scheduler(run, others, built, resumed.changes)
        callbacks, of_trainer = others["callbacks"], others["trainer"]
    for name, part in stateful_parts(run).items():
        if name in others["parts"]:
            # Errors of the user's own `load_state_dict` are raised unchanged.
            with nullcontext() if part is run.module else rejecting_other_forms(resumed.folder):
                part.load_state_dict(others["parts"][name])
    with rejecting_other_forms(resumed.folder):
        run.saver.forget_missing(run.settings.model_folder, others["run_id"])
        if run.checkpoints.owns(resumed.folder):
            run.saver.run_id = others["run_id"]
        run.features.load_state_dict(others["features"])
        run.state.metrics, run.state.best_metrics = others["metrics"], others["best_metrics"]
        run.state.now.is_last_training_batch = others["is_last_batch"]
        run.snapshot.next_stage, run.snapshot.made_step = others["next_stage"], others["made_step"]
        run.checkpoints.continue_from(resumed.folder)
    ours = _named(run.callbacks)
    for name, state in callbacks.items():
        if name in ours:
            ours[name].load_state_dict(state)
        elif state:
            warn(f"the checkpoint contains the state of a callback {name}, which this run does not have: ignored")
    for name in ours.keys() - callbacks.keys():
        say(f"the callback {name} is new in this run: it starts without a state")
    run.module.trainer.update_state(of_trainer)
    size, own = run.settings.hps.train_batch_size, run.loaders.user_batch_size
    is_changed = any(change.key == "batch_size" for change in resumed.changes)
    if is_changed and run.loaders.takes_user_batches and own != size:
        warn(f"the new batch_size={size} of the hyper-parameters has no effect: the DataLoader has batch_size={own}")


@contextmanager
def keeping_state(run: Run) -> Iterator[None]:
    """Restore the state of the module and callbacks after the hooks of an epoch that a resumed run continues.

    They ran when the epoch began: a counter that they set to 0 would count only the rest of the epoch.
    """
    users = (one for one in _named(run.callbacks).values() if not type(one).__module__.startswith("accmt."))
    owners: list[Stateful] = [stateful_parts(run)["module"], *users]
    states = [deepcopy(one.state_dict()) for one in owners]
    with run.attributes.keeping():
        yield
    for one, state in zip(owners, states, strict=True):
        one.load_state_dict(state)


def _with_own(others: dict[str, Any]) -> dict[str, Any]:
    """Return the states of a checkpoint, with this process's own states if the number of processes is unchanged."""
    if "own" not in others:
        return others
    before = others["own"]["num_processes"]
    if before != num_processes():
        what = f"module, callbacks or Trainer had a separate state on each of {before} processes"
        warn(f"{what}, and there are {num_processes()} now: each starts with the state of process 0")
        return others
    own = others["own"]["states"].get(str(process_index()))
    if own is None:  # the main process
        return others
    parts = {**others["parts"], "module": own["module"], "attributes": own["attributes"]}
    callbacks = {**others["callbacks"], **own["callbacks"]}
    return {**others, "parts": parts, "callbacks": callbacks, "trainer": own["trainer"]}


def _restore_scheduler(
    run: Run, others: Mapping[str, Any], built: list[dict[str, Any]], changes: Sequence[Change]
) -> None:
    kind = _name_of(run.scheduler)
    if others["scheduler_class"] != kind:
        got, expected = f"a {kind}", f"the checkpoint's {others['scheduler_class']}"
        reset = 'Trainer(checkpoint_options={"reset_optimizer_on_resume": True})'
        do = f"build it as in the saved run, or start with a new scheduler: {reset}"
        raise CheckpointError(explain("the learning-rate scheduler", got, expected, do))
    lines = restore_scheduler(
        run.stepper.optimizer,
        run.scheduler,
        others["scheduler"],
        built,
        changed=changed_arguments(changes),
        is_stretched=others["scheduler_length"] != run.scheduler_length,
    )
    for line in lines:
        warn(line)
    note_optimizer_step(run.stepper.optimizer)


def _name_of(scheduler: Any) -> str | None:
    return None if scheduler is None else type(scheduler).__qualname__


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Name each stateful callback by its class and a number, so that the next start finds its state."""
    own = (Callback.state_dict, Callback.load_state_dict)
    return name_by_class(one for one in callbacks if (type(one).state_dict, type(one).load_state_dict) != own)


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
        self._local_state: LocalState | None = None
        self._buffers = _Buffers(model)

    def capture(self, run: Run, next_stage: int) -> None:
        """Copy the current state of the run.

        Args:
            next_stage: The next stage.
        """
        self.next_stage, self._is_valid = next_stage, True
        if not (self._is_kept or run.features.needs_snapshot):
            return
        if self._local_state is None:
            self._local_state = LocalState(run)
            # accmt's own hooks, such as the progress bar's, change nothing in a checkpoint.
            users = (*run.callbacks, run.module)
            self.may_change_in_step_hooks = any("on_update_end" in find_hooks(user) for user in users)
        self.state = self._local_state.collect()
        if self._buffers.places:
            self._buffers.copy()

    def invalidate(self) -> None:
        """Mark the weights as different from the snapshot, or never to be saved, until the next capture.

        In the middle of an optimizer step they match neither the snapshot nor the next state.
        """
        self._is_valid = False

    @property
    def can_be_saved(self) -> bool:
        """Whether there is a state to save."""
        return self.state is not None and self._is_valid and not self.find_changed()

    def find_changed(self) -> list[str]:
        """Return the attributes of module and callbacks that have changed since the last step."""
        changed: list[str] = self.state["parts"]["attributes"].find_changed() if self.state is not None else []
        return changed

    @contextmanager
    def restored(self, run: Run) -> Iterator[None]:
        """Restore the snapshot's buffers and learning rates while they are saved."""
        groups = run.stepper.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, (self.state or {})["lr"], strict=False):  # a group may be new since
            group["lr"] = deepcopy(rate)  # a tensor shared by two owners could not be written
        self._buffers.restore()
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate


class _Buffers:
    """Copies of the persistent buffers, refreshed only where training has changed them."""

    def __init__(self, model: nn.Module) -> None:
        self.places = [
            (module, name) for module in model.modules() for name in buffers_of(module) if is_saved(module, name)
        ]
        self._copies: list[torch.Tensor | None] = [None] * len(self.places)
        self._versions: list[tuple[int, int] | None] = [None] * len(self.places)

    def copy(self) -> None:
        for index, (module, name) in enumerate(self.places):
            buffer = buffers_of(module).get(name)
            version = None if buffer is None or has_running_statistics(module) else _version_of(buffer)
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
            version = None if has_running_statistics(module) else _version_of(buffer)
            if version is None or version != self._versions[index]:  # otherwise unchanged, and may be read-only
                write_into(buffer, copied)


def _version_of(buffer: torch.Tensor) -> tuple[int, int] | None:
    """Return a value that changes whenever the tensor does; None if there is none.

    The kernel that writes the running statistics of batch norm does not increase the version counter.
    """
    return None if buffer.is_inference() else (id(buffer), count_writes(buffer))
