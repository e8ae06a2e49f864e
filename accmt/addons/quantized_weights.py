"""Quantized weights stay as they were loaded."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from accmt.engine.quantized import keeping_quantized_weights, repacks_weights
from accmt.run import EvaluationRun
from accmt.run.features import Feature


class QuantizedWeights(Feature):
    """Keeps layers of bitsandbytes from repacking their weights in an evaluation."""

    name = "quantized_weights"

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @classmethod
    def for_run(cls, run: EvaluationRun) -> QuantizedWeights | None:
        return cls(run.unwrapped_model) if any(map(repacks_weights, run.unwrapped_model.modules())) else None

    def during(self) -> AbstractContextManager[None]:
        return keeping_quantized_weights(self._model)
