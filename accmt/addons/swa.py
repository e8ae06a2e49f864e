"""Stochastic weight averaging, and batch norm statistics for averaged weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn, update_bn

from accmt.addons.averaging import WeightAverage, copy_into
from accmt.data import derive_seed, seed_generators
from accmt.data.planned import PlannedSource
from accmt.engine.sync_batchnorm import is_batch_norm
from accmt.errors import ArgumentError, fail
from accmt.loop.evaluation import in_evaluation_mode
from accmt.loop.logging import SilentLogs
from accmt.messages import warn
from accmt.precisions import autocast
from accmt.processes import data_index, num_data_processes, sum_over_data
from accmt.run import Run

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class SWA(WeightAverage):
    """Stochastic weight averaging: the mean of the weights of several epochs; evaluations and saved models use it.

    From `start` on, the weights at the end of each epoch are added to the mean with equal weight. The mean is evaluated
    and saved instead of the trained weights, with which training continues; before `start`, the trained weights are
    evaluated. Use a learning rate that stays high, constant or cyclic, so that the averaged weights differ.

    The running statistics of batch norm belong to the trained weights, not to their mean. They are recomputed for each
    mean as in `torch.optim.swa_utils.update_bn`: one pass over the training data before an evaluation, without
    gradients. Layers in evaluation mode keep their statistics.

    Args:
        start: The fraction of the run, such as 0.75, or the epoch (an integer, from 0) at which averaging starts.
        every: The number of optimizer steps between averaged weights; None averages at the end of each epoch.
        update_bn: False keeps the batch norm statistics of training.

    Raises:
        ArgumentError: `start` or `every` is invalid, or batch norm statistics cannot be recomputed: for a sharded
            model, for streams, or with manual optimization.

    Source:
        Izmailov et al. 2018, Averaging Weights Leads to Wider Optima (https://arxiv.org/abs/1803.05407)
    """

    def __init__(self, start: float | int = 0.75, *, every: int | None = None, update_bn: bool = True) -> None:
        is_part = isinstance(start, float) and 0 <= start < 1
        if isinstance(start, bool) or not (is_part or isinstance(start, int) and start >= 0):
            expected = "a fraction of the run (0.0 <= start < 1.0), or an epoch from 0"
            raise fail(ArgumentError, "SWA(start=...)", got=repr(start), expected=expected, do="SWA(start=0.75)")
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise fail(
                ArgumentError,
                "SWA(every=...)",
                got=repr(every),
                expected="a number of optimizer steps from 1, or None",
                do="every=100",
            )
        if not isinstance(update_bn, bool):
            raise fail(
                ArgumentError,
                "SWA(update_bn=...)",
                got=repr(update_bn),
                expected="True or False",
                do="SWA(update_bn=False)",
            )
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
            got, do = (
                f"the fraction {self.start}, but the length of the run is unknown",
                "pass an epoch, such as SWA(start=10), or set max_steps",
            )
            raise fail(ArgumentError, "SWA(start=...)", got=got, expected="a run whose length is known", do=do)
        if not self.num_averaged:
            self._layers, self._statistics, self._num_in_statistics = [], {}, 0
        if self.update_bn:
            BatchNormStatistics(self.trainer.run).require_renewable(
                "SWA(update_bn=False) keeps the statistics of the trained weights"
            )

    def on_update_end(self) -> None:
        if self.update_bn and self._is_due():
            self._layers = BatchNormStatistics(self.trainer.run).layers()
        super().on_update_end()

    def on_evaluation_start(self) -> None:
        if not self.num_averaged:
            return
        super().on_evaluation_start()
        if not self._layers:
            return
        statistics = BatchNormStatistics(self.trainer.run)
        buffers = statistics.buffers(self._layers)
        self._statistics_of_training = {name: buffer.clone() for name, buffer in buffers.items()}
        if self._num_in_statistics != self.num_averaged and self.state.fn == "fit":
            statistics.renew(self._layers)
            self._statistics = {name: buffer.clone() for name, buffer in buffers.items()}
            self._num_in_statistics = self.num_averaged
        copy_into(self._statistics, buffers)

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
            has_begun = state.global_step >= self.start * (run.total_steps or math.inf)
        else:
            has_begun = state.epoch >= self.start
        if self.every is None:
            return has_begun and state.is_last_training_batch
        return has_begun and super()._is_due() and state.global_step % self.every == 0

    def _update(self, averages: list[Tensor], weights: list[Tensor]) -> None:
        average = get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
        average(averages, weights, self.num_averaged - 1)

    def _restore_trained(self) -> None:
        super()._restore_trained()
        if self._statistics_of_training:
            copy_into(self._statistics_of_training, BatchNormStatistics(self.trainer.run).buffers(self._layers))
            self._statistics_of_training = {}


class BatchNormStatistics:
    """The running statistics of the model's batch norm layers."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def layers(self) -> list[str]:
        """Return the names of the layers that keep statistics and are in training mode."""
        layers = self._run.unwrapped_model.named_modules()
        return [name for name, layer in layers if is_batch_norm(layer) and layer.training and _has_statistics(layer)]

    def buffers(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the running statistics of the layers, by name."""
        found = {name: self._run.unwrapped_model.get_submodule(name) for name in layers}
        return {f"{name}.{of}": getattr(layer, of) for name, layer in found.items() for of in _STATISTICS}

    def require_renewable(self, do: str) -> None:
        """Check that statistics can be computed by a pass over the training data.

        Raises:
            ArgumentError: Such a pass would change state, or would need all processes.
        """
        run = self._run
        if not any(is_batch_norm(layer) for layer in run.unwrapped_model.modules()):
            return
        unsupported = {
            "a sharded model": run.engine.needs_all,
            "manual optimization": run.module.uses_manual_optimization,
            "a stream as training data": not isinstance(run.train_loader.source, PlannedSource),
        }
        for got, is_there in unsupported.items():
            if is_there:
                expected = "a model and data for which they can be recomputed"
                raise fail(ArgumentError, "batch norm statistics", got=got, expected=expected, do=do)

    def renew(self, layers: Sequence[str]) -> None:
        """Recompute the statistics of some layers for the current weights, as means over the batches of an epoch.

        Nothing is counted or logged, and no hooks are called.

        Processes: collective; the mean is over the batches of all processes.
        """
        run = self._run
        model, module, logs, stage = run.unwrapped_model, run.module, run.module.logs, run.state.now.stage
        every = [name for name, layer in model.named_modules() if is_batch_norm(layer) and _has_statistics(layer)]
        others = [name for name in every if name not in layers]
        kept = {name: buffer.clone() for name, buffer in self.buffers(others).items()}
        loader = run.loaders.build_train_again()
        module.logs, run.state.now.stage = SilentLogs(module.trainer), "train"
        try:
            with (
                in_evaluation_mode(model),  # restores the modes
                run.engine.unwrapped(trains=True),
                autocast(run.accelerator),
            ):
                update_bn(_batches(run, loader), _Step(run))
        finally:
            module.logs, run.state.now.stage = logs, stage
            logs.of_training.drop_batch()
            loader.source.end_workers()
            run.train_loader.source.set_epoch_again()
        if num_data_processes() > 1:
            _average(self.buffers(layers), layers)
        for name, buffer in self.buffers(others).items():
            buffer.copy_(kept[name])


def _has_statistics(layer: Any) -> bool:
    return layer.running_mean is not None


class _Step(nn.Module):
    """A model whose forward is the training step."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.model = run.unwrapped_model
        self._step = run.training_step

    def forward(self, batch: Any) -> None:
        self._step(batch)


def _batches(run: Run, loader: Any) -> Iterator[tuple[Any]]:
    epoch = run.state.epoch
    for micro_batch in loader.micro_batches(epoch):
        if micro_batch.batch is not None:
            seed_generators(derive_seed(run.seed, "batch norm", epoch, micro_batch.index, data_index()), run.device)
            yield (run.place(micro_batch.batch),)  # `update_bn` uses the first entry of a tuple


def _average(buffers: dict[str, Tensor], layers: Sequence[str]) -> None:
    """Replace statistics by their mean over the batches of all processes."""
    for name in layers:
        number = int(buffers[f"{name}.num_batches_tracked"])
        total = sum_over_data([float(number)])[0]
        for of in ("running_mean", "running_var"):
            buffer = buffers[f"{name}.{of}"]
            sums = sum_over_data((buffer.double().flatten() * number).tolist())
            buffer.copy_(torch.tensor(sums, dtype=torch.float64).div(total).reshape(buffer.shape))
        buffers[f"{name}.num_batches_tracked"].fill_(int(total))
