"""Says when `torch.compile` makes a graph, and for which batch; lets it make few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from accmt.callbacks.base import Callback
from accmt.libraries.private_names import count_graphs, mark_rows_dynamic
from accmt.messages import say


class Graphs(Callback):
    """Names each graph of a model that is compiled for buckets of lengths, with the batch that needed it.

    The compiler is told that the number of samples varies and the length does not, so that it makes a graph for each
    length, not for each batch. It takes one sample alone for another case than several.

    Attributes:
        number: Graphs made in this run.
    """

    order = -1e6  # hooks of others may look at the batch, but the marks come first

    def __init__(self) -> None:
        self.number = self._before = 0

    def on_before_training_step(self, batch: Any) -> None:
        self._begin(batch)

    def on_after_training_step(self, batch: Any) -> None:
        self._note(batch)

    def on_before_validation_step(self, batch: Any) -> None:
        self._begin(batch)

    def on_after_validation_step(self, batch: Any) -> None:
        self._note(batch)

    def on_fit_end(self) -> None:
        say(f"torch.compile made {self.number} graphs")

    def _begin(self, batch: Any) -> None:
        self._before = count_graphs()
        mark_rows_dynamic([value for value in _tensors(batch) if value.ndim])

    def _note(self, batch: Any) -> None:
        made = count_graphs() - self._before
        if made:
            self.number += made
            shapes = {" x ".join(map(str, value.shape)): None for value in _tensors(batch)}
            step = self.state.global_step + 1
            say(f"torch.compile: graph {self.number}, at step {step}, for a batch of {', '.join(shapes)}")


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch]
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]
