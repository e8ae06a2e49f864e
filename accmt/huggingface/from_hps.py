"""The model that the section `model` of hyper-parameters describes: each key is an argument of who does the work."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from accmt.config import HyperParameters
from accmt.config.faults import describe, suggest
from accmt.config.model_section import NAMES, ModelSection
from accmt.errors import AccmtError, HyperParameterError, explain
from accmt.huggingface.gradient_checkpointing import enable_gradient_checkpointing
from accmt.huggingface.pretrained import load_pretrained
from accmt.libraries.versions import require

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""What PEFT calls the task of a class of transformers, by the end of the name."""

_BITSANDBYTES: Mapping[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


def build_from_hps(hps: HyperParameters) -> Any:
    """Build the model of `hps`: quantized as it is loaded, frozen in parts, with an adapter around it.

    Raises:
        HyperParameterError: There is no `model`, or a library refuses one of its arguments.
        MissingPackageError: PEFT, bitsandbytes or torchao is asked for and not installed.
    """
    section = hps.model_section
    if section is None:
        do = "add `model: {path: ..., type: AutoModelForCausalLM}` to it, or pass a module to fit"
        raise HyperParameterError(explain(hps.where("model"), "nothing", "which model is to be trained", do))
    arguments = dict(section.arguments)
    if section.quantization:
        arguments["quantization_config"] = _quantization(hps, section)
    model = _load(hps, section, arguments)
    if section.quantization and section.adapter:
        require("peft", hps.where("model", "adapter"))
        import peft

        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    for pattern in section.freeze:
        _freeze(hps, model, pattern)
    if section.adapter:
        model = _with_adapter(hps, section, model)
    if section.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def _load(hps: HyperParameters, section: ModelSection, arguments: dict[str, Any]) -> Any:
    try:
        return load_pretrained(section.path, section.type, **arguments)
    except AccmtError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        name = unknown[1] if unknown else None
        do = suggest(name, NAMES, f"remove `{name}`") if name else "correct the section"
        where, expected = hps.where("model", *([name] if name else [])), "arguments that `from_pretrained` accepts"
        raise HyperParameterError(explain(where, str(error), expected, do)) from error


def _quantization(hps: HyperParameters, section: ModelSection) -> Any:
    import transformers

    values = dict(section.quantization)
    kind = values.pop("type")
    where = ("model", "quantization")
    if kind in _BITSANDBYTES:
        require("bitsandbytes", hps.where(*where))
        return _call(hps, where, transformers.BitsAndBytesConfig, {**_BITSANDBYTES[kind], **values})
    require("torchao", hps.where(*where))
    from torchao import quantization

    config = _find(hps, where, quantization, kind.removeprefix("torchao:"), "Config")
    return transformers.TorchAoConfig(_call(hps, where, config, values))


def _with_adapter(hps: HyperParameters, section: ModelSection, model: Any) -> Any:
    require("peft", hps.where("model", "adapter"))
    import peft

    values = dict(section.adapter)
    where = ("model", "lora" if values["type"] == "Lora" else "adapter")
    config = _find(hps, where, peft, f"{values.pop('type').removesuffix('Config')}Config", "Config")
    task = next((task for end, task in _TASKS.items() if str(section.type).endswith(end)), None)
    made = _call(hps, where, config, {"task_type": task, **values})
    try:
        return peft.get_peft_model(model, made)
    except (ValueError, TypeError, KeyError) as error:
        layers = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        do = f"layers are such as {', '.join(sorted(layers))}"
        raise HyperParameterError(explain(hps.where(*where), str(error), "parts that the model has", do)) from error


def _find(hps: HyperParameters, where: tuple[str, ...], library: Any, name: str, ending: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(library, name, None)
    if found is None:
        names = [one for one in dir(library) if one.endswith(ending)]
        do = suggest(name, names, f"choose one of {', '.join(names[:5])}")
        expected = f"a configuration of {library.__name__}"
        raise HyperParameterError(explain(hps.where(*where), name, expected, do))
    return found


def _call(hps: HyperParameters, where: tuple[str, ...], config: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Make a configuration of a library, its arguments held against the signature."""
    names = set(inspect.signature(config).parameters)
    for name, value in values.items():
        if name not in names:
            do = suggest(name, names, f"remove `{name}`")
            expected = f"an argument of {getattr(config, '__name__', config)}"
            raise HyperParameterError(explain(hps.where(*where, name), f"{name} = {describe(value)}", expected, do))
    try:
        return config(**values)
    except (TypeError, ValueError) as error:
        got, expected = str(error), f"arguments that {getattr(config, '__name__', config)} accepts"
        raise HyperParameterError(explain(hps.where(*where), got, expected, "correct them")) from error


def _freeze(hps: HyperParameters, model: nn.Module, pattern: str) -> None:
    found = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
    if not found:
        names = [name for name, _ in model.named_parameters()]
        do = f"names are such as {', '.join(names[:5])}"
        where, got = hps.where("model", "freeze"), f"{pattern!r}, which is in no parameter's name"
        raise HyperParameterError(explain(where, got, "a part of a name in the model", do))
    for parameter in found:
        parameter.requires_grad = False
