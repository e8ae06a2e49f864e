"""The `model` section of the hyper-parameters: which model to build, and how to prepare it for training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accmt.errors import nearest
from accmt.options.checks import is_empty, is_off
from accmt.options.grouping import read_patterns
from accmt.options.yaml_reader import Fault, describe, suggest

QUANTIZATIONS = ("int8", "nf4", "fp4")
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
NAMES = tuple(_EXAMPLES)
_TEXTS = ("path", "type", "dtype", "attn_implementation")
SHORT = {"alpha": "lora_alpha", "targets": "target_modules", "dropout": "lora_dropout"}
"""Short names for arguments of PEFT's `LoraConfig`."""

INSTEAD = {
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
        quantization: `type` is one of `QUANTIZATIONS` or `torchao:...`; the rest are configuration arguments.
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


def read_model_section(value: Any) -> tuple[ModelSection | None, list[Fault]]:
    """Return the section and its errors; arguments are checked later, by the functions that take them."""
    values = {"path": value} if isinstance(value, str) else value
    if not isinstance(values, Mapping):
        got, do = describe(value), f"write `model: {{{_EXAMPLES['path']}}}`"
        return None, [Fault(("model",), got, "a path, or a mapping with `path`", do)]
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
        arguments={name: entry for name, entry in values.items() if name not in NAMES}
        | {name: values[name] for name in ("dtype", "attn_implementation") if name in values},
    )
    return (None if faults else section), faults


def _faults(values: Mapping[str, Any]) -> list[Fault]:
    found = []
    if "path" not in values:
        near = [name for name in values if name not in NAMES]
        meant = nearest("path", near)
        do = f"write `path` instead of `{meant}`" if meant else f"write `{_EXAMPLES['path']}`"
        found.append(Fault(("model",), "no `path`", "a model folder, or a model name on the Hub", do))
    for name in _TEXTS:
        if name in values and not isinstance(values[name], str):
            found.append(Fault(("model", name), describe(values[name]), "a name", f"write `{_EXAMPLES[name]}`"))
    if isinstance(dtype := values.get("dtype"), str):
        import torch

        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            short = dtype.removeprefix("torch.")
            if short in _DTYPES:
                do = f"write `dtype: {_DTYPES[short]}`"
            else:
                do = suggest(short, _DTYPES.values(), f"write `{_EXAMPLES['dtype']}`")
            expected = "auto, or a torch dtype: bfloat16, float16, float32"
            found.append(Fault(("model", "dtype"), describe(dtype), expected, do))
    if "gradient_checkpointing" in values:
        do = "write Trainer(gradient_checkpointing=True), or `accmt sft ... --gradient_checkpointing true`"
        place = ("model", "gradient_checkpointing")
        found.append(Fault(place, "an argument of the Trainer", "keys that describe the model", do))
    if "lora" in values and "adapter" in values:
        found.append(Fault(("model", "lora"), "both `lora` and `adapter`", "one adapter", "remove one of them"))
    kernels = values.get("kernels")
    kernels = kernels.get("type") if isinstance(kernels, Mapping) else kernels
    if isinstance(kernels, str) and kernels != "liger":
        found.append(Fault(("model", "kernels"), describe(kernels), "liger", "write `kernels: liger`"))
    kind = values.get("quantization")
    kind = kind.get("type") if isinstance(kind, Mapping) else kind
    if isinstance(kind, str) and kind not in QUANTIZATIONS and not kind.startswith("torchao:"):
        expected = f"one of {', '.join(QUANTIZATIONS)}, or `torchao:` followed by the name of its configuration"
        do = suggest(kind, QUANTIZATIONS, "write `quantization: nf4`")
        found.append(Fault(("model", "quantization"), describe(kind), expected, do))
    return found


def _lora(value: Any, faults: list[Fault]) -> dict[str, Any]:
    """Return a LoRA adapter; `alpha`, `targets` and `dropout` are short for PEFT's names."""
    if not isinstance(value, Mapping):
        do = f"write `{_EXAMPLES['lora']}`"
        faults.append(Fault(("model", "lora"), describe(value), "a mapping with arguments", do))
        return {}
    for short, name in SHORT.items():
        if short in value and name in value:
            do = f"remove `{short}`, or `{name}`"
            faults.append(
                Fault(("model", "lora", name), f"both `{name}` and its short form `{short}`", "one of them", do)
            )
    return {"type": "Lora", **{SHORT.get(str(name), str(name)): entry for name, entry in value.items()}}


def _with_type(value: Any, key: str, faults: list[Fault]) -> dict[str, Any]:
    """Return a mapping with a `type`; a plain name is the type."""
    if isinstance(value, str):
        return {"type": value}
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        return {str(name): entry for name, entry in value.items()}
    if value is not None:
        do = f"write `{_EXAMPLES[key]}`"
        faults.append(Fault(("model", key), describe(value), "a name, or a mapping with `type`", do))
    return {}
