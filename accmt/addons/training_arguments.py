"""Reads `TrainingArguments` of transformers: hyper-parameters, and arguments of the Trainer.

The lines of the migration hints are what is applied, so that an error and a conversion never differ.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from inspect import signature
from typing import Any, cast

import yaml

import accmt
from accmt.addons.hints.arguments import advise, example_of, find_foreign, find_replaced
from accmt.addons.hints.components import SCHEDULERS
from accmt.addons.hub import PushToHub
from accmt.errors import ArgumentError, HyperParameterTypeError, describe_value, fail
from accmt.messages import warn_once
from accmt.options.settings import Settings
from accmt.options.yaml_reader import FIELDS
from accmt.registry import names

_OTHER_DEFAULTS = {
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "learning_rate",
    "logging_steps",
    "lr_scheduler_type",
    "max_grad_norm",
    "num_train_epochs",
    "per_device_eval_batch_size",
    "per_device_train_batch_size",
    "save_steps",
    "seed",
    "warmup_steps",
    "weight_decay",
}
"""Arguments with another default in accmt, or without one: they are applied even if nobody set them."""

_REMARK = "  # "

_RENAMED = {"output_dir": "model_path", "parallelism_config": "parallelism"}

_READ_WITH_OTHERS = (
    *("activation_checkpointing", "activation_checkpointing_kwargs"),  # mirrored by their older names
    *("optim", "optim_args", "lr_scheduler_kwargs", "fsdp_config", "greater_is_better"),
    *("hub_model_id", "hub_token", "hub_private_repo", "hub_revision"),
    *("generation_max_length", "generation_num_beams", "predict_with_generate", "warmup_ratio"),
)
"""Arguments that change what others are converted to."""


def is_training_arguments(source: object) -> bool:
    """Return whether an object is a `TrainingArguments`, or of a subclass such as `Seq2SeqTrainingArguments`."""
    return is_dataclass(source) and hasattr(source, "output_dir") and hasattr(source, "num_train_epochs")


def read_source(source: object) -> dict[str, Any]:
    """Return the hyper-parameters in a `TrainingArguments`.

    Raises:
        HyperParameterTypeError: It is something else.
    """
    if is_training_arguments(source):
        return _convert(source)[0]
    do = "pass config.to_dict()" if hasattr(source, "to_dict") else 'pass hps_config="hps.yaml", the path of your file'
    raise fail(
        HyperParameterTypeError,
        "hps_config",
        got=describe_value(source),
        expected="a path to a .yaml, .yml or .json file, a dict, HyperParameters, or TrainingArguments",
        do=do,
    )


def read_arguments(hps_config: Any, *positional: Any, **explicit: Any) -> dict[str, Any]:
    """Return the Trainer's arguments for a `TrainingArguments`, or for another dataclass in its place.

    Args:
        hps_config: The object.
        positional: The Trainer's arguments after `hps_config`.
        explicit: Its keywords. They take precedence, and may be hyper-parameters too.
    """
    explicit |= zip(list(signature(accmt.Trainer).parameters)[1:], positional, strict=False)
    if not is_training_arguments(hps_config):
        return {"hps_config": hps_config, **explicit}
    hps, converted, skipped = _convert(hps_config)
    hps |= {name: explicit.pop(name) for name in FIELDS if name in explicit and name != "model"}
    if "callbacks" in converted and explicit.get("callbacks"):  # an upload is not given up for another callback
        callbacks = explicit["callbacks"]
        listed = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
        explicit["callbacks"] = [*listed, converted["callbacks"]]
    if skipped:
        kind = type(hps_config).__name__
        warn_once(f"{kind}: not applied: {'; '.join(skipped)}", about=f"what of {kind} is not applied")
    return {"hps_config": hps, **converted, **explicit}


def _convert(arguments: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return hyper-parameters, arguments of the Trainer, and a note on each value that has no equivalent."""
    values, beside = _find_values(arguments), {name: getattr(arguments, name) for name in _names_of(arguments)}
    beside["warmup_ratio"] = beside.get("warmup_ratio") or 0.0  # else the line would have an example
    hps: dict[str, Any] = {}
    converted: dict[str, Any] = {}
    skipped: list[str] = []
    for name, value in values.items():
        renamed = _RENAMED.get(name, name)
        if renamed in FIELDS:
            hps[renamed] = value
        elif renamed == "model_path" or renamed in Settings.defaults():
            _merge(converted, {renamed: value})
        else:
            line = (find_replaced(name, value) or _advise(name, value, beside)).removeprefix("write ")
            part = _read_line(line)
            _merge(converted if line.startswith("Trainer(") else hps, part or {})
            if part is None or _REMARK in line:
                skipped.append(f"{name}={value!r}" + (f" ({line})" if line else ""))
    _add_details(arguments, hps, converted)
    return hps, converted, skipped


def _advise(name: str, value: Any, beside: Mapping[str, Any]) -> str:
    """Return the line for a value; if there is only an example, which must not be applied, as a remark."""
    if find_foreign(name) is None:
        return ""
    example = example_of(name)
    return advise(name, value, beside) or (example if example.startswith("leave ") else f"such as {example}")


def _names_of(arguments: Any) -> list[str]:
    return [field.name for field in fields(arguments)]


def _find_values(arguments: Any) -> dict[str, Any]:
    """Return the values to convert: those that were set, and those with another default in accmt."""
    values: dict[str, Any] = {}
    for field in fields(arguments):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        value = getattr(arguments, field.name)
        value = value.value if isinstance(value, Enum) else value
        if (
            is_dataclass(value) and not isinstance(value, type) and field.name != "parallelism_config"
        ):  # Accelerate's options, which are always set
            default = type(value)()
        is_off = value is None or (not value and not default)
        if field.name in _OTHER_DEFAULTS or not (is_off or value == default or field.name in _READ_WITH_OTHERS):
            values[field.name] = value
    for event in ("eval", "save", "logging"):
        strategy, steps = getattr(arguments, f"{event}_strategy"), getattr(arguments, f"{event}_steps")
        if strategy == "steps" and 0 < steps < 1:
            where, expected = f"TrainingArguments({event}_steps={steps})", "a number of steps"
            do = f"{event}_steps=100"
            raise fail(ArgumentError, where, got="a fraction of the run", expected=expected, do=do)
        if strategy == "steps":
            values[f"{event}_steps"] = steps
        values.pop(f"{event}_strategy" if strategy == "steps" else f"{event}_steps", None)
    if arguments.lr_scheduler_type not in SCHEDULERS:
        where, got = "TrainingArguments(lr_scheduler_type=...)", repr(values["lr_scheduler_type"])
        expected, do = f"one of {', '.join(SCHEDULERS)}", 'lr_scheduler_type="cosine"'
        raise fail(ArgumentError, where, got=got, expected=expected, do=do)
    if not arguments.load_best_model_at_end and arguments.save_strategy != "best":
        values.pop("metric_for_best_model", None)
    if arguments.max_steps > 0:  # it overrides the epochs
        del values["num_train_epochs"]
    return values


def _read_line(line: str) -> dict[str, Any] | None:
    """Return the values in a line of the hints, or None if it is not one that only sets values."""
    if line.startswith("leave "):
        return {}
    if line.startswith("Trainer("):
        call = ast.parse(line.partition("), and ")[0], mode="eval").body
        try:
            return {str(keyword.arg): _evaluate(keyword.value) for keyword in cast(ast.Call, call).keywords}
        except ValueError:  # an object that only the user can create
            return None
    # The others have examples, such as the path of a model.
    return (
        yaml.safe_load(line) if re.match(r"(batch_size|epochs|max_micro_batch_size|optim|scheduler): ", line) else None
    )


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.List):
        return [_evaluate(item) for item in node.elts]
    return getattr(accmt, node.attr) if isinstance(node, ast.Attribute) else ast.literal_eval(node)


def _merge(values: dict[str, Any], added: dict[str, Any]) -> None:
    for name, value in added.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _add_details(arguments: Any, hps: dict[str, Any], converted: dict[str, Any]) -> None:
    """Add what depends on several values."""
    beside = {name: getattr(arguments, name) for name in _names_of(arguments)}
    if arguments.max_steps > 0:
        hps["epochs"] = -1
    for pair in filter(None, (arguments.optim_args or "").replace(" ", "").split(",")):
        name, _, value = pair.partition("=")
        hps["optim"][name] = yaml.safe_load(value)
    hps["scheduler"] |= arguments.lr_scheduler_kwargs or {}
    if plugin := getattr(arguments, "fsdp_plugin_args", None):
        converted["parallelism"] = {"fsdp": plugin}
    if arguments.push_to_hub and arguments.hub_model_id:
        options = {"private": arguments.hub_private_repo, "token": arguments.hub_token}
        revision = beside.get("hub_revision")
        converted["callbacks"] = PushToHub(arguments.hub_model_id, revision=revision, **options)
    if beside.get("predict_with_generate"):
        lengths = {"max_length": "generation_max_length", "num_beams": "generation_num_beams"}
        generate = {name: beside[theirs] for name, theirs in lengths.items() if beside[theirs] is not None}
        hps["evaluation"] = {"generate": generate or True}
    metrics = converted.get("metrics")
    if metrics and metrics[0] not in names("accmt.metrics"):  # reported by a step: only its direction is unknown
        converted["metrics"] = {metrics[0]: "max" if arguments.greater_is_better else "min"}
