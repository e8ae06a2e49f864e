"""Packed documents: several in one row, separated by positions that start again."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from accmt.errors import DataError, explain
from accmt.huggingface.model_kinds import is_transformers_model

_ISOLATING = frozenset(
    "gemma3 gemma3_text gpt2 gpt_neox llama mistral mixtral phi3 qwen2 qwen3".split()  # noqa: SIM905 - easier to read
)
"""Model types that keep the documents of a row apart, as `tests/unit/test_huggingface_packing.py` shows."""

_DO = "pad instead of packing: DataCollatorWithPadding, or DataCollatorForLanguageModeling, in place of flattening"


@contextmanager
def computing_without_cache(model: nn.Module) -> Iterator[None]:
    """Let transformers models build no cache of keys and values, unless a call asks for one, as `generate` does.

    Nothing reads it in training. And transformers keeps packed documents apart only without a cache: if they attend to
    one another, gradients differ, without an error.

    Args:
        model: The model, without the wrapper of the launch; transformers models inside it are found.

    Raises:
        DataError: In a call: positions start again within a row, and the model would mix the documents.

    Source: `_preprocess_mask_arguments` in transformers/masking_utils.py, and `_prepare_for_training` of its Trainer,
        which sets `config.use_cache`. The configuration is not changed here, because a model may be saved meanwhile.
    """
    handles = [
        own.register_forward_pre_hook(partial(_before_forward, takes_cache=_takes_cache(own)), with_kwargs=True)
        for own in _outermost(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the transformers models in a model that are inside no other one."""
    if is_transformers_model(model):
        yield model
        return
    for child in model.children():
        yield from _outermost(child)


def _takes_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


def _before_forward(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_cache: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if takes_cache and kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None:
        kwargs["use_cache"] = False
    positions = kwargs.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.ndim == 2:
        _require_isolation(model, positions, kwargs)
    return args, kwargs


def _require_isolation(model: Any, positions: torch.Tensor, kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    is_of_user = mask is not None and getattr(mask, "ndim", 2) != 2  # it defines who attends to whom
    if is_of_user or kwargs.get("cu_seq_lens_q") is not None or not _start_again(positions, mask):
        return
    expected = "documents that do not attend to one another"
    where = f"packed documents in {type(model).__name__}"
    if mask is not None:
        got = "position_ids that start again within a row, beside an attention_mask, which covers the whole row"
        do = "leave attention_mask out of the batch: packed rows have no padding"
        raise DataError(explain(where, got, expected, do))
    if model.config.model_type not in _ISOLATING:
        got = f"position_ids that start again within a row; {model.config.model_type!r} may mix the documents"
        raise DataError(explain(where, got, expected, _DO))


def _start_again(positions: torch.Tensor, mask: Any) -> bool:
    """Return whether positions stop rising somewhere within a row, padding aside."""
    falls = positions[:, 1:] <= positions[:, :-1]
    if mask is not None and mask.shape == positions.shape:
        falls = falls & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(falls.any())
