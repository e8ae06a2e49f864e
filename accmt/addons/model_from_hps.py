"""The section `model` of the hyper-parameters: which model to build, and how to prepare it for training.

Keys that accmt does not know are passed on to the libraries.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import nn

from accmt.addons.parameter_groups import read_patterns
from accmt.addons.peft_adapters import read_base_name
from accmt.addons.pretrained import (
    find_model_class,
    load_pretrained,
    require_model_folder,
)
from accmt.engine.meta_device import building_for
from accmt.errors import (
    AccmtError,
    ArgumentFileError,
    HyperParameterError,
    MissingPackageError,
    describe_value,
    fail,
    nearest,
)
from accmt.libraries.versions import require
from accmt.options import HyperParameters
from accmt.options.checks import KeyFault, KeyPath, is_empty, is_off
from accmt.options.optimizer_and_scheduler_arguments import annotation_of
from accmt.options.yaml_reader import names_like, suggest
from accmt.saving.weights import ADAPTER_CONFIG

# ---- Reading the section


_QUANTIZATIONS = ("int8", "nf4", "fp4")
"""Quantizations by bitsandbytes; others are `torchao:` followed by the name of one of its configurations."""

_EXAMPLES = {
    "path": "path: out/base",
    "type": "type: AutoModelForCausalLM",
    "dtype": "dtype: bfloat16",
    "attn_implementation": "attn_implementation: sdpa",
    "quantization": "quantization: nf4",
    "adapter": "adapter: {type: IA3, target_modules: [k_proj], feedforward_modules: []}",
    "lora": "lora: {r: 16, target_modules: [q_proj, v_proj]}",
    "freeze": "freeze: [embed]",
    "kernels": "kernels: liger",
}
_NAMES = tuple(_EXAMPLES)
_TEXTS = ("path", "type", "dtype", "attn_implementation")
_SHORT = {"alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}
"""Short names for arguments of PEFT's `LoraConfig`."""

_INSTEAD = {
    "load_in_4bit": "quantization: nf4",
    "load_in_8bit": "quantization: int8",
    "quantization_config": "quantization: {type: nf4, bnb_4bit_use_double_quant: true}",
    "peft_config": "lora: {r: 16, alpha: 32, targets: all-linear}",
    "use_liger_kernel": "kernels: liger",
    "rank": "r",
    "lora_r": "r",
}
"""Names used elsewhere, with what to write here instead."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class ModelSection:
    """A transformers model as described by the hyper-parameters.

    Attributes:
        path: A model folder, or a model name on the Hub.
        type: A transformers class; None is `AutoModel`.
        quantization: `type` is int8, nf4 or fp4 (by bitsandbytes), or `torchao:...`; the rest are arguments of the
            configuration.
        adapter: `type` is the name of a PEFT configuration class without `Config`; the rest are its arguments.
        freeze: Regular expressions; parameters whose names match one are not trained.
        kernels: `type` is "liger"; the rest are arguments of the function that applies the kernels.
        arguments: Further arguments of `from_pretrained`.
    """

    path: str
    type: str | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] = field(default_factory=dict)
    freeze: tuple[str, ...] = ()
    kernels: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def read_model_section(value: Any) -> tuple[ModelSection | None, list[KeyFault]]:
    """Return the section and its errors; arguments are checked later, by the functions that take them."""
    values = {"path": value} if isinstance(value, str) else value
    if not isinstance(values, Mapping):
        got, do = describe_value(value), f"write `model: {{{_EXAMPLES['path']}}}`"
        return None, [KeyFault(("model",), got, "a path, or a mapping with `path`", do)]
    off = ("quantization", "adapter", "lora", "freeze", "kernels")
    values = {
        str(name): entry
        for name, entry in values.items()
        if not (entry is None or (name in off and is_off(entry) and not (name == "lora" and is_empty(entry))))
    }  # an empty `lora` has default arguments
    faults = list(_faults(values))
    section = ModelSection(
        path=str(values.get("path")),
        type=values.get("type"),
        quantization=_with_type(values.get("quantization"), "quantization", faults),
        adapter=_lora(values["lora"], faults)
        if "lora" in values
        else _with_type(values.get("adapter"), "adapter", faults),
        freeze=read_patterns(("model", "freeze"), values["freeze"], faults) if "freeze" in values else (),
        kernels=_with_type(values.get("kernels"), "kernels", faults),
        arguments={name: entry for name, entry in values.items() if name not in _NAMES}
        | {name: values[name] for name in ("dtype", "attn_implementation") if name in values},
    )
    return (None if faults else section), faults


def _faults(values: Mapping[str, Any]) -> list[KeyFault]:
    found = []
    if "path" not in values:
        near = [name for name in values if name not in _NAMES]
        meant = nearest("path", near)
        do = f"write `path` instead of `{meant}`" if meant else f"write `{_EXAMPLES['path']}`"
        found.append(KeyFault(("model",), "no `path`", "a model folder, or a model name on the Hub", do))
    for name in _TEXTS:
        if name in values and not isinstance(values[name], str):
            found.append(
                KeyFault(("model", name), describe_value(values[name]), "a name", f"write `{_EXAMPLES[name]}`")
            )
    dtype = values.get("dtype")
    if isinstance(dtype, str) and dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        short = dtype.removeprefix("torch.")
        do = suggest(short, _DTYPES.values(), f"write `{_EXAMPLES['dtype']}`")
        do = f"write `dtype: {_DTYPES[short]}`" if short in _DTYPES else do
        expected = "auto, or a torch dtype: bfloat16, float16, float32"
        found.append(KeyFault(("model", "dtype"), describe_value(dtype), expected, do))
    if "gradient_checkpointing" in values:
        do = "write Trainer(gradient_checkpointing=True), or `accmt sft ... --gradient_checkpointing true`"
        place = ("model", "gradient_checkpointing")
        found.append(KeyFault(place, "an argument of the Trainer", "keys that describe the model", do))
    if "lora" in values and "adapter" in values:
        found.append(KeyFault(("model", "lora"), "both `lora` and `adapter`", "one adapter", "remove one of them"))
    kernels = values.get("kernels")
    kernels = kernels.get("type") if isinstance(kernels, Mapping) else kernels
    if isinstance(kernels, str) and kernels != "liger":
        found.append(KeyFault(("model", "kernels"), describe_value(kernels), "liger", "write `kernels: liger`"))
    kind = values.get("quantization")
    kind = kind.get("type") if isinstance(kind, Mapping) else kind
    if isinstance(kind, str) and kind not in _QUANTIZATIONS and not kind.startswith("torchao:"):
        expected = f"one of {', '.join(_QUANTIZATIONS)}, or `torchao:` followed by the name of its configuration"
        do = suggest(kind, _QUANTIZATIONS, "write `quantization: nf4`")
        found.append(KeyFault(("model", "quantization"), describe_value(kind), expected, do))
    return found


def _lora(value: Any, faults: list[KeyFault]) -> dict[str, Any]:
    """Return a LoRA adapter; `alpha`, `targets` and `dropout` are short for PEFT's names."""
    if not isinstance(value, Mapping):
        do = f"write `{_EXAMPLES['lora']}`"
        faults.append(KeyFault(("model", "lora"), describe_value(value), "a mapping with arguments", do))
        return {}
    for short, name in _SHORT.items():
        if short in value and name in value:
            do = f"remove `{short}`, or `{name}`"
            faults.append(
                KeyFault(("model", "lora", name), f"both `{name}` and its short form `{short}`", "one of them", do)
            )
    return {"type": "Lora", **{_SHORT.get(str(name), str(name)): entry for name, entry in value.items()}}


def _with_type(value: Any, key: str, faults: list[KeyFault]) -> dict[str, Any]:
    """Return a mapping with a `type`; a plain name is the type."""
    if isinstance(value, str):
        return {"type": value}
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        return {str(name): entry for name, entry in value.items()}
    if value is not None:
        do = f"write `{_EXAMPLES[key]}`"
        faults.append(KeyFault(("model", key), describe_value(value), "a name, or a mapping with `type`", do))
    return {}


# ---- Building the model


_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""PEFT's name for the task of a transformers class, by the end of the class name."""

_ALL = "all-linear"
_PARTS = "names of the model's layers"

_BITSANDBYTES: Mapping[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
}


def build_from_hps(hps: HyperParameters) -> Any:
    """Build the model of `hps`, including quantization, frozen parameters and an adapter.

    Raises:
        HyperParameterError: The section `model` is missing, or a library rejects an argument.
        MissingPackageError: PEFT, bitsandbytes, torchao or liger-kernel is needed but not installed.
    """
    section = _require_section(hps)
    arguments = dict(section.arguments)
    if section.quantization:
        arguments["quantization_config"] = _quantization(hps, section)
    adapter = _adapter_config(hps, section) if section.adapter else None
    model = _load(hps, section, arguments)
    if section.kernels:
        _apply_kernels(hps, section, model)
    if section.quantization and section.adapter:
        import peft

        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
    _freeze(hps, model, section.freeze)
    if section.adapter:
        model = _with_adapter(hps, section, model, adapter)
    return model


def load_tokenizer(hps: HyperParameters, rows: str = "sft") -> Any:
    """Return the tokenizer of the model in `hps`, with the chat template of a section for rows of data.

    For a model of images and text, it is the processor.

    Args:
        hps: The hyper-parameters.
        rows: The name of the section.

    Raises:
        HyperParameterError: The section `model` is missing.
        ArgumentFileError: The tokenizer or the chat template does not exist.
    """
    section, of_rows = _require_section(hps), hps.section(rows)
    require("transformers", hps.where("model"))
    import transformers

    folder = Path(section.path)
    if not _is_adapter(section):
        require_model_folder(section.path, hps.where("model", "path"))
    is_bare_adapter = (folder / ADAPTER_CONFIG).is_file() and not (folder / "tokenizer_config.json").is_file()
    path = read_base_name(folder) if is_bare_adapter else section.path
    try:
        reads_images = section.type == "AutoModelForImageTextToText"
        kind: Any = transformers.AutoProcessor if reads_images else transformers.AutoTokenizer
        tokenizer = kind.from_pretrained(path)
    except (OSError, ValueError) as error:
        why, _, _ = str(error).partition("\n")
        expected, do = "tokenizer files next to the model", f'call tokenizer.save_pretrained("{path}") once'
        raise fail(ArgumentFileError, f"tokenizer of {path}", got=why, expected=expected, do=do) from error
    if of_rows is not None and of_rows.chat_template is not None:
        template = Path(of_rows.chat_template)
        if not template.is_file():
            got, where = (
                f"{template}: no such file; the working directory is {Path.cwd()}",
                hps.where(rows, "chat_template"),
            )
            raise fail(ArgumentFileError, where, got=got, expected="a chat template file", do="correct the path")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def _require_section(hps: HyperParameters) -> ModelSection:
    section: ModelSection | None = hps.section("model")
    if section is None:
        do = "add `model: {path: ..., type: AutoModelForCausalLM}` to it, or pass a module to fit"
        raise fail(HyperParameterError, hps.where("model"), got="nothing", expected="a model to train", do=do)
    return section


def _load(hps: HyperParameters, section: ModelSection, arguments: dict[str, Any]) -> Any:
    if not _is_adapter(section):
        require_model_folder(section.path, hps.where("model", "path"))
    kind = find_model_class(section.type, hps.where("model", "type"))
    try:
        with building_for(None) if section.adapter else nullcontext():  # an adapter is sharded together with its model
            return load_pretrained(section.path, kind, **arguments)
    except AccmtError:
        raise
    except ImportError as error:
        why, _, _ = str(error).partition("\n")
        where, expected = _place_of(hps, arguments, why), "all packages that these `from_pretrained` arguments need"
        do = "install the package, or write `attn_implementation: sdpa`" if "ttention" in why else "install the package"
        raise fail(MissingPackageError, where, got=why, expected=expected, do=do) from error
    except RuntimeError as error:
        if not section.quantization:
            raise
        got, do = str(error), "see the report above; change the configuration, or remove `quantization`"
        expected = "a quantization that works for these weights on this device"
        raise fail(
            HyperParameterError, hps.where("model", "quantization"), got=got, expected=expected, do=do
        ) from error
    except (TypeError, ValueError, AttributeError) as error:
        expected = "arguments that `from_pretrained` accepts"
        do = "correct it"
        if unknown := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            do = _advise_name(unknown[1], _NAMES)
        elif section.type is None and _is_adapter(section):
            do = "write `type: AutoModelForCausalLM`, or the class for your task"
        raise fail(
            HyperParameterError, _place_of(hps, arguments, str(error)), got=str(error), expected=expected, do=do
        ) from error


def _is_adapter(section: ModelSection) -> bool:
    return (Path(section.path) / ADAPTER_CONFIG).is_file()


def _place_of(hps: HyperParameters, arguments: Mapping[str, Any], message: str) -> str:
    """Return the location of the argument that a library's message names, or of the section."""
    plain = message.lower().replace(" ", "")
    attention = "attn_implementation" if "flashattention" in plain or "attn_implementation" in plain else None
    named = (name for name in arguments if f"'{name}'" in message)
    return hps.where("model", *filter(None, [next(named, attention if attention in arguments else None)]))


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


def _adapter_config(hps: HyperParameters, section: ModelSection) -> Any:
    """Return PEFT's configuration of an adapter; `lora` accepts short names for some of PEFT's arguments."""
    where = _place_of_adapter(section)
    require("peft", hps.where(*where))
    import peft

    if _is_adapter(section):
        got = f"`{where[-1]}` for {section.path}, which is already an adapter"
        do = f"remove `{where[-1]}` to train that adapter further, or merge it first: accmt merge {section.path} FOLDER"
        raise fail(HyperParameterError, hps.where(*where), got=got, expected="one adapter", do=do)
    values = dict(section.adapter)
    config = _find(hps, where, peft, f"{values.pop('type').removesuffix('Config')}Config", "Config")
    task = next((task for end, task in _TASKS.items() if str(section.type).endswith(end)), None)
    # Reject initializations that PEFT computes from data in a separate call: without it, they are plain LoRA.
    if (kind := values.get("init_lora_weights")) in ("eva", "lora_ga"):
        do = "remove it; or build the model in Python, and pass a module to fit"
        expected = "an initialization that needs no data, such as gaussian, pissa or olora"
        place = hps.where(*where, "init_lora_weights")
        raise fail(HyperParameterError, place, got=f"{kind}, which PEFT computes from data", expected=expected, do=do)
    return _call(hps, where, config, {"task_type": task, **values})


def _place_of_adapter(section: ModelSection) -> tuple[str, str]:
    return ("model", "lora" if section.adapter["type"] == "Lora" else "adapter")


def _with_adapter(hps: HyperParameters, section: ModelSection, model: Any, config: Any) -> Any:
    import peft

    where = _place_of_adapter(section)
    # The model must have every layer that the adapter names; PEFT only requires one of them.
    every = [name for name, _ in model.named_modules() if name]
    targets, saved = section.adapter.get("target_modules") or (), section.adapter.get("modules_to_save") or ()
    path = (*where, _written(hps, where, "target_modules"))
    faults = []
    if isinstance(targets, str):  # a regular expression, or PEFT's `all-linear`
        try:
            fits = targets == _ALL or any(re.fullmatch(targets, name) for name in every)
        except re.error:
            fits = False
        if not fits:
            layers = _layers(model)
            near = nearest(targets, [*layers, _ALL])
            got = f"{targets!r}: a string is a regular expression that must match a layer's full name"
            do = f"write `{near if near == _ALL else f'{path[-1]}: [{near}]'}`; " if near else ""
            faults.append(KeyFault(path, got, _PARTS, f"{do}the model's layers: {', '.join(layers)}"))
    else:
        lacking = [part for part in targets if not any(f".{name}".endswith(f".{part}") for name in every)]
        faults += [_no_such_part(path, part, _layers(model)) for part in lacking]
    ends = sorted({name.rpartition(".")[2] for name in every})
    lacking = [part for part in saved if not any(name.endswith(part) for name in every)]
    faults += [_no_such_part((*where, "modules_to_save"), part, ends) for part in lacking]
    if faults:
        raise hps.reject(faults)
    try:
        return peft.get_peft_model(model, config)
    except (ValueError, TypeError, LookupError, NotImplementedError, RuntimeError, AssertionError) as error:
        is_about_targets = "target" in str(error).lower()
        do = f"set `targets`; the model's layers: {', '.join(_layers(model))}" if is_about_targets else "correct them"
        expected = f"arguments that {type(config).__name__} and the model accept"
        raise fail(HyperParameterError, hps.where(*where), got=str(error), expected=expected, do=do) from error
    except AttributeError as error:  # PEFT's task classes need a model with the matching head
        got, expected = f"{type(model).__name__} for {config.task_type}: {error}", "a model with a head for the task"
        do = "write `type: AutoModelForCausalLM` in `model`, or the class for your task"
        raise fail(HyperParameterError, hps.where(*where), got=got, expected=expected, do=do) from error


def _no_such_part(path: KeyPath, part: str, names: Sequence[str]) -> KeyFault:
    near = nearest(str(part), names)
    do = f"{f'write `{near}`; ' if near else ''}some of the model's layers: {', '.join(names[:12])}"
    return KeyFault(path, f"{part!r}, which matches no layer of the model", _PARTS, do)


def _layers(model: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)})


def _written(hps: HyperParameters, where: tuple[str, ...], name: str) -> str:
    """Return the key as written in the file; it may be the short form of an argument."""
    lora = hps.model.get("lora") if isinstance(hps.model, Mapping) and where[-1] == "lora" else None
    return next((short for short, full in _SHORT.items() if full == name and short in (lora or {})), name)


def _find(hps: HyperParameters, where: tuple[str, ...], library: Any, name: str, ending: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(library, name, None)
    if found is None:
        names = [one for one in dir(library) if one.endswith(ending)]
        do = suggest(name, names, f"choose one of {', '.join(names[:5])}")
        expected = f"a configuration of {library.__name__}"
        raise fail(HyperParameterError, hps.where(*where), got=name, expected=expected, do=do)
    return found


def _apply_kernels(hps: HyperParameters, section: ModelSection, model: Any) -> None:
    """Replace layers and the loss of a model by Liger's kernels."""
    where = ("model", "kernels")
    require("liger_kernel", hps.where(*where))
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as FUNCTIONS  # noqa: N811
    except ImportError as error:
        got, do = f"liger-kernel cannot be imported: {error}", 'pip install "triton>=3"'
        raise fail(
            MissingPackageError, hps.where(*where), got=got, expected="liger-kernel with triton", do=do
        ) from error
    kind = str(model.config.model_type)
    if kind not in FUNCTIONS:
        do = suggest(kind, FUNCTIONS, "remove `kernels`")
        expected = f"a model of {', '.join(sorted(FUNCTIONS))}"
        raise fail(HyperParameterError, hps.where(*where), got=f"a model of {kind}", expected=expected, do=do)
    if not torch.accelerator.is_available() and not os.environ.get("TRITON_INTERPRET"):
        got, do = "no GPU on this machine", "remove `kernels` here; results are the same apart from rounding"
        raise fail(
            HyperParameterError, hps.where(*where), got=got, expected="a GPU: Liger's kernels do not run on CPUs", do=do
        )
    values = {name: value for name, value in section.kernels.items() if name != "type"}
    _call(hps, where, partial(FUNCTIONS[kind], model=model), values)


def _call(
    hps: HyperParameters,
    where: tuple[str, ...],
    config: Callable[..., Any],
    values: Mapping[str, Any],
) -> Any:
    """Call a library's function, after checking the arguments against its signature."""
    function = config.func if isinstance(config, partial) else config
    takes = function.__name__
    try:
        types = get_type_hints(function)  # for a dataclass, those of its fields, including inherited ones
    except NameError:  # a type imported only for type checkers
        types = {}
    parameters = inspect.signature(config).parameters
    bound = config.keywords if isinstance(config, partial) else {}
    names = [name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD and name not in bound]
    faults = []
    for name, value in values.items():
        written = _written(hps, where, name)
        if name not in names:
            do, expected = (
                _advise_name(name, [*(_SHORT if where[-1] == "lora" else ()), *names]),
                f"an argument of {takes}",
            )
            faults.append(KeyFault((*where, name), f"{name} = {describe_value(value)}", expected, do))
        elif not _fits_as_written(value, annotation := types.get(name) or annotation_of(parameters[name])):
            expected = f"{inspect.formatannotation(annotation)} ({takes}'s signature)"
            faults.append(KeyFault((*where, written), describe_value(value), expected, f"correct `{written}`"))
    if faults:
        raise hps.reject(faults)
    try:
        return config(**values)
    except (TypeError, ValueError, AttributeError, AssertionError) as error:
        got, expected = str(error), f"arguments that {takes} accepts"
        raise fail(HyperParameterError, hps.where(*where), got=got, expected=expected, do="correct them") from error


def _fits_as_written(value: Any, annotation: Any) -> bool:
    """Return whether a value from YAML matches a type; types that YAML does not have, such as tuples, match lists.

    Python objects, types that pydantic does not know, and patterns of names (such as "pissa_niter_[number of iters]")
    always match: their users check them.
    """
    from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

    is_pattern = isinstance(value, str) and "[number" in str(annotation)
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
        text = json.dumps(value)
    except (TypeError, PydanticUserError, NameError):
        return True
    try:
        adapter.validate_json(text)
    except ValidationError:
        return is_pattern
    return True


def _advise_name(name: str, names: Sequence[str]) -> str:
    """Return what to write instead of an unknown argument."""
    return f"write `{_INSTEAD[name]}`" if name in _INSTEAD else suggest(name, names, f"remove `{name}`")


def _freeze(hps: HyperParameters, model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters that match; a tied parameter must match under all of its names."""
    every = dict(model.named_parameters(remove_duplicate=False))
    where, expected = hps.where("model", "freeze"), "part of a parameter name"
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in every):
            do = f"correct it; similar names: {', '.join(names_like(pattern, list(every)))}"
            raise fail(
                HyperParameterError,
                where,
                got=f"{pattern!r}, which matches no parameter name",
                expected=expected,
                do=do,
            )
    named = [name for name in every if any(re.search(pattern, name) for pattern in patterns)]
    for name in named:
        tied = [other for other in every if every[other] is every[name] and other not in named]
        if tied:
            got = f"{name} without {tied[0]}, although both are the same tied parameter"
            do = f"write `freeze: [{', '.join([*patterns, tied[0].rpartition('.')[0]])}]`, or freeze neither"
            raise fail(
                HyperParameterError, where, got=got, expected="both names of a tied parameter, or neither", do=do
            )
        every[name].requires_grad = False
