"""Names what makes a served model compute something else: a tensor, the data type, or the first layer that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from accmt.addons.merging import merge_layers
from accmt.addons.served.targets import Folder, count_bits

Cause = tuple[str, str, str]
"""The part that differs, how, and what to do."""

_SHOWN = 3
_EXPORT_AGAIN = "export again from the trained model"
_NO_SETTING = ("dtype", "torch_dtype", "architectures", "transformers_version", "use_cache", "quantization_config")


def find_cause(trained: Folder, served: Folder, tokens: list[int]) -> Cause:
    """Name the first thing that makes log-probabilities differ.

    Args:
        trained: The trained model; an adapter is merged into its base model.
        served: What serves it.
        tokens: A row, whose hidden states are compared if all tensors are the same.
    """
    model = trained.model
    if hasattr(model, "merge_and_unload"):
        trained.model = model = merge_layers(model)
    tensors = served.tensors()
    if tensors is None:
        do = "compare the folder that the server loaded: --against merged FOLDER"
        return "weights", "they cannot be read from here", do
    ours = model.state_dict()
    tolerance = max(_rounding(trained.dtype), _rounding(served.dtype))
    theirs = _match(model.config, ours, tensors, tolerance)
    # A graph may have merged a vector into another operation.
    compared = [name for name in ours if theirs[name] is not None or ours[name].dim() > 1]
    differing = [name for name in compared if _distance(ours[name], theirs[name]) > tolerance]
    if differing:
        return _name_tensors(model, ours, theirs, differing, tolerance)
    if trained.dtype != served.dtype:
        do = f"export in {trained.dtype}, in which it was trained"
        return "dtype", f"the same weights rounded to {served.dtype}, trained in {trained.dtype}", do
    return _find_layer(model, served.model, tokens)


def _rounding(dtype: str) -> float:
    """Return the largest relative error of a tensor that was rounded to a data type, or computed in it."""
    floats = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
    return floats[dtype] if dtype in floats else 2.0 ** (1 - count_bits(dtype))


def _match(
    config: Any, ours: Mapping[str, Tensor], tensors: Mapping[str, Tensor], tolerance: float
) -> dict[str, Tensor | None]:
    """Return the served tensor of each trained one, by name; a graph may rename and transpose matrices."""
    theirs = {name: tensors.get(name) for name in ours}
    matrices = [(index, tensor) for index, tensor in enumerate(tensors.values()) if tensor.dim() == 2]
    forms = [*matrices, *((index, matrix.t()) for index, matrix in matrices)]
    used = set[int]()
    # First what is the same, so that only the rest is left for what is not; tied weights are one matrix for two.
    for kind in ("same", "permuted", "of this shape", "tied"):
        for name in (name for name in ours if theirs[name] is None and ours[name].dim() == 2):
            for index, form in forms:
                if form.shape != ours[name].shape or (index in used and kind != "tied"):
                    continue
                is_same = kind in ("same", "tied") and _distance(ours[name], form) <= tolerance
                is_permuted = kind == "permuted" and _is_permuted(config, name, ours[name], form, tolerance)
                if is_same or is_permuted or kind == "of this shape":
                    theirs[name] = form
                    used.add(index)
                    break
    return theirs


def _distance(trained: Tensor, served: Tensor | None) -> float:
    """Return the relative difference of two tensors."""
    if served is None or trained.shape != served.shape:
        return float("inf")
    first, second = trained.float().cpu(), served.float().cpu()
    return float((first - second).norm() / first.norm().clamp_min(1e-12))


def _name_tensors(
    model: Any, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor | None], differing: list[str], tolerance: float
) -> Cause:
    head, embedding = _names_of(model, "get_output_embeddings"), _names_of(model, "get_input_embeddings")
    if head in differing and set(differing) <= {head, embedding} and theirs[head] is not None:
        ties = [_distance(tensors[head], tensors[embedding]) <= tolerance for tensors in (ours, theirs)]  # type: ignore[arg-type]
        if ties[0] != ties[1]:
            kinds = ["tied to the embeddings" if tie else "a weight of its own" for tie in ties]
            do = f'write "tie_word_embeddings": {str(ties[0]).lower()} to config.json, and {_EXPORT_AGAIN}'
            return "weights", f"untied head: {head} is {kinds[1]}, trained {kinds[0]}", do
    permuted = [name for name in differing if _is_permuted(model.config, name, ours[name], theirs[name], tolerance)]
    if permuted:
        do = "convert with the permutation of GGUF's llama models exactly once: they order rotated halves differently"
        return "weights", f"permuted q and k: {_show(permuted)} have the rows of heads in another order", do
    return "weights", f"{_show(differing)} of {len(theirs)} tensors differ, or are missing", _EXPORT_AGAIN


def _names_of(model: Any, method: str) -> str:
    layer = getattr(model, method)()
    return next((f"{name}.weight" for name, part in model.named_modules() if part is layer), "")


def _is_permuted(config: Any, name: str, trained: Tensor, served: Tensor | None, tolerance: float) -> bool:
    """Return whether a query or key matrix has the rows that GGUF's llama models have, or the reverse."""
    if served is None or served.shape != trained.shape or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return False
    heads = config.num_attention_heads
    if name.endswith("k_proj.weight"):
        heads = getattr(config, "num_key_value_heads", None) or heads
    halves = trained.reshape(heads, 2, -1, trained.shape[1])
    pairs = trained.reshape(heads, -1, 2, trained.shape[1])
    orders = [order.transpose(1, 2).reshape(trained.shape) for order in (halves, pairs)]
    return any(_distance(order, served) <= tolerance for order in orders)


def _find_layer(trained: Any, served: Any, tokens: list[int]) -> Cause:
    """Name the first layer with other hidden states, and the settings that differ."""
    if served is None:
        return "layer", "all weights are the same, so the export computes something else", _EXPORT_AGAIN
    states = []
    for model in (trained, served):
        with torch.no_grad():
            ids = torch.tensor([tokens], device=model.device)
            states.append(model(input_ids=ids, output_hidden_states=True).hidden_states)
    pairs = enumerate(zip(*states, strict=False))
    number = next((index for index, (ours, theirs) in pairs if _distance(ours[0], theirs[0]) > _STATES), len(states[0]))
    ours, theirs = trained.config.to_dict(), served.config.to_dict()
    names = [name for name in ours if name in theirs and ours[name] != theirs[name] and not name.startswith("_")]
    settings = [f"{name} is {theirs[name]!r}, trained {ours[name]!r}" for name in names if name not in _NO_SETTING]
    place = "the embeddings" if number == 0 else f"layer {number - 1}" if number < len(states[0]) else "the output"
    detail = f"all weights are the same, but hidden states differ from {place} on; settings that differ: "
    return "layer", detail + ("; ".join(settings) or "none"), "correct these settings in config.json of the export"


_STATES = 1e-3
"""The relative difference of hidden states that comes from rounding."""


def _show(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
