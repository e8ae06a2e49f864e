"""Attributes training losses, samples and target tokens to the sources of a mixture.

The values are logged like those of a step, so that they are averaged over batches and processes, and saved in
checkpoints, in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from accmt.addons.mix.order import Array
from accmt.addons.mix.sources import MixedStream, Mixture
from accmt.addons.mix.sums import GroupedSum
from accmt.data import MicroBatch
from accmt.errors import ModuleContractError, fail
from accmt.messages import warn_once
from accmt.metrics.averages import Weight
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.state import Place

_ROUNDING = 0.01  # of a mean in bfloat16
_KINDS = GroupedSum.LOSS, GroupedSum.WEIGHT, GroupedSum.SAMPLES


class SourceLosses(Feature):
    """The loss, samples and target tokens of each source.

    A batch of one source has its loss. Otherwise the step returns the loss of each sample.

    Args:
        run: The run.
        data: The mixture.
    """

    name = "sources"

    def __init__(self, run: Run, data: Mixture | MixedStream) -> None:
        self._run = run
        self._data = data
        self._loss_name = run.settings.tracking.train_loss_metric_name
        self._sums = GroupedSum(data.names, self._find_sources)
        run.module.logs.of_training.attach(self._sums)
        self._counts: dict[str, dict[str, float]] = {
            name: {"samples_seen": 0, "target_tokens_seen": 0} for name in data.names
        }
        self._samples: Any = None  # the positions in the data of those in the current batch
        self._of_samples: Any = None
        self._is_compared = False

    @classmethod
    def for_run(cls, run: EvaluationRun) -> SourceLosses | None:
        if not isinstance(run, Run) or not isinstance(data := run.loaders.train_data, Mixture | MixedStream):
            return None
        return cls(run, data)

    @contextmanager
    def during(self) -> Iterator[None]:
        """Show the losses of sources on the progress bar, and tell the module that those of samples are used."""
        module = self._run.module
        module.logs.show(f"{self._loss_name}__{name}" for name in self._data.names)
        module.wants_sample_losses = True
        try:
            yield
        finally:
            module.wants_sample_losses = False

    def state_dict(self) -> dict[str, Any]:
        """Return the samples and target tokens of each source up to the last row; later ones are logged values."""
        return {name: dict(counts) for name, counts in self._counts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._counts |= {name: dict(counts) for name, counts in state.items() if name in self._counts}

    def before_batch(self, micro_batch: MicroBatch) -> None:
        """Note which samples a batch has; their sources are found for many batches at once."""
        self._of_samples = None
        self._samples = micro_batch.samples

    def after_forward(self, outputs: Any) -> None:
        if isinstance(outputs, Mapping) and "losses" in outputs:
            self._of_samples = outputs["losses"], outputs.get("weights")

    def after_batch(self, loss: torch.Tensor, weight: Weight, place: Place) -> None:
        """Note the loss of a batch, or of its samples."""
        samples = self._samples
        if samples is None or not len(samples):
            return
        if self._of_samples is None:
            self._sums.add(samples, loss, weight)
            return
        losses, weights = self._of_samples
        _require_each("losses", losses, len(samples))
        losses = losses.detach()
        if weights is not None:
            _require_each("weights", weights, len(samples))
            weight = weights.detach()
        if not self._is_compared:
            self._is_compared = True
            _compare(losses, weight, loss)
        self._sums.add(samples, losses, weight)

    def add_to_row(self, row: dict[str, float]) -> None:
        """Name the values of the sources, and replace numbers since the last row by those since the start."""
        is_unknown = row.pop(GroupedSum.UNKNOWN, 0) > 0
        for name, counts in self._counts.items():
            loss, weight, samples = (row.pop(kind + name, 0.0) for kind in _KINDS)
            counts["samples_seen"] += round(samples)
            counts["target_tokens_seen"] += _plain(weight) if self._run.weighting.is_explicit else 0
            row |= {f"{kind}__{name}": number for kind, number in counts.items() if number or kind == "samples_seen"}
            if weight and not is_unknown:
                row[f"{self._loss_name}__{name}"] = loss
        if is_unknown:
            warn_once(
                "the training loss of each source is not logged: a batch has samples of several sources, and "
                'training_step returns only their mean; return {"loss": losses.mean(), "losses": losses}, with one '
                "loss per sample",
                about="losses of sources",
            )

    def _find_sources(self, samples: Array) -> Array:
        data: Mixture | MixedStream = self._run.loaders.train_data  # which may be reloaded in each epoch
        return data.sources_of(samples)


def _plain(number: float) -> float:
    """Return a number as int if it is whole, as it is unless tokens have weights."""
    return int(number) if number.is_integer() else number


def _compare(losses: torch.Tensor, weights: Weight, loss: torch.Tensor) -> None:
    """Warn if the losses of samples do not average to the loss of their batch. Waits for the device."""
    each = torch.as_tensor(weights, device=losses.device).expand(losses.shape)
    mean = float(torch.where(each == 0, 0.0, losses * each).sum() / each.sum())
    if abs(mean - float(loss)) > _ROUNDING * abs(float(loss)):
        warn_once(
            f"the losses of samples average to {mean:.4g}, but the loss of their batch is {float(loss):.4g}: the "
            "losses of sources lack what is added to it, such as a penalty; or return the weights of the samples",
            about="losses of samples",
        )


def _require_each(what: str, values: Any, number: int) -> None:
    if isinstance(values, torch.Tensor) and values.shape == (number,):
        return
    shape = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
    expected = f"a tensor with one value for each of the {number} samples of the batch"
    do = 'return {"loss": losses.mean(), "losses": losses}, with "weights" if the loss is weighted'
    raise fail(ModuleContractError, "training_step", got=f'"{what}": {shape}', expected=expected, do=do)
