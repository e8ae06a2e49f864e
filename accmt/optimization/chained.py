"""Several optimizers that behave as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer

from accmt.errors import ArgumentError, explain
from accmt.sharded_tensors import by_mesh


class ChainedOptimizer(Optimizer):
    """Several optimizers, each with parameters of its own, that behave as one.

    One `step` steps them all; one scheduler, one clipping and one state are for all their groups. The chained
    optimizers and this one share the groups (the same dicts) and the state.

    Args:
        optimizers: Optimizers of different parameters. Groups that are added later go to the first.

    Raises:
        ArgumentError: There is none, two have a parameter in common, or one has a `state_dict` of its own.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> muon = torch.optim.Muon([model[0].weight], lr=0.02)
        >>> adam = torch.optim.AdamW([model[0].bias, *model[1].parameters()], lr=1e-3)
        >>> [group["lr"] for group in ChainedOptimizer([adam, muon]).param_groups]
        [0.001, 0.02]
    """

    is_mixed = False
    """Whether parameters are sharded over several groups of processes, or only some are."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._chained = list(optimizers)
        _require_chainable(self._chained)
        self._owners = [number for number, one in enumerate(self._chained) for _ in one.param_groups]
        super().__init__([group for one in self._chained for group in one.param_groups], {})
        for one in self._chained:
            self.state.update(one.state)
        first = self._chained[0].param_groups[0]
        self.defaults = {"lr": first["lr"]} if "lr" in first else {}  # what polynomial decay is relative to
        self._share()
        self.register_load_state_dict_post_hook(self._share_loaded)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The chained optimizers."""
        return tuple(self._chained)

    @property
    def class_names(self) -> str:
        """The chained optimizers by name: `AdamW + Muon`."""
        return " + ".join(type(one).__qualname__ for one in self._chained)

    def class_name_of(self, number: int) -> str:
        """Return the name of the optimizer that a parameter group belongs to."""
        return type(self._chained[self._owners[number]]).__qualname__

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Let all of them step.

        Args:
            closure: None: several optimizers cannot each evaluate the loss.
        """
        if closure is not None:
            raise ArgumentError(explain("ChainedOptimizer.step", "a closure", "none", "step an optimizer alone"))
        self._share()
        for one in self._chained:
            with mesh_by_mesh(one) if self.is_mixed else nullcontext():
                one.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the first optimizer."""
        if len(self.param_groups) < len(self._owners):  # while this object is made
            super().add_param_group(param_group)
            return
        self._share()
        first = self._chained[0]
        first.add_param_group(param_group)
        super().add_param_group(first.param_groups[-1])
        self._owners.append(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state over: each chained optimizer fills in what one of an older version lacks."""
        super().__setstate__(state)
        for number, one in enumerate(self._chained):
            twin = object.__new__(type(one))  # not the optimizer itself, which this may be a trial twin of
            twin.__dict__.update(vars(one))
            twin.__setstate__({"state": self.state, "param_groups": self._groups_of(number)})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_chained": self._chained, "_owners": self._owners}

    def __repr__(self) -> str:
        return f"ChainedOptimizer([{', '.join(map(repr, self._chained))}])"

    def _share_loaded(self, loaded: Optimizer) -> None:
        """Share a state at once when it is loaded: schedulers and manual steps use the chained optimizers directly."""
        if loaded is self:  # and no trial twin, which has these hooks too
            self._share()

    def _share(self) -> None:
        """Let the chained optimizers have this one's state and groups; both are replaced when a state is loaded."""
        for number, one in enumerate(self._chained):
            one.state, one.param_groups = self.state, self._groups_of(number)

    def _groups_of(self, number: int) -> list[dict[str, Any]]:
        if len(self.param_groups) != len(self._owners):
            got = f"{len(self.param_groups)} parameter groups instead of {len(self._owners)}"
            do = "change the groups themselves, or add_param_group"
            raise ArgumentError(explain("ChainedOptimizer.param_groups", got, "the groups of its optimizers", do))
        return [group for group, owner in zip(self.param_groups, self._owners, strict=True) if owner == number]


@contextmanager
def mesh_by_mesh(optimizer: Optimizer) -> Iterator[None]:
    """Let a fused step take the parameters that are sharded alike together, and then the others.

    One kernel takes whole tensors, or those of one mesh (torch 2.13: "got mixed torch.Tensor and DTensor").
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [part for group in groups for part in _divide(group)]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _divide(group: dict[str, Any]) -> list[dict[str, Any]]:
    if not group.get("fused"):  # others may keep something of their own in a group
        return [group]
    return [{**group, "params": parameters} for (parameters,) in by_mesh(group["params"])]


def _require_chainable(optimizers: Sequence[Optimizer]) -> None:
    where = "ChainedOptimizer(optimizers=...)"
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise ArgumentError(explain(where, repr(optimizers), "torch optimizers, one at least", "[adamw, muon]"))
    parameters = [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]
    if len(set(parameters)) < len(parameters):
        got = "two optimizers for one parameter"
        raise ArgumentError(explain(where, got, "each parameter in one of them", "take it out of the others"))
    for one in optimizers:
        # That of bitsandbytes only packs the entries of each parameter together, for FSDP1.
        if type(one).state_dict is not Optimizer.state_dict and not type(one).__module__.startswith("bitsandbytes."):
            got = f"{type(one).__name__}, which has a `state_dict` of its own"
            do = "train all parameters with it, or none"
            raise ArgumentError(explain(where, got, "optimizers whose state is torch's, by parameter", do))
