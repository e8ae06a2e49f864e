"""Determines what kind of model a module has; nothing here imports a library that is not in use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import nn

from accmt.errors import ModuleContractError, fail
from accmt.libraries.versions import require

_WRAP = "AcceleratorModule.from_functions(model, lambda batch, trainer: loss_fn(trainer.model(batch[0]), batch[1]))"
_WRAP_TRANSFORMERS = "AcceleratorModule.from_functions(model, lambda batch, trainer: trainer.model(**batch).loss)"

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def is_transformers_model(model: object) -> TypeGuard[PreTrainedModel]:
    """Return whether `model`, without wrappers, is a transformers model."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def is_peft_model(model: object) -> TypeGuard[PeftModel]:
    """Return whether `model`, without wrappers, was created by `get_peft_model`."""
    modeling = sys.modules.get("peft.peft_model")
    return modeling is not None and isinstance(model, modeling.PeftModel)


def without_adapter(model: Any) -> Any:
    """Return the model that a PEFT model wraps, and any other model unchanged."""
    if is_peft_model(model):
        return model.get_base_model()
    return model


def find_transformers_models(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yield the outermost transformers models in a model."""
    if is_transformers_model(model):
        yield model
        return
    for child in model.children():
        yield from find_transformers_models(child)


_NEXT_TOKEN = (None, "ForCausalLM", "ForConditionalGeneration")
"""Loss types of transformers that predict the next token, which is also the default for classes without a known type.

Source: `LOSS_MAPPING` in transformers/loss/loss_utils.py, and `PreTrainedModel.loss_function`.
"""

_TAKES_SHIFTED_LABELS = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "cpmant",
        "flaubert",
        "marian",
        "mbart",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "pegasus",
        "plbart",
        "prophetnet",
        "trocr",
        "whisper",
        "xlm",
        "xlnet",
    }
)
"""Models, by `model_type`, whose decoders compare each position with the label at the same position."""


def predicts_next_token(model: Any) -> bool:
    """Return whether a transformers model's loss predicts each token's label from the tokens before it.

    The first label is then not a target.
    """
    if getattr(model, "loss_type", None) not in _NEXT_TOKEN or model.config.is_encoder_decoder:
        return False
    return model.config.model_type not in _TAKES_SHIFTED_LABELS


def begins_with_prompt(model: object) -> bool:
    """Return whether PEFT puts a trained prompt before each sample's tokens, so that the first token is predicted too.

    Source: `PeftModelForCausalLM.forward` in peft/peft_model.py, which puts -100 before the labels.
    """
    if not is_peft_model(model):
        return False
    config = model.active_peft_config
    return config.is_prompt_learning and config.peft_type not in ("PREFIX_TUNING", "CARTRIDGE")  # keys and values


def advise_wrapping(value: object) -> str | None:
    """Return how to make a module from a model or its configuration; None for anything else."""
    configurations = sys.modules.get("transformers.configuration_utils")
    if configurations is not None and isinstance(value, configurations.PreTrainedConfig):
        return f"model = AutoModelForSequenceClassification.from_config(config), then {_WRAP_TRANSFORMERS}"
    if is_transformers_model(value) or is_peft_model(value):
        return f"{_WRAP_TRANSFORMERS}; or pass its path"
    if isinstance(value, nn.Module):
        return f"{_WRAP}; or your own class"
    return None


def require_library(model: object) -> None:
    """Check that the version of a model's library is supported.

    Raises:
        MissingPackageError: It is too old.
    """
    if is_transformers_model(model):
        require("transformers", "self.model")
    elif is_peft_model(model):
        require("peft", "self.model")


def reject_injected_adapters(model: object) -> None:
    """Reject a transformers model into which `add_adapter` or `load_adapter` put an adapter.

    Its folder would look like that of a model without one.
    """
    if is_transformers_model(model) and hasattr(model, "peft_config"):
        got = "a transformers model with an adapter inside (`add_adapter`, or `from_pretrained` of an adapter's name)"
        do = "self.model = get_peft_model(model, LoraConfig(...)), or PeftModel.from_pretrained(model, adapter)"
        raise fail(ModuleContractError, "self.model", got=got, expected="a model that PEFT wraps", do=do)
