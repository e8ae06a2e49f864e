"""Predictions for whole datasets: one per sample, in the order of the data, on any number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch

from accmt.data import MicroBatch, first_dimension
from accmt.errors import ModuleContractError, fail
from accmt.loop.evaluation import SetPass, without_training
from accmt.metrics.gathering import Position, gather_on_main_process, order_parts, put_in_order, to_cpu
from accmt.module import defines
from accmt.processes import is_main_process
from accmt.run import EvaluationRun

_KEEP_SAMPLES = "keep the sample dimension, for example with squeeze(-1) instead of squeeze(), or return a list"
_Placed = tuple[Position, Any]  # positions of samples in the data, and their predictions


def predict(run: EvaluationRun, *, keeps: bool) -> dict[str, Any]:
    """Run the step over all sets.

    Processes: collective after each set, and in a micro-batch that does not reach all of them.

    Args:
        run: The run; its `validation_step` is the user's `predict_step`.
        keeps: Whether to keep predictions.

    Returns:
        The predictions of each set by its key, on the CPU; None on all processes except the main one, or if not kept.
    """
    run.engine.share_buffers()
    predictions: dict[str, Any] = {}
    with without_training(run, "predict"):
        for key, loader in run.val_loaders.items():
            prediction = _SetPrediction(run, key, keeps=keeps)
            run.state.begin_evaluation()
            prediction.take_all(loader)
            predictions[key] = None
            if not keeps:
                continue
            chunk_bytes = run.settings.evaluation.metric_options.chunk_bytes
            of_processes = gather_on_main_process(prediction.outputs, chunk_bytes)
            if is_main_process():
                # Without sharding, the data of each process stays together.
                parts, order = order_parts(of_processes, are_shared=run.settings.data.data_options.shard)
                predictions[key] = put_in_order(_join([part for _, part in parts]), order)
    return predictions


class _SetPrediction(SetPass):
    """The prediction of one set.

    Attributes:
        outputs: The predictions of this process's batches, with the positions of their samples in the data.
    """

    def __init__(self, run: EvaluationRun, key: str, *, keeps: bool) -> None:
        super().__init__(run, key, "predict")
        self._keeps = keeps
        self.outputs: list[_Placed] = []

    def forward(self, batch: Any) -> Any:
        """Return the predictions of a batch."""
        try:
            return super().forward(batch)
        except (TypeError, AttributeError, ValueError) as error:
            if isinstance(batch, torch.Tensor) or defines(self._run.module, "predict_step"):
                raise
            got = f"a batch of type {type(batch).__name__}, which the model does not accept: {error}"
            expected = "a predict_step(self, batch) that passes the right part of the batch to the model"
            call = "self.model(**batch).logits" if isinstance(batch, Mapping) else "self.model(batch[0])"
            do = f"for example, def predict_step(self, batch): return {call}"
            raise fail(
                ModuleContractError, type(self._run.module).__name__, got=got, expected=expected, do=do
            ) from error

    def take(self, micro_batch: MicroBatch, batch: Any, output: Any) -> _Placed | None:
        """Return the predictions to keep."""
        if not self._keeps:
            return None
        run, count = self._run, _count_predictions("predictions", output)
        if micro_batch.places is not None and count != len(micro_batch.places):
            got = f"{count} predictions for {len(micro_batch.places)} samples, which max_tokens has grouped by length"
            _reject(got, "return one per sample, so that the order of the data can be restored; or remove max_tokens")
        num_samples, collated = None, micro_batch.own_samples
        if run.counts_own_samples:
            num_samples = run.module.get_batch_size(batch)
        if collated is None:
            collated = first_dimension(batch)
        if num_samples is None:
            num_samples = collated
        if count not in (num_samples, collated) and num_samples is not None:
            _reject(f"{count} predictions for a batch of {num_samples} samples", _KEEP_SAMPLES)
        return micro_batch.places or micro_batch.index, output

    def after_batch(self, taken: _Placed | None) -> None:
        """Keep predictions on the CPU: as normal tensors, since this is outside of inference mode."""
        if taken is not None:
            self.outputs.append((taken[0], to_cpu(taken[1])))


def _count_predictions(what: str, output: Any) -> int:
    """Return the number of predicted samples.

    Raises:
        ModuleContractError: There is not one prediction per sample.
    """
    parts: Iterable[tuple[Any, Any]] = ()
    match output:
        case torch.Tensor() | np.ndarray():
            if output.ndim > 0:
                return len(output)
            if what == "predictions":
                _reject(_describe(what, output), _KEEP_SAMPLES)
        case list():
            return len(output)
        case Mapping():
            parts = output.items()
        case tuple():
            parts = enumerate(output)
    counts: dict[str, int] = {}
    for name, part in parts:
        path = f"{what}[{name!r}]"
        counts[path] = _count_predictions(path, part)
    if not counts:
        _reject(_describe(what, output))
    if len(set(counts.values())) > 1:
        _reject(f"different numbers of samples in one batch: {counts}")
    return next(iter(counts.values()))


def _describe(what: str, output: Any) -> str:
    return f"{what}: {type(output).__name__} {output!r:.80}"


def _reject(got: str, do: str = "for example, return the logits without the loss") -> NoReturn:
    expected = "one prediction per sample: a tensor [samples, ...], a list, or a dict or tuple of these"
    raise fail(ModuleContractError, "predict_step", got=got, expected=expected, do=do)


def _join(parts: list[Any]) -> Any:
    """Join batches; tensors whose samples have different shapes become a list of samples."""
    if parts and all(isinstance(part, Mapping) for part in parts):
        return {name: _join([part[name] for part in parts]) for name in parts[0]}
    if parts and all(isinstance(part, tuple) for part in parts):
        return tuple(_join(list(column)) for column in zip(*parts, strict=True))
    are_tensors = parts and all(isinstance(part, torch.Tensor) for part in parts)
    if are_tensors and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)
    return [sample for part in parts for sample in part]
