"""Recomputing activations in the backward pass instead of keeping them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accmt.errors import ArgumentError, explain
from accmt.libraries.versions import checkpoint_activations


def enable_gradient_checkpointing(model: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Let a model keep only the inputs of its layers, and compute the rest again in the backward pass.

    Non-reentrant unless `kwargs` say otherwise: that works with DistributedDataParallel, with `no_sync`, and with
    frozen inputs.

    Args:
        model: A transformers model, or PEFT around one; without the wrapper of the launch.
        kwargs: For `torch.utils.checkpoint.checkpoint`, such as `preserve_rng_state=False`.

    Source: `PreTrainedModel.activation_checkpointing_enable` of transformers 5.23.
    """
    if not hasattr(model, "activation_checkpointing_enable") and not hasattr(model, "gradient_checkpointing_enable"):
        raise _unable(model, "no method `activation_checkpointing_enable`")
    try:
        # It also makes gradients flow through frozen embeddings.
        checkpoint_activations(model, {"use_reentrant": False, **(kwargs or {})})
    except ValueError as error:
        raise _unable(model, str(error)) from error


def _unable(model: Any, got: str) -> ArgumentError:
    where = f"Trainer(gradient_checkpointing=...) with {type(model).__name__}"
    do = "leave it out, and call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in the model's forward"
    return ArgumentError(explain(where, got, "a transformers model that supports it, or PEFT around one", do))
