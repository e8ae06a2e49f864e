"""Tries quantized layers and the adapters around them before they are trained."""

from __future__ import annotations

import torch
from torch import nn

from accmt.engine.quantized import find_quantized, keeping_quantized_weights
from accmt.errors import ModuleContractError, fail
from accmt.without_trace import without_trace

_MUCH = 10  # no adapter starts this far from its layer; codes are at least 100 times the weights


def try_quantized_layers(model: nn.Module) -> None:
    """Check that quantized layers propagate gradients, and that the adapters around them support them.

    PEFT puts any adapter around any layer. Some compute with the raw values of the weight, which are codes here: that
    raises an error about shapes or dtypes at best, and trains a wrong model otherwise. One layer per name is tested.

    Raises:
        ModuleContractError: An adapter fails with such weights, replaces them, or computes with their codes; or no
            gradient is propagated through them.
    """
    tried = {(type(found[1]), type(found[2]), found[0].rpartition(".")[2]): found for found in find_quantized(model)}
    with without_trace(model), keeping_quantized_weights(model), torch.enable_grad():
        for found in tried.values():
            _try(*found)


def _try(name: str, layer: nn.Module, base: nn.Linear) -> None:
    weight = base.weight
    numbers = (one.dtype for one in layer.parameters() if one.is_floating_point())
    dtype = weight.dtype if weight.is_floating_point() else next(numbers, torch.float32)
    leaf = torch.randn(1, 2, base.in_features, device=weight.device, dtype=dtype, requires_grad=True)
    what = f"weights of {type(weight).__name__}"
    if layer is not base:
        what = f"{type(layer).__module__.removeprefix('peft.tuners.').partition('.')[0]} around {what}"
    expected, faults = "an adapter that PEFT supports for this kind of quantized weights on this device", []
    calls: list[None] = []
    handle = base.register_forward_hook(lambda *_: calls.append(None))
    try:
        layer.train()
        inputs = leaf * 1  # not a leaf: some change it in place
        layer(inputs)
        outputs, is_called = layer(inputs), bool(calls)  # again: some change the layer inside
        own = base(inputs)
        if not is_called and outputs.norm() > _MUCH * own.norm():
            faults = ["whose codes it uses as values"]
    except Exception as error:  # noqa: BLE001 - any error here would occur in the first step
        faults = [f"which fail: {type(error).__name__}: {error}"]
    finally:
        handle.remove()
    if not faults:
        faults = ["which are replaced in each forward"] if base.weight is not weight else []
        if not own.requires_grad:
            faults, expected = ["through which no gradient passes"], "quantized weights with unquantized activations"
    if faults:
        do = "LoRA around int8, nf4 or torchao:Int8WeightOnlyConfig; or leave the model unquantized"
        raise fail(ModuleContractError, f"self.model.{name}", got=f"{what}, {faults[0]}", expected=expected, do=do)
