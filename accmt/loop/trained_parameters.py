"""Tracks which parameters are trained: layers may be frozen and unfrozen during a run, between optimizer steps.

DistributedDataParallel averages the gradients of parameters that required gradients when it was built. So the
parameters are checked before each accumulation window, and the wrapper is rebuilt if they have changed. Processes
compare their findings; this needs communication only after a change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from accmt.engine.base import Engine
from accmt.errors import ModuleContractError, ProcessFailedError, explain
from accmt.libraries.private_names import children_of, is_compiled
from accmt.messages import warn, warn_once
from accmt.module import AcceleratorModule
from accmt.precision import HALVES
from accmt.processes import num_processes

if TYPE_CHECKING:
    from accmt.failures import Watch

_WHERE = "freezing or unfreezing parameters"
_PATIENCE_S = 5.0  # then check whether the others are still alive
_POLL_S = 0.01
_SHOWN = 3
_ROUNDS_BY_CHANCE = "bf16_stochastic_round"  # an attribute of torchao's optimizers
_REQUIRES_GRAD = attrgetter("requires_grad")


class TrainedParameters:
    """The parameters of a model, and which of them require gradients.

    Args:
        module: The trained module.
        engine: The engine that trains it.
        optimizer: The optimizer of its model.
        watch: The board for messages between processes; None with one process.
    """

    def __init__(
        self,
        module: AcceleratorModule,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        watch: Watch | None,
    ) -> None:
        self._module, self._engine, self._optimizer = module, engine, optimizer
        self._model, self._unwrapped_model = engine.model, engine.unwrapped_model
        self._agreement = None if watch is None or num_processes() == 1 else _Agreement(watch)
        self._steps_by_itself = module.uses_manual_optimization
        self._parameters = list(engine.unwrapped_model.parameters())
        self._flags = self._at_start = self._look()
        self._saved: dict[str, bool] = {}
        self._saved_modes: dict[str, bool] = {}
        self._modes_at_start: set[str] | None = None
        self._groups = optimizer.param_groups
        self._may_have_new = False
        self._warn_if_not_in_optimizer()
        self._warn_of_halves()

    def begin(self) -> None:
        """Take the currently frozen parameters as the initial state, and restore later changes of an interrupted run.

        Called after `on_fit_start`, in which a resumed run freezes layers again.
        """
        self._at_start = self._look()
        for name, parameter in self._unwrapped_model.named_parameters():
            if name in self._saved:
                parameter.requires_grad_(self._saved[name])
        self._saved = {}
        self._modes_at_start = self._look_at_modes()
        if self._saved_modes and not self._unwrapped_model.training:
            self._unwrapped_model.train()
        for name, layer in self._unwrapped_model.named_modules():
            layer.training = self._saved_modes.get(name, layer.training)

    @contextmanager
    def noting_new_layers(self) -> Iterator[None]:
        """Note when a layer or a parameter is added to any module, so that the next window checks for it.

        Checking all layers before each window would cost more than a step of a small model. Compiled layers get no
        hooks, because with them inductor's graphs of a resumed run round differently (seen with torch 2.13); they are
        only checked at the start of each epoch.
        """
        layers = self._unwrapped_model.modules()
        if any(is_compiled(layer) or "_orig_mod" in children_of(layer) for layer in layers):
            yield
            return

        def note(_module: nn.Module, _name: str, _value: Any) -> None:
            self._may_have_new = True

        handles = register_module_module_registration_hook(note), register_module_parameter_registration_hook(note)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def find_parameters(self) -> None:
        """Find the model's parameters again: layers may be replaced or added between two optimizer steps.

        Raises:
            ModuleContractError: A new parameter is not in the optimizer, so it would not be trained.
        """
        self._may_have_new = False
        self.modes()
        before = dict(zip(self._parameters, zip(self._flags, self._at_start, strict=True), strict=True))
        parameters = list(self._unwrapped_model.parameters())
        if len(parameters) == len(before) and all(parameter in before for parameter in parameters):
            return
        optimizers = list(getattr(self._optimizer, "optimizers", (self._optimizer,)))  # those that are chained
        if self._steps_by_itself:  # it may have other optimizers
            optimizers += [one for one in vars(self._module).values() if isinstance(one, torch.optim.Optimizer)]
        held = {item for optimizer in optimizers for group in optimizer.param_groups for item in group["params"]}
        new = [
            name
            for name, item in self._unwrapped_model.named_parameters()
            if item.requires_grad and item not in before and item not in held
        ]
        if new:
            shown = ", ".join(new[:_SHOWN]) + (", ..." if len(new) > _SHOWN else "")
            got = f"{shown}: added since the run began, but not to an optimizer, so they would not be trained"
            do = "keep the layer and change its values (layer.reset_parameters(), layer.load_state_dict(...)); or, "
            do += 'without checkpoints, call self.optimizer.add_param_group({"params": layer.parameters()})'
            raise ModuleContractError(explain("self.model", got, "the layers that the run began with", do))
        known = [before.get(parameter, (None, parameter.requires_grad)) for parameter in parameters]
        self._parameters = parameters
        self._flags, self._at_start = [flag is True for flag, _ in known], [start for _, start in known]

    def update(self) -> None:
        """Before a window, update which gradients are averaged.

        Processes: all, for the same windows; they wait for one another only after a change.

        Raises:
            ModuleContractError: Processes have frozen or unfrozen different parameters, all are frozen, or `self.model`
                was replaced.
            ProcessFailedError: A process does not answer.
        """
        if self._module.model is not self._model:
            self._require_same_model()
        if self._may_have_new:
            self.find_parameters()
        if self._module.optimizer is not self._optimizer or self._optimizer.param_groups is not self._groups:
            self._require_same_optimizer()
        flags = list(map(_REQUIRES_GRAD, self._parameters))
        has_changed = flags != self._flags
        if self._agreement is not None:
            self._agreement.pass_window(flags if has_changed else None)
        if not has_changed:
            return
        if not any(flags):
            got = "every parameter of self.model is frozen"
            raise ModuleContractError(
                explain(_WHERE, got, "at least one trainable parameter", "leave a layer unfrozen")
            )
        for parameter, is_trained in zip(self._parameters, flags, strict=True):
            if not is_trained:
                parameter.grad = None  # zeros, with set_to_none=False: momentum would still change it
        self._flags = flags
        self._warn_if_not_in_optimizer()
        self._warn_of_halves()
        self._engine.note_trained()

    def _require_same_model(self) -> None:
        """Reject a replaced `self.model`: optimizer and saved weights would still be those of the original model."""
        model = self._module.model
        if num_processes() == 1 and {*model.parameters()} == {*self._unwrapped_model.parameters()}:
            return  # the same in a wrapper, such as torch.compile's
        got = f"a different model ({type(model).__name__}) than when the run began"
        expected = "the original model: the optimizer has its parameters, and accmt saves them"
        do = "build it in __init__ or before fit; during a run, only change the values of layers in self.model"
        raise ModuleContractError(explain(f"{type(self._module).__name__}.model", got, expected, do))

    def _require_same_optimizer(self) -> None:
        """Reject a replaced `self.optimizer`, or parameter groups with parameters that are not the model's."""
        where, optimizer = f"{type(self._module).__name__}.optimizer", self._module.optimizer
        if optimizer is not self._optimizer:
            got = f"a different optimizer ({type(optimizer).__name__}) than when the run began: it would not step"
            do = "return it from get_optimizer; during a run, only change self.optimizer.param_groups"
            raise ModuleContractError(explain(where, got, "the original optimizer", do))
        known = set(self._unwrapped_model.parameters())
        for number, group in enumerate(optimizer.param_groups):
            others = [tuple(parameter.shape) for parameter in group["params"] if parameter not in known]
            if others:
                got = f"{len(others)} parameters that are not in self.model, of shapes {others[:_SHOWN]}"
                do = "use parameters of self.model"
                raise ModuleContractError(
                    explain(f"{where}.param_groups[{number}]", got, "parameters of the model", do)
                )
        self._groups = optimizer.param_groups
        self._warn_if_not_in_optimizer()

    def require_unchanged(self) -> None:
        """If a wrapper averages gradients, check that the trained parameters did not change within a window.

        Raises:
            ModuleContractError: A layer was frozen or unfrozen within the window.
        """
        if self._engine.notes_trained and self._look() != self._flags:
            got = "a change between two micro-batches of an optimizer step, or within training_step"
            expected = "changes only between optimizer steps, because processes average the gradients of a step"
            do = "freeze layers in on_epoch_start or on_update_end, or make self.model an nn.ModuleDict of its parts"
            raise ModuleContractError(explain(_WHERE, got, expected, do))

    def state_dict(self) -> dict[str, Any]:
        """Return which parameters were frozen (False) or unfrozen (True) since the run began, by name."""
        flags = self._look()
        if flags == self._at_start:
            return {"changed": dict(self._saved)}
        began = dict(zip(self._parameters, self._at_start, strict=True))
        named = self._unwrapped_model.named_parameters()
        changed = {name: item.requires_grad for name, item in named if began.get(item) is not item.requires_grad}
        return {"changed": {**self._saved, **changed}}

    def modes(self) -> dict[str, bool]:
        """Return the layers that hooks have set to evaluation mode (False) or back since the run began, by name."""
        before, now = self._modes_at_start, self._look_at_modes()
        if before is not None and self._unwrapped_model.training:  # not within an evaluation
            self._saved_modes = {name: name in before for name in before ^ now}
        return self._saved_modes

    def _look_at_modes(self) -> set[str]:
        model = self._unwrapped_model
        return {name for name, layer in model.named_modules() if not layer.training} if model.training else set()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`; it takes effect in `begin`."""
        self._saved, self._saved_modes = dict(state["changed"]), dict(state.get("modes", {}))

    def _look(self) -> list[bool]:
        return list(map(_REQUIRES_GRAD, self._parameters))

    def _warn_if_not_in_optimizer(self) -> None:
        if self._steps_by_itself:  # it may have other optimizers
            return
        held = {parameter for group in self._optimizer.param_groups for parameter in group["params"]}
        names = [
            name
            for name, parameter in self._unwrapped_model.named_parameters()
            if parameter.requires_grad and parameter not in held
        ]
        if names:
            shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            what = f"{len(names)} parameters require gradients but are not in the optimizer, so they are not trained"
            warn(f"{what}: {shown}; pass all parameters to the optimizer (frozen ones cost nothing), or freeze these")

    def _warn_of_halves(self) -> None:
        """Warn about 16-bit weights: rounding removes most of what a step at a small rate adds to them."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        optimizers = getattr(self._optimizer, "optimizers", (self._optimizer,))  # those that are chained
        careful = [one for one in optimizers if getattr(one, _ROUNDS_BY_CHANCE, False)]
        spared = {parameter for one in careful for group in one.param_groups for parameter in group["params"]}
        halves = [parameter for parameter in trained if parameter.dtype in HALVES and parameter not in spared]
        if not halves:
            return
        kind = halves[0].dtype
        what = f"{len(halves)} of {len(trained)} trained parameters are {str(kind).removeprefix('torch.')}"
        lost = f"rounding drops updates smaller than about {torch.finfo(kind).eps / 4:.2%} of a weight"
        do = 'load the model with dtype="float32" (in the YAML: `dtype: float32`)'
        warn_once(
            f'{what}: {lost}; {do}, and use Trainer(mixed_precision="bf16") to compute in 16 bits',
            about="coarse weights",
        )


class _Agreement:
    """Compares the trained parameters of processes after a change.

    A process that sees a change posts it to the others and waits for them. A process that has begun the same window
    without a change does not look for posts; its watch answers, because the process itself waits in a collective.

    Args:
        watch: The board for messages between processes.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._changes = 0
        self._windows = 0
        watch.answer_by(self._answer)

    def pass_window(self, flags: list[bool] | None) -> None:
        """Begin a window; after a change, wait until every process has seen it.

        Args:
            flags: The trained parameters; None if nothing has changed.
        """
        if flags is not None:
            digest = xxhash.xxh3_64_hexdigest(bytes(flags))
            self._watch.board.post(self._topic, {"window": self._windows, "trained": digest})
            self._require_equal(self._wait())
            self._changes += 1
        self._windows += 1

    @property
    def _topic(self) -> str:
        return f"trained-{self._changes}"

    def _answer(self) -> None:
        board = self._watch.board
        notes = board.read(self._topic)
        if board.index not in notes and any(note["window"] < self._windows for note in notes.values()):
            board.post(self._topic, {"window": self._windows, "trained": None})

    def _wait(self) -> dict[int, Any]:
        board, asked_at = self._watch.board, time.monotonic()
        while len(notes := board.read(self._topic)) < board.count:
            time.sleep(_POLL_S)
            if time.monotonic() - asked_at > _PATIENCE_S:
                gone = self._watch.find_silent() or list(self._watch.failures())
                if gone:
                    got = "no answer to the check of trained parameters"
                    raise ProcessFailedError(explain(f"process {gone[0]}", got, "all processes alive", "check its log"))
                asked_at = time.monotonic()
        return notes

    @staticmethod
    def _require_equal(notes: dict[int, Any]) -> None:
        if len({(note["window"], note["trained"]) for note in notes.values()}) > 1:
            others = [index for index, note in notes.items() if note != notes[0]]
            got = f"different trained parameters on process 0 than on {others}"
            do = "freeze and unfreeze on every process, not only on the main process or depending on its data"
            raise ModuleContractError(explain(_WHERE, got, "the same change on all processes", do))
