"""Kinds of parameters: what a bias, a norm, an embedding, a matrix or an adapter is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

_NORM_NAMES = re.compile(r"layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of norms, as transformers' Trainer knows them.

Source: `Trainer.get_decay_parameter_names` in transformers/trainer.py.
"""


def kinds_of(model: nn.Module) -> dict[nn.Parameter, set[str]]:
    """Return the kinds of each parameter.

    - "bias": its name has "bias" in it;
    - "norm": its module is a norm by its class or its name, as in transformers' Trainer;
    - "embedding": of an `nn.Embedding`, or tied to one;
    - "adapter": added by PEFT, or kept beside an adapter to be trained (`modules_to_save`);
    - "matrix": of two dimensions, and neither an embedding nor the output layer of a language model.
    """
    kinds: dict[nn.Parameter, set[str]] = {parameter: set() for parameter in model.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        lower = name.lower()
        kinds[parameter] |= {"bias"} if "bias" in lower else set()
        kinds[parameter] |= {"norm"} if _NORM_NAMES.search(lower) else set()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if "norm" in type(module).__name__.lower():
            _note("norm", own, kinds)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            _note("embedding", own, kinds)
    _note("adapter", _adapters(model), kinds)
    outputs = set(_output_layer(model))
    for parameter, found in kinds.items():
        if parameter.dim() == 2 and "embedding" not in found and parameter not in outputs:
            found.add("matrix")
    return kinds


def _note(kind: str, parameters: Iterable[nn.Parameter], kinds: dict[nn.Parameter, set[str]]) -> None:
    for parameter in parameters:
        kinds[parameter].add(kind)


def _adapters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Give what PEFT added: its layers name the parts that are theirs, prompts and copied modules have a place."""
    for module in model.modules():
        for name in getattr(module, "adapter_layer_names", ()):
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                yield from part.parameters()
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in ("modules_to_save", "prompt_encoder"):
            yield from module.parameters()


def _output_layer(model: nn.Module) -> Iterator[nn.Parameter]:
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    if isinstance(layer, nn.Module):
        yield from layer.parameters()
