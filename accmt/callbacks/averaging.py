"""Averages of the weights, which are evaluated and saved in the place of the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from accmt.callbacks.base import Callback
from accmt.errors import ArgumentError, explain
from accmt.libraries.private_names import approach_
from accmt.messages import warn
from accmt.precision import HALVES
from accmt.sharded_tensors import by_mesh, shard_like


class WeightAverage(Callback):
    """An average of the weights that are trained, or were; evaluations, and the models saved by them, use it.

    Attributes:
        average: The average by the weight's name, from `on_fit_start` on.
        num_averaged: Updates that are in it.
    """

    order = math.inf  # after the model was saved, and only then, training's weights come back

    def __init__(self) -> None:
        self.num_averaged = 0
        self.average: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}

    @property
    def is_in_place(self) -> bool:
        """Whether the model has the average at this moment."""
        return bool(self._trained)

    def on_fit_start(self) -> None:
        self._trained = {}
        self.average = self.average if self.state.global_step else {}
        self.num_averaged = self.num_averaged if self.average else 0
        self.average = {name: _like(self.average.get(name), weight) for name, weight in self._weights().items()}

    def on_update_end(self) -> None:
        if not self._is_due():
            return
        weights = self._weights()
        for name in weights.keys() - self.average.keys():  # unfrozen since
            self.average[name] = _start(weights[name])
        self.num_averaged += 1
        averages = [self.average[name] for name in weights]
        current = [weights[name].to(self.average[name].dtype) for name in weights]
        for average, weight in by_mesh(averages, current):
            self._update(average, weight)

    def on_evaluation_start(self) -> None:
        weights = self._weights()
        self._trained = {name: weight.clone() for name, weight in weights.items()}
        _copy(self.average, weights)

    def on_evaluation_end(self) -> None:
        self._give_back()

    def on_fit_end(self) -> None:
        self._give_back()  # where an evaluation was interrupted

    def state_dict(self) -> dict[str, Any]:
        """Return the average, and how many steps are in it."""
        return {"average": dict(self.average), "num_averaged": self.num_averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average."""
        self.average = dict(state["average"])
        self.num_averaged = state["num_averaged"]

    def _is_due(self) -> bool:
        """Return whether the weights have changed, so that they enter the average: a skipped step changes nothing."""
        return bool(self.trainer.run.snapshot.made_step)

    def _update(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        """Move averages towards weights; `num_averaged` counts these already."""
        raise NotImplementedError

    def _weights(self) -> dict[str, Tensor]:
        model: nn.Module = self.module.unwrapped_model
        named = model.named_parameters()
        return {name: weight.detach() for name, weight in named if weight.requires_grad or name in self.average}

    def _give_back(self) -> None:
        _copy(self._trained, self._weights())
        self._trained = {}


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights; evaluations, and the models saved by them, use it.

    After each step `average = decay * average + (1 - decay) * weight`, for every weight that is trained, or was: that
    of a layer which is unfrozen during the run begins as the weight is then. Training continues with the weights
    themselves. The average is in the checkpoints; that of weights in 16 bits is float32. Every process keeps the whole
    of it.

    Args:
        decay: How much of the average stays, above 0 and below 1: it looks back about 1 / (1 - decay) steps.
        warmup: Whether the decay rises to `decay`: after n steps it is at most (1 + n) / (10 + n). Without that the
            average of a run shorter than some times 1 / (1 - decay) steps is mostly the weights it began with.

    Raises:
        ArgumentError: No such decay, or `warmup` is no boolean.

    Attributes:
        average: The average by the weight's name, from `on_fit_start` on.
        num_averaged: Updates that are in it.

    Source:
        https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage (`num_updates`)
    """

    def __init__(self, decay: float = 0.9999, *, warmup: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 < decay < 1:
            raise ArgumentError(explain("EMA(decay=...)", repr(decay), "a number between 0 and 1", "EMA(decay=0.999)"))
        if not isinstance(warmup, bool):
            raise ArgumentError(explain("EMA(warmup=...)", repr(warmup), "True or False", "EMA(warmup=False)"))
        self.decay = float(decay)
        self.warmup = warmup
        super().__init__()

    def _update(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        approach_(averages, weights, 1 - self._decay_now())

    def _decay_now(self) -> float:
        warm = (1 + self.num_averaged) / (10 + self.num_averaged)
        return min(self.decay, warm) if self.warmup else self.decay


class SWA(WeightAverage):
    """Stochastic weight averaging: the mean of the weights of several epochs; evaluations and saved models use it.

    From `start` on, the weights at the end of each epoch enter the mean, each alike. The mean is evaluated and saved in
    place of the weights that are trained, with which training continues; before `start` these are evaluated. A learning
    rate that stays high, constant or cyclic, gives weights that differ, which is what makes their mean better.

    Batch norm has running statistics of the trained weights, not of their mean. They are computed again for each mean,
    as `torch.optim.swa_utils.update_bn` does: one pass over the training data before an evaluation, without gradients.
    A layer in evaluation mode keeps its own.

    Args:
        start: A part of the run, such as 0.75, or the epoch (a whole number, from 0) from which weights are averaged.
        every: Optimizer steps from one set of weights to the next; None is one at the end of each epoch.
        update_bn: False leaves batch norm the statistics of training.

    Raises:
        ArgumentError: No such start or distance; or statistics of batch norm that cannot be computed again: of a
            sharded model, from streams, or with manual optimization.

    Source:
        Izmailov et al. 2018, Averaging Weights Leads to Wider Optima (https://arxiv.org/abs/1803.05407)
    """

    def __init__(self, start: float | int = 0.75, *, every: int | None = None, update_bn: bool = True) -> None:
        is_part = isinstance(start, float) and 0 <= start < 1
        if isinstance(start, bool) or not (is_part or isinstance(start, int) and start >= 0):
            expected = "a part of the run from 0.0, below 1.0, or an epoch from 0"
            raise ArgumentError(explain("SWA(start=...)", repr(start), expected, "SWA(start=0.75)"))
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ArgumentError(explain("SWA(every=...)", repr(every), "optimizer steps from 1, or None", "every=100"))
        if not isinstance(update_bn, bool):
            raise ArgumentError(explain("SWA(update_bn=...)", repr(update_bn), "True or False", "SWA(update_bn=False)"))
        super().__init__()
        self.start = start
        self.every = every
        self.update_bn = update_bn
        self._layers: list[str] = []
        self._statistics: dict[str, Tensor] = {}
        self._num_in_statistics = 0
        self._statistics_of_training: dict[str, Tensor] = {}

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._statistics_of_training = {}
        if isinstance(self.start, float) and self.trainer.run.total_steps is None:
            got, do = f"{self.start} of a run whose length is unknown", "SWA(start=10), an epoch, or set max_steps"
            raise ArgumentError(explain("SWA(start=...)", got, "a run whose length is known", do))
        if not self.num_averaged:
            self._layers, self._statistics, self._num_in_statistics = [], {}, 0
        if self.update_bn:
            self.trainer.run.batch_norm.require_renewable("SWA(update_bn=False) keeps those of the trained weights")

    def on_update_end(self) -> None:
        if self.update_bn and self._is_due():
            self._layers = self.trainer.run.batch_norm.layers()
        super().on_update_end()

    def on_evaluation_start(self) -> None:
        if not self.num_averaged:
            return
        super().on_evaluation_start()
        if not self._layers:
            return
        statistics = self.trainer.run.batch_norm
        buffers = statistics.buffers(self._layers)
        self._statistics_of_training = {name: buffer.clone() for name, buffer in buffers.items()}
        if self._num_in_statistics != self.num_averaged and self.state.fn == "fit":
            statistics.renew(self._layers)
            self._statistics = {name: buffer.clone() for name, buffer in buffers.items()}
            self._num_in_statistics = self.num_averaged
        _copy(self._statistics, buffers)

    def on_fit_end(self) -> None:
        super().on_fit_end()
        if not self.num_averaged and self.state.finished:
            warn(f"SWA averaged nothing: the run ended before start={self.start}")

    def state_dict(self) -> dict[str, Any]:
        """Return the average and its statistics of batch norm."""
        own = {"layers": list(self._layers), "in_statistics": self._num_in_statistics}
        return {**super().state_dict(), **own, "statistics": dict(self._statistics)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average and its statistics of batch norm."""
        super().load_state_dict(state)
        self._layers, self._num_in_statistics = list(state["layers"]), state["in_statistics"]
        self._statistics = dict(state["statistics"])

    def _is_due(self) -> bool:
        run, state = self.trainer.run, self.state
        if isinstance(self.start, float):
            has_begun = state.global_step >= self.start * run.total_steps
        else:
            has_begun = state.epoch >= self.start
        if self.every is None:
            return has_begun and state.is_last_training_batch
        return has_begun and super()._is_due() and state.global_step % self.every == 0

    def _update(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        average = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        average(averages, weights, self.num_averaged - 1)

    def _give_back(self) -> None:
        super()._give_back()
        if self._statistics_of_training:
            _copy(self._statistics_of_training, self.trainer.run.batch_norm.buffers(self._layers))
            self._statistics_of_training = {}


@contextmanager
def using_average(callbacks: Iterable[Callback]) -> Iterator[None]:
    """Let the model have the average of its weights, where the run keeps one, as evaluations in training do."""
    averages = [callback for callback in callbacks if isinstance(callback, WeightAverage) and not callback.is_in_place]
    with torch.no_grad():
        for average in averages:
            average.on_evaluation_start()
    try:
        yield
    finally:
        for average in reversed(averages):
            average.on_evaluation_end()


def _like(kept: Tensor | None, weight: Tensor) -> Tensor:
    return _start(weight) if kept is None else shard_like(kept.to(weight.device), weight)


def _start(weight: Tensor) -> Tensor:
    """Return an average that begins as a weight; in 16 bits what a decay of 0.9999 adds would be rounded away."""
    return weight.float() if weight.dtype in HALVES else weight.clone()


def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        if name in target:
            target[name].copy_(tensor)
