"""The losses on preferences by name, with their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from accmt.addons.prefer import losses
from accmt.errors import ArgumentError, explain, nearest

LossName = Literal["dpo", "dpo_norm", "hinge", "ipo", "simpo", "orpo", "kto"]
Reference = Literal["auto", "adapter", "copy"]


class _Kind(NamedTuple):
    beta: float
    needs_reference: bool
    is_per_token: bool = False
    options: tuple[str, ...] = ()


LOSSES: Mapping[str, _Kind] = {
    "dpo": _Kind(0.1, needs_reference=True, options=("label_smoothing",)),
    "dpo_norm": _Kind(5.0, needs_reference=True, is_per_token=True, options=("label_smoothing",)),
    "hinge": _Kind(0.1, needs_reference=True),
    "ipo": _Kind(0.1, needs_reference=True, is_per_token=True),
    "simpo": _Kind(2.0, needs_reference=False, is_per_token=True, options=("gamma",)),
    "orpo": _Kind(0.1, needs_reference=False, is_per_token=True),
    "kto": _Kind(0.1, needs_reference=True, options=("desirable_weight", "undesirable_weight")),
}
"""The losses by name: the default of beta, whether log-probabilities are compared with a reference's, whether they are
divided by the length of the answer, and which options the loss has."""


class ObjectiveError(ArgumentError):
    """A loss has an invalid option.

    Attributes:
        name: The option.
        got: Its value.
        expected: Its valid values.
        do: How to correct it.
    """

    def __init__(self, name: str, got: str, expected: str, do: str) -> None:
        super().__init__(explain(name, got, expected, do))
        self.name, self.got, self.expected, self.do = name, got, expected, do


@dataclass(frozen=True)
class Objective:
    """A loss and its options.

    Attributes:
        loss: Its name.
        beta: β, for IPO τ, for ORPO λ; None uses the loss's default.
        label_smoothing: The assumed share of pairs whose answers are swapped; DPO only.
        gamma: The target margin; SimPO only.
        desirable_weight: λ_D; KTO only.
        undesirable_weight: λ_U; KTO only.

    Raises:
        ObjectiveError: An unknown loss, an invalid value, or an option that the loss does not have.
    """

    loss: str = "dpo"
    beta: float | None = None
    label_smoothing: float = 0.0
    gamma: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            near = nearest(str(self.loss), LOSSES)
            do = f"did you mean {near!r}?" if near else "choose one of them"
            raise ObjectiveError("loss", repr(self.loss), f"one of {', '.join(LOSSES)}", do)
        for field in fields(self)[2:]:
            if getattr(self, field.name) != field.default and field.name not in self.kind.options:
                named = [name for name, kind in LOSSES.items() if field.name in kind.options]
                expected = f"no {field.name}: {' and '.join(named)} have it"
                got = f"{field.name} with the loss {self.loss}"
                raise ObjectiveError(field.name, got, expected, f"remove `{field.name}`")
        if not self.strength > 0:
            expected = "a number above 0: with 0, the loss does not depend on the answers"
            do = f"remove it: the default of {self.loss} is {self.kind.beta}"
            raise ObjectiveError("beta", repr(self.beta), expected, do)
        if not 0 <= self.label_smoothing < 0.5:
            expected = "a number from 0 to below 0.5: at 0.5, the answers of a pair count the same"
            raise ObjectiveError("label_smoothing", repr(self.label_smoothing), expected, "for example 0.1")
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) >= 0:
                raise ObjectiveError(name, repr(getattr(self, name)), "a number of at least 0", "for example 1.0")

    @property
    def kind(self) -> _Kind:
        """The properties of the loss."""
        return LOSSES[self.loss]

    @property
    def strength(self) -> float:
        """β, or the default of the loss."""
        return self.kind.beta if self.beta is None else self.beta

    def score(self, scores: Tensor) -> Tensor:
        """Return the loss of each pair.

        Args:
            scores: Log-probabilities of the answers or, with a reference, log-ratios; divided by the lengths of the
                answers for losses per token `[pairs, 2]`.
        """
        chosen, rejected = scores.unbind(1)
        match self.loss:
            case "hinge":
                return losses.hinge(chosen, rejected, beta=self.strength)
            case "ipo":
                return losses.ipo(chosen, rejected, beta=self.strength)
            case "simpo":
                return losses.simpo(chosen, rejected, beta=self.strength, gamma=self.gamma)
            case "orpo":
                return losses.orpo(chosen, rejected, beta=self.strength)
            case _:
                return losses.dpo(chosen, rejected, beta=self.strength, label_smoothing=self.label_smoothing)

    def score_answers(
        self, ratios: Tensor, is_desirable: Tensor, mean: Tensor | float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and the metrics of each answer, for KTO.

        Args:
            ratios: The log-ratios of the answers `[samples]`.
            is_desirable: Whether each answer is desirable `[samples]`.
            mean: The mean log-ratio of answers to other prompts, over the whole batch or set.
        """
        baseline = torch.as_tensor(mean, dtype=ratios.dtype, device=ratios.device).clamp(min=0)
        lost = losses.kto(
            ratios,
            is_desirable,
            baseline,
            beta=self.strength,
            desirable=self.desirable_weight,
            undesirable=self.undesirable_weight,
        )
        return lost, {
            "accuracy": losses.share_right(torch.where(is_desirable, 1, -1) * (ratios - baseline)),
            "baseline": baseline.expand_as(ratios),
        }
