"""Decides, when an epoch begins, which parameters are trained in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from accmt.engine.base import Engine
from accmt.errors import ModuleContractError, fail
from accmt.messages import warn, warn_once
from accmt.module import AcceleratorModule
from accmt.options.optimizer_and_scheduler_arguments import members_of, weights_of
from accmt.precisions import HALVES
from accmt.processes import gather_if_different, num_processes

_WHERE = "freezing or unfreezing parameters"
_SHOWN = 3
_ROUNDS_BY_CHANCE = "bf16_stochastic_round"  # an attribute of torchao's optimizers


class TrainedParameters:
    """Which parameters of a model require gradients: decided after the hooks `on_fit_start` and `on_epoch_start`.

    DistributedDataParallel averages the gradients of parameters that required them when it was built, so a later change
    would train each process's own weights.

    Args:
        module: The trained module.
        engine: The engine that trains it.
        optimizer: The optimizer of its model.
        replicas: Compares the weights that processes share; None if no other process has any.

    Attributes:
        replicas: The same.
    """

    def __init__(
        self, module: AcceleratorModule, engine: Engine, optimizer: torch.optim.Optimizer, replicas: Any = None
    ) -> None:
        self._module, self._engine, self._optimizer = module, engine, optimizer
        self.replicas = replicas
        self._trained_model, self._model = engine.model, engine.unwrapped_model
        self._decided = self._look()
        self._at_start: dict[str, bool] = {}
        self._changed: dict[str, bool] = {}
        self._warn()

    def begin(self) -> None:
        """After `on_fit_start`, restore what an interrupted run froze and unfroze later than that.

        Processes: collective.
        """
        parameters = dict(self._model.named_parameters())
        self._at_start = {name: parameter.requires_grad for name, parameter in parameters.items()}
        for name in self._changed.keys() & parameters.keys():
            parameters[name].requires_grad_(self._changed[name])
        self.decide()

    def decide(self) -> None:
        """After `on_epoch_start`, train the parameters that require gradients now.

        Processes: collective.

        Raises:
            ModuleContractError: All parameters are frozen, processes have frozen different ones, or the model or the
                optimizer was replaced.
        """
        self._require_same_objects()
        named = list(self._model.named_parameters())
        trained = [name for name, parameter in named if parameter.requires_grad]
        # A schedule of unfreezing that is off by one trains nothing in its first epoch, without an error of torch.
        if not trained:
            got = "every parameter of self.model is frozen"
            do = "leave a layer unfrozen"
            raise fail(ModuleContractError, _WHERE, got=got, expected="at least one trainable parameter", do=do)
        _require_equal(gather_if_different(trained))
        self._changed = {
            name: parameter.requires_grad
            for name, parameter in named
            if self._at_start.get(name, parameter.requires_grad) is not parameter.requires_grad
        }
        before, self._decided = self._decided, self._look()
        if self._decided == before:
            return
        for parameter, is_trained in self._decided.items():
            if not is_trained:
                parameter.grad = None  # zeros, with set_to_none=False: momentum would still change it
        self._warn()
        self._engine.note_trained()

    def require_unchanged(self) -> None:
        """At checkpoints and the end of an epoch, check that the epoch has trained what was decided.

        Raises:
            ModuleContractError: It has not; the message names the first parameter.
        """
        self._require_same_objects()
        if self._module.uses_manual_optimization and not self._engine.notes_trained:
            return  # each backward of such a module may have other parameters
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad is not self._decided.get(parameter, False):
                what = "added to the model"
                if parameter in self._decided:
                    what = "frozen" if self._decided[parameter] else "unfrozen"
                got = f"{name}, which was {what}"
                expected = "changes in on_fit_start or on_epoch_start only: they hold for a whole epoch"
                do = "move the change to on_epoch_start, which is called before each epoch"
                raise fail(ModuleContractError, _WHERE, got=f"{got} after the epoch began", expected=expected, do=do)

    def require_equal_replicas(self, step: int) -> None:
        """Check that processes with the same part of the model have the same weights and optimizer state.

        Processes: collective.

        Raises:
            ReplicasDifferError: They differ.
        """
        # A process that saves alone, after others have failed, has nobody to compare with.
        if self.replicas is not None and num_processes() > 1:
            self.replicas.require_equal(step)

    def state_dict(self) -> dict[str, Any]:
        """Return which parameters were frozen (False) or unfrozen (True) since the run began, by name."""
        return {"changed": self._changed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`; it takes effect in `begin`."""
        self._changed = dict(state["changed"])

    def _look(self) -> dict[nn.Parameter, bool]:
        return {parameter: parameter.requires_grad for parameter in self._model.parameters()}

    def _require_same_objects(self) -> None:
        """Reject another `self.model` or `self.optimizer`, which accmt would neither step nor save."""
        model, optimizer, name = self._module.model, self._module.optimizer, type(self._module).__name__
        # The optimizer and the checkpoints would keep the old model, and the evaluation would use the new one.
        if model is not self._trained_model and not self._is_wrapped(model):
            got, expected = f"a different model ({type(model).__name__}) than when the run began", "the original model"
            do = "build it in __init__ or before fit; during a run, only change the values of layers in self.model"
            raise fail(ModuleContractError, f"{name}.model", got=got, expected=expected, do=do)
        # `self.optimizer = AdamW(...)` in a hook: the Trainer went on with the one that it had built.
        if optimizer is not self._optimizer:
            got = f"a different optimizer ({type(optimizer).__name__}) than when the run began: it would not step"
            do = "return it from get_optimizer; during a run, only change self.optimizer.param_groups"
            raise fail(ModuleContractError, f"{name}.optimizer", got=got, expected="the original optimizer", do=do)

    def _is_wrapped(self, model: nn.Module) -> bool:
        """Return whether a model is the same in a wrapper, such as torch.compile's."""
        return num_processes() == 1 and {*model.parameters()} == {*self._model.parameters()}

    def _warn(self) -> None:
        """Warn about trained parameters that no step changes, or only coarsely."""
        trained = {parameter: name for name, parameter in self._model.named_parameters() if parameter.requires_grad}
        stepped = _parameters_of([self._optimizer])
        left_out = [name for parameter, name in trained.items() if parameter not in stepped]
        if left_out and not self._module.uses_manual_optimization:  # which may have other optimizers
            shown = ", ".join([*left_out[:_SHOWN], *["..."] * (len(left_out) > _SHOWN)])
            what = f"{len(left_out)} parameters require gradients but are not in the optimizer, so they are not trained"
            warn(f"{what}: {shown}; pass all parameters to the optimizer (frozen ones cost nothing), or freeze these")
        # Rounding removes most of what a step at a small rate adds to a 16-bit weight.
        chained = members_of(self._optimizer)
        spared = _parameters_of([optimizer for optimizer in chained if getattr(optimizer, _ROUNDS_BY_CHANCE, False)])
        # Some optimizers round by chance, so that small updates are not lost on average.
        halves = [parameter.dtype for parameter in trained.keys() - spared if parameter.dtype in HALVES]
        if halves:
            what = f"{len(halves)} of {len(trained)} trained parameters are {str(halves[0]).removeprefix('torch.')}"
            lost = f"rounding drops updates smaller than about {torch.finfo(halves[0]).eps / 4:.2%} of a weight"
            do = 'load the model with dtype="float32" (in the YAML: `dtype: float32`)'
            precision = 'use Trainer(mixed_precision="bf16") to compute in 16 bits'
            warn_once(f"{what}: {lost}; {do}, and {precision}", about="coarse weights")


def _parameters_of(optimizers: Sequence[torch.optim.Optimizer]) -> set[nn.Parameter]:
    return set().union(*map(weights_of, optimizers))


def _require_equal(trained: Sequence[Sequence[str]]) -> None:
    """Check that the processes, which average their gradients, train the same parameters."""
    for index, names in enumerate(trained):
        different = sorted(set(names) ^ set(trained[0]))
        # Gradients are averaged: a weight that one process has frozen would move on it, too, or the reduction would
        # wait.
        if different:
            trains_it = index if different[0] in names else 0
            got = f"{different[0]} is trained on process {trains_it} only"
            do = "freeze and unfreeze on every process, not only on the main process or depending on its data"
            raise fail(ModuleContractError, _WHERE, got=got, expected="the same change on all processes", do=do)
