"""Checks, at the first optimizer step of a run, that the loss reaches the parameters that are trained.

Its hook is called after that of the loss guard: steps that this skips are not checked.
"""

from __future__ import annotations

from torch import nn

from accmt.engine.reduction import names_without_gradient, shorten
from accmt.messages import say
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.run.weighting import AccumulationWindow


class MissingGradients(Feature):
    """Reports parameters that get no gradient: otherwise their optimizer steps change nothing, without an error.

    Only the first step is checked. A module with manual optimization may compute the gradients of its parts one after
    another; `ManualSteps.backward` checks it.
    """

    name = "missing_gradients"

    def __init__(self, run: Run) -> None:
        self._run = run
        # Before the first forward: FSDP2 leaves gathered weights in the model where the loss does not reach them.
        self._names = {parameter: name for name, parameter in run.unwrapped_model.named_parameters()}

    @classmethod
    def for_run(cls, run: EvaluationRun) -> MissingGradients | None:
        return cls(run) if isinstance(run, Run) and not run.module.uses_manual_optimization else None

    def allows_step(self, window: AccumulationWindow) -> bool:
        """Check the gradients of the first window that ends in a step.

        Raises:
            ModuleContractError: No trained parameter has a gradient.
        """
        run = self._run
        run.features.drop(self.allows_step)
        trained: dict[str, nn.Parameter] = {}
        for parameter in run.stepper.parameters:
            if parameter.requires_grad:
                trained[self._names.get(parameter, f"new parameter {len(trained)}")] = parameter
        if run.hooks.on_after_backward and all(parameter.grad is None for parameter in trained.values()):
            return True  # a callback may take the gradients away, and return them before the step
        names = names_without_gradient(trained)
        if names:
            say(
                f"the first step trains {len(trained) - len(names)} of {len(trained)} parameters: the loss does not "
                f"depend on {shorten(names)} (normal for parts that only some batches use)"
            )
        return True
