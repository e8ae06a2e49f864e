"""Running statistics of batch norm for weights that were not trained themselves, such as an average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from accmt.data import derive_seed, reader_of, seed_generators
from accmt.data.sized import BatchLoader, SizedLoader
from accmt.errors import ArgumentError, explain
from accmt.libraries.private_names import is_batch_norm
from accmt.loop.evaluation import in_evaluation_mode
from accmt.loop.logging import SilentLogs
from accmt.module import ExtendedAcceleratorModule
from accmt.parallel.sync_batchnorm import synchronized_layers, without_synchronization
from accmt.precision import autocast
from accmt.processes import data_index, num_data_processes, sum_over_data
from accmt.run import Run

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class BatchNormStatistics:
    """The running statistics of the batch norm of a run's model."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def layers(self) -> list[str]:
        """Return the names of the layers that keep statistics and are in training mode."""
        layers = self._run.unwrapped_model.named_modules()
        return [name for name, layer in layers if is_batch_norm(layer) and layer.training and _has_statistics(layer)]

    def buffers(self, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the running statistics of some layers, by name."""
        found = {name: self._run.unwrapped_model.get_submodule(name) for name in layers}
        return {f"{name}.{of}": getattr(layer, of) for name, layer in found.items() for of in _STATISTICS}

    def require_renewable(self, do: str) -> None:
        """Check that statistics can be computed by a pass over the training data.

        Raises:
            ArgumentError: Such a pass would change something, or has to be made by all processes together.
        """
        run = self._run
        if not any(is_batch_norm(layer) for layer in run.unwrapped_model.modules()):
            return
        faults = {
            "a sharded model": run.is_sharded,
            "a module that steps by itself": isinstance(run.module, ExtendedAcceleratorModule),
            "training data that are a stream": not isinstance(reader_of(run.train_loader), SizedLoader | BatchLoader),
        }
        for got, is_there in faults.items():
            if is_there:
                expected = "a model and data of which they can be computed again"
                raise ArgumentError(explain("the statistics of batch norm", got, expected, do))

    def renew(self, layers: Sequence[str]) -> None:
        """Compute the statistics of some layers for the weights as they are: each is the mean over an epoch's batches.

        Nothing is counted or logged, and no hook is called.

        Processes: collective; the mean is that over the batches of all processes.
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
                in_evaluation_mode(model),  # so that the modes come back
                run.using_unwrapped_model(),
                without_synchronization(synchronized_layers(model)),
                autocast(run.accelerator),
            ):
                update_bn(_batches(run, loader), _Step(run))
        finally:
            module.logs, run.state.now.stage = logs, stage
            logs.of_training.drop_batch()
            loader.end_workers()
            run.train_loader.set_epoch_again()
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
            yield (run.place(micro_batch.batch),)  # of a tuple `update_bn` takes the first


def _average(buffers: dict[str, Tensor], layers: Sequence[str]) -> None:
    """Let statistics be the mean over the batches of all processes."""
    for name in layers:
        number = int(buffers[f"{name}.num_batches_tracked"])
        total = sum_over_data([float(number)])[0]
        for of in ("running_mean", "running_var"):
            buffer = buffers[f"{name}.{of}"]
            sums = sum_over_data((buffer.double().flatten() * number).tolist())
            buffer.copy_(torch.tensor(sums, dtype=torch.float64).div(total).reshape(buffer.shape))
        buffers[f"{name}.num_batches_tracked"].fill_(int(total))
