"""The results of KTO over a whole validation set, whose baseline is a mean over all of its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accmt.addons.prefer.losses import weighted_mean
from accmt.addons.prefer.objectives import Objective
from accmt.metrics import Metric

_NAME = "kto"


class KTOResults(Metric):
    """The loss and the metrics of all answers in a set; the validation step returns what they depend on.

    Args:
        objective: The loss and its options.
        loss_name: The name of the loss in the results.
    """

    def __init__(self, objective: Objective, loss_name: str) -> None:
        super().__init__(_NAME, main_metric="accuracy")
        self._objective = objective
        self._loss_name = loss_name

    @staticmethod
    def rows_of(own: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], is_desirable: Tensor) -> dict[str, Any]:
        """Return the entry of the validation step.

        Args:
            own: The log-ratios of the answers, and their weights `[samples]`.
            others: The same for the answers to other prompts.
            is_desirable: 1 for desirable answers, else 0 `[samples]`.
        """
        ratios = {"own": own[0], "others": others[0]}
        return {_NAME: (ratios, {"own": own[1], "others": others[1], "is_desirable": is_desirable})}

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return the results, in double precision; without rows that count, they are NaN, and there is no loss."""
        ratios, others = predictions["own"].double(), predictions["others"].double()
        is_desirable, weights = references["is_desirable"] > 0, references["own"].double()
        mean = weighted_mean(others, references["others"].double())
        lost, values = self._objective.score_answers(ratios, is_desirable, mean)
        rewards = self._objective.strength * ratios
        found = {
            **{name: _mean(one, weights) for name, one in values.items()},
            "reward_desirable": _mean(rewards, weights * is_desirable),
            "reward_undesirable": _mean(rewards, weights * ~is_desirable),
        }
        found["margin"] = found["reward_desirable"] - found["reward_undesirable"]
        return found | ({self._loss_name: _mean(lost, weights)} if weights.any() else {})


def _mean(values: Tensor, weights: Tensor) -> float:
    """Return a weighted mean, NaN if all weights are 0."""
    return float(weighted_mean(values, weights)) if weights.any() else torch.nan
