"""Batch norm over the batches of all processes: torch's `SyncBatchNorm`, for the duration of a run.

Only a layer's class is changed to `SyncBatchNorm` and back, as in torch's `fully_shard`. The object stays the same, so
names of weights, hooks and other references to it remain valid.
`SyncBatchNorm.convert_sync_batchnorm` would replace the user's layers with others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from accmt.errors import ArgumentError, fail
from accmt.messages import warn
from accmt.options import Settings
from accmt.processes import num_processes

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_USER_CLASS = "_accmt_user_class"
_ARGUMENT = "Trainer(sync_batchnorm=True)"


def is_batch_norm(layer: nn.Module) -> bool:
    """Return whether a layer normalizes with batch statistics."""
    return isinstance(layer, _BATCH_NORMS)


def synchronize_if_asked(model: nn.Module, settings: Settings, device: torch.device) -> None:
    """Synchronize the statistics of batch norm over all processes, if requested and there are several."""
    if num_processes() == 1:
        return
    if settings.running.sync_batchnorm:
        _require_gpu(device)
        synchronize(model)
    # The others would wait for its statistics in their forward, until the timeout of the process group.
    if settings.hps.halves_micro_batches and synchronized_layers(model):
        got = "synchronized batch norm, in which a process that is out of memory would make the others wait"
        expected = "a model that each process can train alone for a batch"
        do = "max_micro_batch_size in the hyper-parameters, or batch norm without synchronization"
        raise fail(ArgumentError, "max_micro_batch_size: auto", got=got, expected=expected, do=do)


def synchronize(model: nn.Module) -> None:
    """Turn a model's batch norm into `SyncBatchNorm`; existing `SyncBatchNorm` layers are not changed."""
    layers = {name: layer for name, layer in model.named_modules() if is_batch_norm(layer)}
    # All are checked before one is changed: an error leaves the model as it was.
    local = {name: layer for name, layer in layers.items() if not isinstance(layer, nn.SyncBatchNorm)}
    for name, layer in local.items():
        # Reject a layer with a custom forward, of which `SyncBatchNorm` would drop everything but the normalization.
        if type(layer).forward is not nn.BatchNorm1d.forward:
            got = f"{name or 'the model'}, a {type(layer).__name__} with a custom forward, which would be lost"
            expected = "torch's BatchNorm1d, BatchNorm2d and BatchNorm3d"
            do = "replace it with its library's synchronized layer before fit, and leave sync_batchnorm out"
            raise fail(ArgumentError, _ARGUMENT, got=got, expected=expected, do=do)
    for layer in local.values():
        vars(layer).update({_USER_CLASS: type(layer), "process_group": None})
        layer.__class__ = nn.SyncBatchNorm
    if not layers:  # such as layers of another library, which has its own synchronized ones
        warn("sync_batchnorm=True has no effect: the model has no batch norm")


def restore_batch_norm(model: nn.Module) -> None:
    """Undo `synchronize`; the user's own `SyncBatchNorm` layers are kept."""
    for layer in model.modules():
        if _USER_CLASS in vars(layer):
            layer.__class__ = vars(layer).pop(_USER_CLASS)
            del vars(layer)["process_group"]


def synchronized_layers(model: nn.Module) -> tuple[nn.SyncBatchNorm, ...]:
    """Return the layers that wait for the other processes, including the user's own."""
    return tuple(layer for layer in model.modules() if type(layer) is nn.SyncBatchNorm)


@contextmanager
def without_synchronization(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Let each process normalize its batch on its own: for a trial, which the others may not run."""
    with _acting_as(_Alone, layers):
        yield


@contextmanager
def adding_no_samples(layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    """Let this process exchange statistics without samples: for a borrowed batch, which is another process's."""
    with _acting_as(_Borrowing, layers):
        yield


@contextmanager
def _acting_as(kind: type[nn.SyncBatchNorm], layers: Sequence[nn.SyncBatchNorm]) -> Iterator[None]:
    for layer in layers:
        layer.__class__ = kind
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.SyncBatchNorm


class _Alone(nn.SyncBatchNorm):
    """Batch norm of this process's batch."""

    forward = nn.BatchNorm1d.forward


class _Borrowing(nn.SyncBatchNorm):
    """Batch norm of this process's batch, which also takes part in the others' exchanges, with no samples."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        """Normalize the batch by its own statistics."""
        exchanged = nn.SyncBatchNorm.forward(self, input[:0]).sum() * 0.0  # also in the backward
        normalized = nn.functional.batch_norm(input, None, None, self.weight, self.bias, training=True, eps=self.eps)
        return normalized + exchanged


def _require_gpu(device: torch.device) -> None:
    """Reject CPUs; tests on CPUs replace this check and the layers' kernel."""
    if device.type == "cpu":
        got, expected = "processes on CPUs, where torch has no SyncBatchNorm", "one GPU per process"
        do = "leave sync_batchnorm out on CPUs, or train with one process"
        raise fail(ArgumentError, _ARGUMENT, got=got, expected=expected, do=do)
