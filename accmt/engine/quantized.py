"""Quantized models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from accmt.errors import ModuleContractError, fail

_REPACKS = "support_avx512bf16_for_cpu"


@contextmanager
def keeping_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Keep 4-bit weights of bitsandbytes unchanged.

    On CPUs with AVX512-BF16 a forward in evaluation mode repacks them for speed, and rounds their scales. Training
    after an evaluation would then use different weights than before it, and than a resumed run.

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
    """Reject training a whole quantized model: its quantized layers have no gradients, only the others do.

    Adapters, and parts that the user selected by freezing others, can be trained.

    Raises:
        ModuleContractError: No trainable parameter is frozen, and there is no adapter.
    """
    quantized = next((part for part in model.modules() if getattr(part, "is_quantized", False)), None)
    if quantized is None or any(hasattr(part, "peft_config") for part in model.modules()):
        return
    # Quantized weights are integers; what is frozen among the rest was frozen by the user, on purpose.
    if all(weight.requires_grad for weight in model.parameters() if weight.is_floating_point()):
        got = "quantized weights, which have no gradients: only embeddings and norms would be trained"
        do = "add an adapter: `lora: {r: 16, targets: all-linear}` in the section `model` of the YAML, or "
        do += "self.model = peft.get_peft_model(model, peft.LoraConfig(...))"
        expected = "an adapter around a quantized model, or parameters selected by freezing the others"
        raise fail(ModuleContractError, "self.model", got=got, expected=expected, do=do)


def reject_sharding_quantized_weights(model: nn.Module) -> None:
    """Reject sharding quantized weights other than 4-bit weights of bitsandbytes, which FSDP2 does not support.

    Raises:
        ModuleContractError: The model has such a layer.
    """
    for name, _, base in find_quantized(model):
        # FSDP2 would fail on the dtype of an 8-bit weight, without the name of its layer.
        if (kind := type(base.weight).__name__) != "Params4bit":
            got = f"weights of {kind}, which FSDP2 cannot shard"
            do = "set `quantization: nf4`; or launch with `accmt launch --strat ddp`"
            expected = "unquantized weights, or 4-bit weights of bitsandbytes"
            raise fail(ModuleContractError, f"self.model.{name}", got=got, expected=expected, do=do)


def find_quantized(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Linear]]:
    """Yield linear layers with quantized weights, by name, with the adapters around them."""
    inner = set()
    for name, layer in model.named_modules():
        base = layer
        if hasattr(layer, "get_base_layer"):  # an adapter of PEFT
            base = layer.get_base_layer()
        if isinstance(base, nn.Linear) and base not in inner:
            inner.add(base)
            # Reading the weight of a parametrized layer computes it, and changes the buffers of a spectral norm.
            weight = dict(base.named_parameters(recurse=False)).get("weight")
            if type(weight).__module__.startswith(("bitsandbytes.", "torchao.")):
                yield name, layer, base
