"""Quantized models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from accmt.errors import ModuleContractError, explain

_REPACKS = "support_avx512bf16_for_cpu"


@contextmanager
def keeping_quantized_weights(model: nn.Module) -> Iterator[None]:
    """Keep 4-bit weights of bitsandbytes as they were loaded.

    On CPUs with AVX512-BF16 a forward in evaluation repacks them for speed, and rounds their scales. What is
    trained after an evaluation would then go through other weights than before it, and than in a run that is resumed.

    Source: `Linear4bit.forward` in bitsandbytes/nn/modules.py, version 0.50.
    """
    layers = [layer for layer in model.modules() if getattr(layer, _REPACKS, False)]
    for layer in layers:
        setattr(layer, _REPACKS, False)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, _REPACKS, True)


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
