"""Losses on preferences and on a teacher's predictions: pure functions that return one loss per pair, answer or token.

`Objective` is a loss on preferences by its name, with its options.

Notation: x is a prompt, y_w its chosen and y_l its rejected answer, |y| the number of trained tokens of an answer, and
σ the logistic function. log π(y|x) is the sum of the log-probabilities of the trained tokens of y, and
h = log π(y|x) - log π_ref(y|x) the log-ratio of the trained model to the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accmt.errors import ArgumentError, fail, nearest


def dpo(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimization: -(1 - ε) log σ(β (h_w - h_l)) - ε log σ(-β (h_w - h_l)); a mean over pairs.

    With log-ratios divided by the lengths of the answers, this is the length-normalized loss of Tülu 3.

    Sources: Rafailov et al. 2023, arXiv:2305.18290, equation 7; label smoothing ε: Mitchell 2023, "A note on DPO with
    noisy preferences"; length normalization: Lambert et al. 2024, arXiv:2411.15124, equation 6.

    Args:
        chosen: h_w `[pairs]`.
        rejected: h_l `[pairs]`.
        beta: β.
        label_smoothing: ε, the assumed share of pairs whose answers are swapped.
    """
    logits = beta * (chosen - rejected)
    return -(1 - label_smoothing) * functional.logsigmoid(logits) - label_smoothing * functional.logsigmoid(-logits)


def hinge(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """The hinge loss of SLiC on log-ratios: max(0, 1 - β (h_w - h_l)); a mean over pairs.

    Source: Liu et al. 2023, arXiv:2309.06657, equation 9, after Zhao et al. 2023, arXiv:2305.10425.

    Args:
        chosen: h_w `[pairs]`.
        rejected: h_l `[pairs]`.
        beta: β.
    """
    return torch.relu(1 - beta * (chosen - rejected))


def ipo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Identity preference optimization: (h_w - h_l - 1 / (2 τ))²; a mean over pairs.

    Source: Azar et al. 2023, arXiv:2310.12036, equation 17. The log-ratios are divided by the lengths of the answers,
    as its authors recommend and TRL does.

    Args:
        chosen: h_w / |y_w| `[pairs]`.
        rejected: h_l / |y_l| `[pairs]`.
        beta: τ.
    """
    return (chosen - rejected - 1 / (2 * beta)) ** 2


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Simple preference optimization: -log σ(β log π(y_w|x) / |y_w| - β log π(y_l|x) / |y_l| - γ); a mean over pairs.

    Source: Meng et al. 2024, arXiv:2405.14734, equation 6. TRL's `simpo_gamma` is the same γ.

    Args:
        chosen: log π(y_w|x) / |y_w| `[pairs]`.
        rejected: log π(y_l|x) / |y_l| `[pairs]`.
        beta: β.
        gamma: γ, the target margin.
    """
    return -functional.logsigmoid(beta * (chosen - rejected) - gamma)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Odds ratio preference optimization: -m_w - λ log σ(log odds(m_w) - log odds(m_l)); a mean over pairs.

    m = log π(y|x) / |y| is the mean log-probability of an answer's tokens, and odds(m) = exp(m) / (1 - exp(m)).

    Source: Hong et al. 2024, arXiv:2403.07691, equations 4 to 7. The first term, the loss of supervised fine-tuning, is
    that of the answer, as in the paper and its code; TRL adds the tokens of the prompt, and averages over the tokens of
    a batch, which depends on what else is in it.

    Args:
        chosen: m_w `[pairs]`.
        rejected: m_l `[pairs]`.
        beta: λ.
    """
    # The odds of an answer that is certain, as far as the digits go, are infinite, and their gradient is NaN.
    most = -torch.finfo(chosen.dtype).eps
    m_w, m_l = chosen.clamp(max=most), rejected.clamp(max=most)
    # log(1 - exp(m)) without the loss of digits near m = 0.
    log_odds = (m_w - m_l) - (torch.log(-torch.expm1(m_w)) - torch.log(-torch.expm1(m_l)))
    return -chosen - beta * functional.logsigmoid(log_odds)


def kto(
    ratios: Tensor, is_desirable: Tensor, baseline: Tensor, *, beta: float, desirable: float, undesirable: float
) -> Tensor:
    """Kahneman-Tversky optimization: λ_D (1 - σ(β (h - z))) for desirable, λ_U (1 - σ(β (z - h))) for other answers.

    A mean over answers. z is the baseline, max(0, mean log-ratio of answers to other prompts) over the whole batch, an
    estimate of the KL divergence of the trained model from the reference; it has no gradient.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306, equations 7 and 8.

    Args:
        ratios: h `[answers]`.
        is_desirable: Whether each answer is desirable `[answers]`.
        baseline: z, a scalar.
        beta: β.
        desirable: λ_D.
        undesirable: λ_U.
    """
    liked = desirable * (1 - torch.sigmoid(beta * (ratios - baseline)))
    disliked = undesirable * (1 - torch.sigmoid(beta * (baseline - ratios)))
    return torch.where(is_desirable, liked, disliked)


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor | float = 0.0, *, center: float = 0.0) -> Tensor:
    """The loss of a reward model: -log σ(r_w - r_l - m) + c (r_w + r_l)²; a mean over pairs.

    Sources: Ouyang et al. 2022, arXiv:2203.02155, equation 1; margins m: Touvron et al. 2023, arXiv:2307.09288,
    equation 2; centering c: Eisenstein et al. 2023, arXiv:2312.09244, section 4.

    Args:
        chosen: Rewards r_w of the chosen answers `[pairs]`.
        rejected: Rewards r_l of the rejected answers `[pairs]`.
        margins: m, how much better each chosen answer is `[pairs]`, or one for all.
        center: c, which keeps rewards near 0.
    """
    losses = -functional.logsigmoid(chosen - rejected - margins)
    return losses if center == 0 else losses + center * (chosen + rejected) ** 2


def divergence(student: Tensor, teacher: Tensor, *, beta: float = 0.0, temperature: float = 1.0) -> Tensor:
    """Generalized Jensen-Shannon divergence between the predictions of a teacher and a student, per token.

    β KL(P ‖ M) + (1 - β) KL(Q ‖ M) with M = β P + (1 - β) Q, the teacher's P and the student's Q. Its limits are used
    for β = 0, the forward KL(P ‖ Q), and for β = 1, the reverse KL(Q ‖ P). A mean over target tokens.

    Source: Agarwal et al. 2023, arXiv:2306.13649, equation 1 and section 3.

    Args:
        student: Logits `[tokens, vocabulary]`.
        teacher: Logits `[tokens, vocabulary]`.
        beta: β, from 0 to 1.
        temperature: Divides the logits of both.
    """
    own = functional.log_softmax(student / temperature, -1)
    theirs = functional.log_softmax(teacher / temperature, -1)
    if beta == 0:
        return _kl(theirs, own)
    if beta == 1:
        return _kl(own, theirs)
    weights = torch.tensor([beta, 1 - beta], dtype=own.dtype, device=own.device).log()
    mixture = torch.logsumexp(torch.stack([theirs + weights[0], own + weights[1]]), 0)
    return beta * _kl(theirs, mixture) + (1 - beta) * _kl(own, mixture)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one ‖ other) of log-probabilities."""
    return functional.kl_div(other, one, reduction="none", log_target=True).sum(-1)


def in_full_precision(logits: Tensor) -> Tensor:
    """Return logits in float32, or float64 if they are."""
    return logits if logits.dtype == torch.float64 else logits.float()


def weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    """Return a weighted mean; if all weights are 0, it is 0 with a gradient, which other processes may need."""
    total = weights.sum()
    mean: Tensor = (values * weights).sum() / torch.where(total > 0, total, 1)
    return mean


def share_right(margins: Tensor) -> Tensor:
    """Return 1 for each positive margin, and a half for each of 0, as at the start of training."""
    return (margins.sign() + 1) / 2


# ---- The losses on preferences by name, with their options


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
        ArgumentError: An unknown loss, an invalid value, or an option that the loss does not have.
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
            raise fail(ArgumentError, "loss", got=repr(self.loss), expected=f"one of {', '.join(LOSSES)}", do=do)
        for field in fields(self)[2:]:
            if getattr(self, field.name) != field.default and field.name not in self.kind.options:
                named = [name for name, kind in LOSSES.items() if field.name in kind.options]
                expected = f"no {field.name}: {' and '.join(named)} have it"
                got = f"{field.name} with the loss {self.loss}"
                raise fail(ArgumentError, field.name, got=got, expected=expected, do=f"remove `{field.name}`")
        if not self.strength > 0:
            expected = "a number above 0: with 0, the loss does not depend on the answers"
            do = f"remove it: the default of {self.loss} is {self.kind.beta}"
            raise fail(ArgumentError, "beta", got=repr(self.beta), expected=expected, do=do)
        if not 0 <= self.label_smoothing < 0.5:
            expected = "a number from 0 to below 0.5: at 0.5, the answers of a pair count the same"
            got, do = repr(self.label_smoothing), "for example 0.1"
            raise fail(ArgumentError, "label_smoothing", got=got, expected=expected, do=do)
        for name in ("desirable_weight", "undesirable_weight"):
            if not getattr(self, name) >= 0:
                got, do = repr(getattr(self, name)), "for example 1.0"
                raise fail(ArgumentError, name, got=got, expected="a number of at least 0", do=do)

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
                return hinge(chosen, rejected, beta=self.strength)
            case "ipo":
                return ipo(chosen, rejected, beta=self.strength)
            case "simpo":
                return simpo(chosen, rejected, beta=self.strength, gamma=self.gamma)
            case "orpo":
                return orpo(chosen, rejected, beta=self.strength)
            case _:
                return dpo(chosen, rejected, beta=self.strength, label_smoothing=self.label_smoothing)

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
        lost = kto(
            ratios,
            is_desirable,
            baseline,
            beta=self.strength,
            desirable=self.desirable_weight,
            undesirable=self.undesirable_weight,
        )
        return lost, {
            "accuracy": share_right(torch.where(is_desirable, 1, -1) * (ratios - baseline)),
            "baseline": baseline.expand_as(ratios),
        }
