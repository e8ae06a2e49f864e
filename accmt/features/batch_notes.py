"""What is wrong with a batch for a transformers model, as a note of the error that it causes, or as a warning."""

from __future__ import annotations

from typing import Any

from torch import nn

from accmt.features.hooks import Feature
from accmt.huggingface.batch_faults import add_note_of_batch, warn_of_trained_padding
from accmt.huggingface.loss_targets import hint_at_weights
from accmt.run import EvaluationRun


class BatchNotes(Feature):
    """Looks at the first batch of a run, and at one whose step fails."""

    name = "batch_notes"

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @classmethod
    def for_run(cls, run: EvaluationRun) -> BatchNotes:
        return cls(run.unwrapped_model)

    def on_step_error(self, error: Exception, batch: Any) -> None:
        add_note_of_batch(error, self._model, batch)

    def on_first_batch(self, batch: Any, *, is_hint_wanted: bool) -> None:
        warn_of_trained_padding(self._model, batch)
        if is_hint_wanted:
            hint_at_weights(batch)
