"""The model that the section `model` of hyper-parameters describes: each key is an argument of who does the work."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from accmt.config import HyperParameters
from accmt.config.arguments import annotation_of, fits_as_written
from accmt.config.faults import describe, nearest, suggest
from accmt.config.model_section import NAMES, ModelSection
from accmt.errors import AccmtError, HyperParameterError, MissingPackageError, explain
from accmt.huggingface.gradient_checkpointing import enable_gradient_checkpointing
from accmt.huggingface.peft_adapters import read_base_name
from accmt.huggingface.pretrained import load_pretrained
from accmt.libraries.versions import require
from accmt.parallel.building import building_for
from accmt.saving.layout import ADAPTER_CONFIG

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
        MissingPackageError: PEFT, bitsandbytes, torchao or liger-kernel is asked for and not installed.
    """
    section = _require_section(hps)
    arguments = dict(section.arguments)
    if section.quantization:
        arguments["quantization_config"] = _quantization(hps, section)
    model = _load(hps, section, arguments)
    if section.kernels:
        _apply_kernels(hps, section, model)
    if section.quantization and section.adapter:
        require("peft", hps.where("model", "adapter"))
        import peft

        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    _freeze(hps, model, section.freeze)
    if section.adapter:
        model = _with_adapter(hps, section, model)
    if section.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def load_tokenizer(hps: HyperParameters) -> Any:
    """Return the tokenizer of the model of `hps`, with the chat template of their section `sft`.

    Raises:
        HyperParameterError: There is no `model`.
        FileNotFoundError: There is no tokenizer, or no such template.
    """
    section, sft = _require_section(hps), hps.sft_section
    require("transformers", hps.where("model"))
    import transformers

    folder = Path(section.path)
    is_bare_adapter = (folder / ADAPTER_CONFIG).is_file() and not (folder / "tokenizer_config.json").is_file()
    path = read_base_name(folder) if is_bare_adapter else section.path
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        why, _, _ = str(error).partition("\n")
        expected, do = "the files of a tokenizer beside the model", f'tokenizer.save_pretrained("{path}"), once'
        raise FileNotFoundError(explain(f"the tokenizer of {path}", why, expected, do)) from error
    if sft is not None and sft.chat_template is not None:
        template = Path(sft.chat_template)
        if not template.is_file():
            got, where = f"{template}: no such file, seen from {Path.cwd()}", hps.where("sft", "chat_template")
            raise FileNotFoundError(explain(where, got, "a file with a chat template", "correct the path"))
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _require_section(hps: HyperParameters) -> ModelSection:
    if hps.model_section is None:
        do = "add `model: {path: ..., type: AutoModelForCausalLM}` to it, or pass a module to fit"
        raise HyperParameterError(explain(hps.where("model"), "nothing", "which model is to be trained", do))
    return hps.model_section


def _load(hps: HyperParameters, section: ModelSection, arguments: dict[str, Any]) -> Any:
    try:
        with building_for(None) if section.adapter else nullcontext():  # an adapter is sharded with its model, or not
            return load_pretrained(section.path, section.type, **arguments)
    except AccmtError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        name = unknown[1] if unknown else None
        class_is_missing = section.type is None and (Path(section.path) / ADAPTER_CONFIG).is_file()
        otherwise = (
            "write `type: AutoModelForCausalLM`, or the class for its task" if class_is_missing else "correct it"
        )
        do = suggest(name, NAMES, f"remove `{name}`") if name else otherwise
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
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        layers = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        targets = values.get("target_modules", ())
        near = [near for one in ([targets] if isinstance(targets, str) else targets) if (near := nearest(one, layers))]
        do = f"write `targets: [{', '.join(near)}]`; " if near else ""
        do += f"layers are such as {', '.join(sorted(layers))}"
        raise HyperParameterError(explain(hps.where(*where), str(error), "parts that the model has", do)) from error
    except AttributeError as error:  # PEFT's class for a task needs a model with the head of that task
        got, expected = f"{type(model).__name__}, and {made.task_type}: {error}", "a model with the head of its task"
        do = "write `type: AutoModelForCausalLM` in `model`, or the class for your task"
        raise HyperParameterError(explain(hps.where(*where), got, expected, do)) from error


def _find(hps: HyperParameters, where: tuple[str, ...], library: Any, name: str, ending: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(library, name, None)
    if found is None:
        names = [one for one in dir(library) if one.endswith(ending)]
        do = suggest(name, names, f"choose one of {', '.join(names[:5])}")
        expected = f"a configuration of {library.__name__}"
        raise HyperParameterError(explain(hps.where(*where), name, expected, do))
    return found


def _apply_kernels(hps: HyperParameters, section: ModelSection, model: Any) -> None:
    """Let Liger's kernels take the place of layers and of the loss of a model."""
    where = ("model", "kernels")
    require("liger_kernel", hps.where(*where))
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as FUNCTIONS  # noqa: N811
    except ImportError as error:
        got, do = f"liger-kernel cannot be imported: {error}", 'pip install "triton>=3"'
        raise MissingPackageError(explain(hps.where(*where), got, "liger-kernel with triton", do)) from error
    kind = str(model.config.model_type)
    if kind not in FUNCTIONS:
        do = suggest(kind, FUNCTIONS, "remove `kernels`")
        expected = f"a model of {', '.join(sorted(FUNCTIONS))}"
        raise HyperParameterError(explain(hps.where(*where), f"a model of {kind}", expected, do))
    if not torch.accelerator.is_available() and not os.environ.get("TRITON_INTERPRET"):
        got, do = "no GPU on this machine", "remove `kernels` here; the results are the same but for rounding"
        raise HyperParameterError(explain(hps.where(*where), got, "a GPU: Liger's kernels run on no CPU", do))
    values = {name: value for name, value in section.kernels.items() if name != "type"}
    _call(hps, where, partial(FUNCTIONS[kind], model=model), values)


def _call(hps: HyperParameters, where: tuple[str, ...], config: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Call what a library builds or changes something with, arguments held against names and types of its signature."""
    function = config.func if isinstance(config, partial) else config
    takes, types = function.__name__, _types_of(function)
    parameters = inspect.signature(config).parameters
    bound = config.keywords if isinstance(config, partial) else {}
    names = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD and name not in bound]
    for name, value in values.items():
        place = hps.where(*where, name)
        if name not in names:
            do, expected = suggest(name, names, f"remove `{name}`"), f"an argument of {takes}"
            raise HyperParameterError(explain(place, f"{name} = {describe(value)}", expected, do))
        annotation = types.get(name) or annotation_of(parameters[name])
        if not fits_as_written(value, annotation):
            expected = f"{inspect.formatannotation(annotation)} ({takes}'s signature)"
            raise HyperParameterError(explain(place, describe(value), expected, f"correct `{name}`"))
    try:
        return config(**values)
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        got, expected = str(error), f"arguments that {takes} accepts"
        raise HyperParameterError(explain(hps.where(*where), got, expected, "correct them")) from error


def _types_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the types of arguments; those of a dataclass are the types of its fields, inherited ones too."""
    try:
        return get_type_hints(function)
    except NameError:  # of a type that is imported for type checkers only
        return {}


def _freeze(hps: HyperParameters, model: nn.Module, patterns: Sequence[str]) -> None:
    """Let parameters that are named not be trained; one with several names has to be named by all of them."""
    every = dict(model.named_parameters(remove_duplicate=False))
    where, expected = hps.where("model", "freeze"), "a part of a name in the model"
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in every):
            do = f"names are such as {', '.join(list(every)[:5])}"
            raise HyperParameterError(explain(where, f"{pattern!r}, which is in no parameter's name", expected, do))
    named = [name for name in every if any(re.search(pattern, name) for pattern in patterns)]
    for name in named:
        tied = [other for other in every if every[other] is every[name] and other not in named]
        if tied:
            got = f"{name}, and not {tied[0]}, to which it is tied: the two are one parameter"
            do = f"write `freeze: [{', '.join([*patterns, tied[0].rpartition('.')[0]])}]`, or freeze neither"
            raise HyperParameterError(explain(where, got, "both names of a tied weight, or neither", do))
        every[name].requires_grad = False
