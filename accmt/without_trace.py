"""Computes with a model without side effects, for tests before or between the steps of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from accmt.data.seeding import preserve_generators
from accmt.libraries.private_names import buffers_of, without_dispatch_modes


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore random generators, buffers, gradients and each part's mode afterwards, bit for bit.

    Compilation is disabled inside, so that no graph is compiled or recompiled for a test; and nothing is counted, such
    as the operations of a step.
    """
    modes = [(layer, layer.training) for layer in model.modules()]
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [(buffers_of(layer), dict(buffers_of(layer))) for layer in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    is_loaded = "torch._dynamo" in sys.modules  # otherwise nothing is compiled, and loading it takes a second
    with (
        _preserving_all_generators(device_of(model)),
        torch.compiler.set_stance("force_eager") if is_loaded else nullcontext(),
        without_dispatch_modes(),
    ):
        for weight, _ in gradients:
            weight.grad = None
        try:
            yield
        finally:
            restore_modes(modes)
            for weight, gradient in gradients:
                weight.grad = gradient
            for registered, before in buffers:  # some may be new or replaced
                registered.clear()
                registered.update(before)
            for buffer, value in values:
                _give_back(buffer, value)


def restore_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    """Set the mode of each module, those that contain others first.

    Modes are set one by one, because the user may keep some modules in evaluation mode. A `train` that a module
    overrides is called, because it may do more than set the mode: some adapters merge their weights for evaluation.
    """
    for module, is_training in modes:
        if type(module).train is nn.Module.train:
            module.training = is_training
        elif module.training != is_training:
            module.train(is_training)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model."""
    weight = next(model.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


@torch.no_grad()
def _give_back(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if not torch.equal(buffer, value):
        buffer.copy_(value)


@contextmanager
def _preserving_all_generators(device: torch.device) -> Iterator[None]:
    with preserve_generators():
        if device.type in ("cpu", "meta"):
            yield
            return
        of_device = torch.get_device_module(device)
        place = () if device.type == "mps" else (device,)  # there is only one
        state = of_device.get_rng_state(*place)
        try:
            yield
        finally:
            of_device.set_rng_state(state, *place)
