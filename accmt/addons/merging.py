"""Merges adapters into their base model, to get an ordinary model folder."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accmt.addons.peft_adapters import read_config
from accmt.addons.pretrained import load_pretrained
from accmt.errors import AccmtError, HyperParameterError, WeightsError, fail
from accmt.huggingface.folder import save_model
from accmt.libraries.versions import require
from accmt.options import HyperParameters
from accmt.saving.weights import ADAPTER_CONFIG

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "FEATURE_EXTRACTION": "AutoModel",
}
"""The transformers class for each PEFT task."""


def merge_adapter(
    folder: str | os.PathLike[str], output: str | os.PathLike[str], type: str | None = None, **kwargs: Any
) -> None:
    """Merge an adapter into its base model, and write the full model, which transformers can load without PEFT.

    The base model is loaded without quantization, and the adapter is added to its full weights. After QLoRA, the result
    therefore differs by the rounding of the quantized weights. A tokenizer in the folder is copied.

    Args:
        folder: The folder to which PEFT or a Trainer saved the adapter; it is not changed.
        output: The folder to write. Weights in it are replaced.
        type: The transformers class of the model, such as "AutoModelForCausalLM". None: the one for the adapter's task.
        **kwargs: For `from_pretrained` of the model, such as `dtype="bfloat16"` or `num_labels=5`.

    Raises:
        WeightsError: There is no adapter, it does not match its model, or it cannot be merged.
        FileNotFoundError: The base model does not exist.
        MissingPackageError: PEFT is not installed.

    Processes: one.
    """
    folder, where = Path(folder), f"merge_adapter({str(folder)!r})"
    if not (folder / ADAPTER_CONFIG).is_file():
        got, do = f"no {ADAPTER_CONFIG}", "pass the folder of an adapter; a full model needs no merging"
        raise fail(WeightsError, where, got=got, expected="a PEFT adapter", do=do)
    config = read_config(folder)
    if not _can_be_merged(config.__class__):
        raise _fail_unmergeable(WeightsError, where, config.__class__.__name__.removesuffix("Config"))
    found = type or CLASSES.get(str(config.task_type))
    if found is None:
        expected, do = "a transformers class for the model", 'for example type="AutoModelForCausalLM"'
        raise fail(WeightsError, where, got=f"an adapter for the task {config.task_type}", expected=expected, do=do)
    model = load_pretrained(folder, found, **kwargs)
    if getattr(model.get_base_model(), "is_quantized", False):
        got = f"{config.base_model_name_or_path}, whose weights on disk are quantized"
        do = "write the unquantized model as `base_model_name_or_path` in adapter_config.json"
        raise fail(WeightsError, where, got=got, expected="full weights to merge into", do=do)
    try:
        merged = merge_layers(model)
    except (ValueError, NotImplementedError, TypeError, RuntimeError) as error:
        expected = "an adapter that PEFT can merge"
        do = "load it with its model, by PeftModel"
        raise fail(WeightsError, where, got=str(error), expected=expected, do=do) from error
    tokenizer = None
    if (folder / "tokenizer_config.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
    save_model(merged, merged.state_dict(), Path(output), processor=tokenizer)


def _can_be_merged(kind: type[PeftConfig]) -> bool:
    """Return whether PEFT can merge adapters of a configuration, which excludes prompts and added layers."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    names = [name for name, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items() if config_class is kind]
    return any(hasattr(PEFT_TYPE_TO_TUNER_MAPPING[name], "merge_and_unload") for name in names)


def merge_layers(model: PeftModel) -> Any:
    """Return a PEFT model's base, with each adapter merged only into its own layer.

    PEFT adds an adapter to the weight of its layer, and thus to every layer that shares it: an output layer that is
    tied to embeddings, or layers repeated by `layer_replication`. The merged model would differ from the trained one.
    """
    is_tied = getattr(model.get_base_model().config, "tie_word_embeddings", False)
    shared = _take_apart(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        merged = model.merge_and_unload(safe_merge=True)
    if any(not _are_equal(first, other) for first, *others in shared for other in others):
        merged.config.tie_word_embeddings = False
        return merged
    for first, *others in shared:
        for other in others:
            other.weight = first.weight
    if is_tied and not merged.config.tie_word_embeddings:  # a copy of the output layer was trained with the adapter
        inputs, outputs = merged.get_input_embeddings(), merged.get_output_embeddings()
        if _are_equal(inputs, outputs):
            outputs.weight, merged.config.tie_word_embeddings = inputs.weight, True
    return merged


def _take_apart(model: PeftModel) -> list[list[Any]]:
    """Untie the weights of all layers that an adapter changes, and return the groups of layers that shared one."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = {part.get_base_layer() for part in model.modules() if isinstance(part, BaseTunerLayer)}
    owners: dict[nn.Parameter, list[Any]] = {}
    for part in model.modules():
        if "weight" in (own := dict(part.named_parameters(recurse=False))):
            owners.setdefault(own["weight"], []).append(part)
    shared = [several for several in owners.values() if len(several) > 1 and not adapted.isdisjoint(several)]
    for part in (other for _, *others in shared for other in others):
        part.weight = nn.Parameter(part.weight.detach().clone(), requires_grad=False)
    return shared


def _are_equal(one: Any, other: Any) -> bool:
    return torch.equal(one.weight, other.weight)


def require_mergeable(hps: HyperParameters, rows: str) -> None:
    """Check before training that the adapter in the hyper-parameters can be merged.

    Args:
        hps: The hyper-parameters.
        rows: The section that asks for it.

    Raises:
        HyperParameterError: There is no adapter, or PEFT cannot merge its type.
    """
    section = hps.section("model")
    if section is None or not section.adapter:
        got = "true without an adapter in `model`"
        do = "remove `merge`; if `model.path` is an adapter, merge what is trained with: accmt merge FOLDER OUTPUT"
        raise fail(
            HyperParameterError, hps.where(rows, "merge"), got=got, expected="`model.lora` or `model.adapter`", do=do
        )
    require("peft", hps.where("model", "adapter"))
    import peft

    config = getattr(peft, f"{section.adapter['type'].removesuffix('Config')}Config", None)
    # An unknown name is reported when the model is built.
    if config is not None and not _can_be_merged(config):
        raise _fail_unmergeable(HyperParameterError, hps.where(rows, "merge"), section.adapter["type"])


def _fail_unmergeable(kind: type[AccmtError], where: str, adapter: str) -> AccmtError:
    expected = "an adapter that changes weights, such as LoRA; others add inputs to the model and cannot be merged"
    do = "remove `merge`; PeftModel loads it with its model"
    return fail(kind, where, got=f"an adapter of type {adapter}", expected=expected, do=do)
