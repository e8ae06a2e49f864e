"""Averages of the weights, which are evaluated and saved instead of the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from accmt.callbacks.callback import Callback
from accmt.errors import ArgumentError, fail
from accmt.options.checks import is_number
from accmt.precisions import HALVES
from accmt.sharded_tensors import by_mesh, shard_like


class WeightAverage(Callback):
    """Averages all weights that are or were trainable; evaluations, and the models they save, use the average.

    Attributes:
        average: The average of each weight by name; set in `on_fit_start`.
        num_averaged: The number of optimizer steps in the average.
    """

    brings_feature = "averages_of_weights"
    order = math.inf  # the training weights are restored only after the model is saved

    def __init__(self) -> None:
        self.num_averaged = 0
        self.average: dict[str, Tensor] = {}
        self._trained: dict[str, Tensor] = {}

    @property
    def is_in_place(self) -> bool:
        """Whether the model currently holds the average."""
        return bool(self._trained)

    def on_fit_start(self) -> None:
        self._trained = {}
        if not self.state.global_step:  # a new run of the same callback; a resumed one continues its average
            self.average = {}
        if not self.average:
            self.num_averaged = 0
        average: dict[str, Tensor] = {}
        for name, weight in self._weights().items():
            if name in self.average:
                average[name] = shard_like(self.average[name].to(weight.device), weight)
            else:
                average[name] = _start(weight)
        self.average = average

    def on_update_end(self) -> None:
        if not self._is_due():
            return
        weights = self._weights()
        for name in weights.keys() - self.average.keys():  # unfrozen since
            self.average[name] = _start(weights[name])
        self.num_averaged += 1
        averages, current = [], []
        for name, trained in weights.items():
            averages.append(self.average[name])
            current.append(trained.to(self.average[name].dtype))
        for average, weight in by_mesh(averages, current):
            self._update(average, weight)

    def on_evaluation_start(self) -> None:
        weights = self._weights()
        self._trained = {name: weight.clone() for name, weight in weights.items()}
        copy_into(self.average, weights)

    def on_evaluation_end(self) -> None:
        self._restore_trained()

    def on_fit_end(self) -> None:
        self._restore_trained()  # in case an evaluation was interrupted

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps in it."""
        return {"average": dict(self.average), "num_averaged": self.num_averaged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average."""
        self.average = dict(state["average"])
        self.num_averaged = state["num_averaged"]

    def _is_due(self) -> bool:
        """Return whether the last step changed the weights; a skipped step does not."""
        return bool(self.trainer.run.snapshot.made_step)

    def _update(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        """Move averages towards weights; `num_averaged` already includes them."""
        raise NotImplementedError

    def _weights(self) -> dict[str, Tensor]:
        model: nn.Module = self.module.unwrapped_model
        named = model.named_parameters()
        return {name: weight.detach() for name, weight in named if weight.requires_grad or name in self.average}

    def _restore_trained(self) -> None:
        copy_into(self._trained, self._weights())
        self._trained = {}


class EMA(WeightAverage):
    """Keeps an exponential moving average of the weights; evaluations, and the models they save, use it.

    After each step, `average = decay * average + (1 - decay) * weight` for every weight that is or was trainable. The
    average of a layer that is unfrozen during the run starts from its weights at that moment. Training itself uses the
    unaveraged weights. Checkpoints contain the average. For 16-bit weights the average is float32. Every process keeps
    a full copy.

    Args:
        decay: The decay rate, above 0 and below 1: the average covers about the last 1 / (1 - decay) steps.
        warmup: Whether the decay increases to `decay`: after n steps it is at most (1 + n) / (10 + n). Without warmup,
            the average of a run that is not much longer than 1 / (1 - decay) steps is mostly the initial weights.

    Raises:
        ArgumentError: `decay` is invalid, or `warmup` is not a boolean.

    Attributes:
        average: The average of each weight by name; set in `on_fit_start`.
        num_averaged: The number of optimizer steps in the average.

    Source:
        https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage (`num_updates`)
    """

    def __init__(self, decay: float = 0.9999, *, warmup: bool = True) -> None:
        if not is_number(decay) or not 0 < decay < 1:
            expected, do = "a number between 0 and 1", "EMA(decay=0.999)"
            raise fail(ArgumentError, "EMA(decay=...)", got=repr(decay), expected=expected, do=do)
        if not isinstance(warmup, bool):  # a number of steps, as in other libraries
            raise fail(
                ArgumentError, "EMA(warmup=...)", got=repr(warmup), expected="True or False", do="EMA(warmup=False)"
            )
        self.decay = float(decay)
        self.warmup = warmup
        super().__init__()

    def _update(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        decay = self.decay
        if self.warmup:
            decay = min(decay, (1 + self.num_averaged) / (10 + self.num_averaged))
        update = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        update(averages, weights, self.num_averaged)


@contextmanager
def using_average(callbacks: Iterable[Callback]) -> Iterator[None]:
    """Put the average into the model, if the run keeps one, as evaluations during training do."""
    averages = [callback for callback in callbacks if isinstance(callback, WeightAverage) and not callback.is_in_place]
    with torch.no_grad():
        for average in averages:
            average.on_evaluation_start()
    try:
        yield
    finally:
        for average in reversed(averages):
            average.on_evaluation_end()


def _start(weight: Tensor) -> Tensor:
    """Return the initial average of a weight; in 16 bits, updates with a decay of 0.9999 would be rounded away."""
    if weight.dtype in HALVES:
        return weight.float()
    return weight.clone()


def copy_into(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        if name in target:
            target[name].copy_(tensor)
