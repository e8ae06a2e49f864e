"""Quantized models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from accmt.errors import ModuleContractError, explain
from accmt.without_trace import without_trace

_REPACKS = "support_avx512bf16_for_cpu"
_MUCH = 10  # no adapter begins so far from its layer; codes are 100 times the weights, and more


@contextmanager
def keeping_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Keep 4-bit weights of bitsandbytes as they were loaded.

    On CPUs with AVX512-BF16 a forward in evaluation repacks them for speed, and rounds their scales. What is
    trained after an evaluation would then go through other weights than before it, and than in a run that is resumed.

    Source: `Linear4bit.forward` in bitsandbytes/nn/modules.py, version 0.50.
    """
    layers = [layer for layer in model.modules() if repacks_weights(layer)]
    for layer in layers:
        setattr(layer, _REPACKS, False)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, _REPACKS, True)


def repacks_weights(layer: nn.Module) -> bool:
    """Return whether a layer would repack its weights in an evaluation."""
    return bool(getattr(layer, _REPACKS, False))


def reject_training_quantized_weights(model: nn.Module) -> None:
    """Reject to train a quantized model as a whole: its layers have no gradients, only what is between them has.

    Adapters, and parts that somebody chose by freezing others, can be trained.

    Raises:
        ModuleContractError: No parameter that could be trained is frozen, and there is no adapter.
    """
    quantized = next((part for part in model.modules() if getattr(part, "is_quantized", False)), None)
    if quantized is None or any(hasattr(part, "peft_config") for part in model.modules()):
        return
    can_be_trained = [weight for weight in model.parameters() if weight.is_floating_point()]
    if all(weight.requires_grad for weight in can_be_trained):
        got = "quantized weights, which have no gradients: embeddings and norms alone would be trained"
        do = "add an adapter: `lora: {r: 16, targets: all-linear}` in the section `model` of the YAML, or "
        do += "self.model = peft.get_peft_model(model, peft.LoraConfig(...))"
        expected = "an adapter around a quantized model, or parameters that were chosen by freezing the others"
        raise ModuleContractError(explain("self.model", got, expected, do))


def reject_sharding_quantized_weights(model: nn.Module) -> None:
    """Reject to shard weights that are quantized otherwise than in 4 bits of bitsandbytes, which FSDP2 cannot.

    Raises:
        ModuleContractError: The model has such a layer.
    """
    for name, _, base in _find_quantized(model):
        if (kind := type(base.weight).__name__) != "Params4bit":
            got = f"weights of {kind}, which FSDP2 cannot shard"
            do = "write `quantization: nf4`; or launch with `accmt launch --strat ddp`"
            expected = "weights in full, or in 4 bits of bitsandbytes"
            raise ModuleContractError(explain(f"self.model.{name}", got, expected, do))


def try_quantized_layers(model: nn.Module) -> None:
    """Check that quantized layers pass gradients back, and that the adapters around them can work with them.

    PEFT puts any adapter around any layer. Some compute with the numbers of the weight, which are codes here: that is
    an error of shapes or types where one is lucky, and another model where not. One layer of each name is tried.

    Raises:
        ModuleContractError: An adapter fails around such weights, replaces them, or computes with their codes; or no
            gradient comes through them.
    """
    tried = {(type(found[1]), type(found[2]), found[0].rpartition(".")[2]): found for found in _find_quantized(model)}
    if tried:
        with without_trace(model), keeping_quantized_weights(model), torch.enable_grad():
            for found in tried.values():
                _try(*found)


def _find_quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear]]:
    """Yield linear layers with quantized weights, by name, with the adapters around them."""
    inner = set()
    for name, layer in model.named_modules():
        base = layer.get_base_layer() if hasattr(layer, "get_base_layer") and hasattr(layer, "base_layer") else layer
        if isinstance(base, nn.Linear) and base not in inner:
            inner.add(base)
            if type(base.weight).__module__.startswith(("bitsandbytes.", "torchao.")):
                yield name, layer, base


def _try(name: str, layer: nn.Module, base: nn.Linear) -> None:
    weight = base.weight
    numbers = (one.dtype for one in layer.parameters() if one.is_floating_point())
    dtype = weight.dtype if weight.is_floating_point() else next(numbers, torch.float32)
    leaf = torch.randn(1, 2, base.in_features, device=weight.device, dtype=dtype, requires_grad=True)
    what = f"weights of {type(weight).__name__}"
    if layer is not base:
        what = f"{type(layer).__module__.removeprefix('peft.tuners.').partition('.')[0]} around {what}"
    expected, faults = "an adapter that PEFT has for weights that are quantized in this way, on this device", []
    calls: list[None] = []
    handle = base.register_forward_hook(lambda *_: calls.append(None))
    try:
        layer.train()
        inputs = leaf * 1  # no leaf: some change it in place
        layer(inputs)
        outputs, is_called = layer(inputs), bool(calls)  # again: some change what they are around
        own = base(inputs)
        if not is_called and outputs.norm() > _MUCH * own.norm():
            faults = ["whose codes it takes for numbers"]
    except Exception as error:  # noqa: BLE001 - whatever it is, it would be the error of the first step
        faults = [f"which fail: {type(error).__name__}: {error}"]
    finally:
        handle.remove()
    if not faults:
        faults = ["which are replaced in each forward"] if base.weight is not weight else []
        if not own.requires_grad:
            faults, expected = ["through which no gradient comes"], "quantized weights, and activations that are not"
    if faults:
        do = "LoRA around int8, nf4 or torchao:Int8WeightOnlyConfig; or leave the model unquantized"
        raise ModuleContractError(explain(f"self.model.{name}", f"{what}, {faults[0]}", expected, do))
