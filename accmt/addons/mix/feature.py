"""Attributes training losses, samples and target tokens to the sources of a mixture.

The values are logged like those of a step, so that they are averaged over batches and processes, and saved in
checkpoints, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from accmt.addons.mix.interleaving import Array
from accmt.addons.mix.sources import Mixture
from accmt.data import MicroBatch
from accmt.errors import ModuleContractError, explain
from accmt.features.hooks import Feature
from accmt.messages import warn_once
from accmt.metrics.averages import Weight
from accmt.run import EvaluationRun, Run
from accmt.state import Place

_UNKNOWN = "batches__unknown_source"
_SAMPLES, _TOKENS = "samples_seen__", "target_tokens_seen__"


class SourceLosses(Feature):
    """The loss, samples and target tokens of each source.

    A batch of one source has its loss. Otherwise the step returns the loss of each sample.

    Args:
        run: The run.
        data: The mixture.
    """

    name = "sources"

    def __init__(self, run: Run, data: Mixture) -> None:
        self._run = run
        self._data = data
        self._logged = run.module.logs.of_training
        loss = run.settings.tracking.train_loss_metric_name
        self._losses = [f"{loss}__{name}" for name in data.names]
        self._counts = {prefix: dict.fromkeys(data.names, 0) for prefix in (_SAMPLES, _TOKENS)}
        self._sources: Array | None = None  # of the samples of the current batch
        self._of_samples: Any = None

    @classmethod
    def for_run(cls, run: EvaluationRun) -> SourceLosses | None:
        if not isinstance(run, Run) or not isinstance(data := run.loaders.train_data, Mixture):
            return None
        return cls(run, data)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Show the losses of sources on the progress bar, and tell the module that those of samples are used."""
        module = self._run.module
        module.logs.show(self._losses)
        module.wants_sample_losses = True
        try:
            yield
        finally:
            module.wants_sample_losses = False

    def state_dict(self) -> dict[str, Any]:
        """Return the samples and target tokens of each source up to the last row; later ones are logged values."""
        return {prefix: dict(counts) for prefix, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts = {prefix: {**own, **state[prefix]} for prefix, own in self._counts.items()}

    def before_batch(self, micro_batch: MicroBatch) -> None:
        """Count the samples of a batch by their sources."""
        self._sources = self._of_samples = None
        if micro_batch.batch is None:
            return
        indices = self._run.train_loader.samples_in_batch(self._run.state.epoch, micro_batch)
        if indices is None:
            return
        self._sources = self._data.sources_of(indices)
        for name, number in zip(self._data.names, self._count(self._sources), strict=True):
            if number:
                self._logged.add_to_total(f"{_SAMPLES}{name}", number)

    def after_forward(self, outputs: Any) -> None:
        if isinstance(outputs, Mapping) and "losses" in outputs:
            self._of_samples = outputs["losses"], outputs.get("weights")

    def after_batch(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        """Attribute the loss of a batch to the sources of its samples."""
        sources = self._sources
        if sources is None or not len(sources):
            self._logged.add_to_total(_UNKNOWN, 1)
            return
        first = int(sources[0])
        if (sources == first).all():
            self._add(first, loss, weight)
        elif self._of_samples is None:
            self._logged.add_to_total(_UNKNOWN, 1)
        else:
            self._split(sources, weight)

    def _split(self, sources: Array, weight: Weight) -> None:
        """Attribute the losses of single samples; the mean of those of a source has the weight of its samples."""
        losses, weights = self._of_samples
        for what, values in (("losses", losses), ("weights", weights)):
            if values is not None and not (isinstance(values, torch.Tensor) and values.shape == (len(sources),)):
                got = (
                    f'"{what}": {f"shape {tuple(values.shape)}" if hasattr(values, "shape") else type(values).__name__}'
                )
                expected = f"a tensor with one value for each of the {len(sources)} samples of the batch"
                do = 'return {"loss": losses.mean(), "losses": losses}, with "weights" if the loss is weighted'
                raise ModuleContractError(explain("training_step", got, expected, do))
        losses = losses.detach()
        kind = torch.float32 if losses.device.type == "mps" else torch.float64
        each = torch.as_tensor(weight, dtype=kind, device=losses.device) / len(sources)
        weights = each.expand(len(sources)) if weights is None else weights.detach().to(losses.device, kind)
        products = torch.where(weights == 0, 0.0, losses.to(kind) * weights)  # without targets, a loss may be NaN
        numbers = torch.from_numpy(sources).to(losses.device)
        sums = torch.zeros(2, len(self._losses), dtype=kind, device=losses.device)
        sums.index_add_(1, numbers, torch.stack([products, weights]))
        means, of_sources = (sums[0] / sums[1]).unbind(), sums[1].unbind()
        for number, count in enumerate(self._count(sources)):
            if count:
                self._add(number, means[number], of_sources[number])

    def _add(self, number: int, loss: torch.Tensor, weight: Weight) -> None:
        self._logged.add_weighted(self._losses[number], loss, weight)
        if self._run.weighting.is_explicit:
            self._logged.add_to_total(f"{_TOKENS}{self._data.names[number]}", weight)

    def _count(self, sources: Array) -> list[int]:
        counts: list[int] = np.bincount(sources, minlength=len(self._losses)).tolist()
        return counts

    def add_to_row(self, row: dict[str, float]) -> None:
        """Replace the numbers since the last row by those since the start of the run."""
        for prefix, counts in self._counts.items():
            for name in counts:
                counts[name] += round(row.pop(f"{prefix}{name}", 0))
            row |= {f"{prefix}{name}": number for name, number in counts.items()} if any(counts.values()) else {}
        if row.pop(_UNKNOWN, 0):
            for name in self._losses:
                row.pop(name, None)
            warn_once(
                "the training loss of each source is not logged: a batch has samples of several sources, and "
                'training_step returns only their mean; return {"loss": losses.mean(), "losses": losses}, with one '
                "loss per sample",
                about="losses of sources",
            )
