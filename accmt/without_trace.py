"""Computing with a model so that nothing of it remains: for trials before or between the steps of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from accmt.data.seeding import preserve_generators


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Give everything back afterwards, bit for bit: random generators, buffers, gradients, and each part's mode.

    Nothing is compiled meanwhile, so that no graph is made, or made again, for what is tried.
    """
    modes = [(layer, layer.training) for layer in model.modules()]
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [
        (layer, name, buffer, buffer.detach().clone())
        for layer in model.modules()
        for name, buffer in layer.named_buffers(recurse=False)
    ]
    with _preserving_all_generators(device_of(model)), _without_compilation():
        for weight, _ in gradients:
            weight.grad = None
        try:
            yield
        finally:
            for layer, is_training in modes:
                layer.training = is_training
            for weight, gradient in gradients:
                weight.grad = gradient
            for layer, name, buffer, before in buffers:
                _give_back(layer, name, buffer, before)


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is."""
    weight = next(model.parameters(), None)
    return torch.device("cpu") if weight is None else weight.device


@torch.no_grad()
def _give_back(layer: nn.Module, name: str, buffer: torch.Tensor, before: torch.Tensor) -> None:
    if layer.get_buffer(name) is not buffer:
        setattr(layer, name, buffer)
    if not torch.equal(buffer, before):
        buffer.copy_(before)


@contextmanager
def _preserving_all_generators(device: torch.device) -> Iterator[None]:
    with preserve_generators():
        if device.type in ("cpu", "meta"):
            yield
            return
        of_device = torch.get_device_module(device)
        place = () if device.type == "mps" else (device,)  # there is one alone
        state = of_device.get_rng_state(*place)
        try:
            yield
        finally:
            of_device.set_rng_state(state, *place)


@contextmanager
def _without_compilation() -> Iterator[None]:
    is_loaded = "torch._dynamo" in sys.modules  # else nothing is compiled, and loading it takes a second
    with torch.compiler.set_stance("force_eager") if is_loaded else nullcontext():
        yield
