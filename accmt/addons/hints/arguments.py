"""Migration hints for arguments of other trainers, by their names and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from functools import partial
from math import inf
from types import MappingProxyType
from typing import Any, cast

from accmt.addons.hints.components import OPTIMIZERS
from accmt.addons.hints.table import ABOVE, FOREIGN, UP_TO, Row
from accmt.options.checks import is_number
from accmt.options.failures import Failures
from accmt.options.saving import CheckpointOptions

_ROWS: Mapping[str, Row] = {name: row for names in FOREIGN.values() for name, row in names.items()}
_SECTIONS: Mapping[str, Mapping[str, str]] = {
    "optim": {"type": "AdamW", "lr": "1e-4"},
    "scheduler": {"type": "LinearWithWarmup"},
    "model": {"path": "./base", "type": "AutoModelForCausalLM"},
    "sft": {"data": "train.jsonl"},
    "prefer": {"data": "train.jsonl"},
}
"""Sections of the hyper-parameters with the entries that every suggested line has."""

_PLAIN = (type(None), bool, int, float, str, list, tuple, dict)
_VALUE = re.compile(r"<([^<>]*)>")
_ENTRY = re.compile(r"([\w.]+): (<?\[[^\]]*\]>?|[^,]+)")
_WARMUP = ("num_warmup_steps", "warmup_ratio")

EXAMPLE = object()
"""Placeholder for an unknown value: the hint is then the example in the table."""


JOINED: Mapping[str, tuple[str, str]] = {
    **{f"limit_{stage}_batches": ("limit_batches", stage) for stage in ("train", "val", "test", "predict")},
    "consolidate_metrics": ("metric_options", "averages"),
    "additional_metric_consolidation": ("metric_options", "derived"),
    "report_all_metrics": ("metric_options", "report_all"),
    "gather_chunk_size": ("metric_options", "gather_chunk_size"),
    **{name: ("checkpoint_options", name) for name in (field.name for field in fields(CheckpointOptions))},
    **{name: ("failures", name) for name in (field.name for field in fields(Failures))},
    **{name: ("torch_flags", name) for name in ("deterministic", "benchmark", "detect_anomaly")},
    "dataloader_drop_last": ("data_options", "drop_last"),
    "dataloader_persistent_workers": ("data_options", "persistent_workers"),
    "shard_dataloaders": ("data_options", "shard"),
    "batch_device_placement": ("data_options", "device_placement"),
    **{name: ("data_options", name) for name in ("group_by_length", "drop_last", "persistent_workers")},
    "additional_tracker_config": ("tracker_options", "config"),
    "ddp_kwargs": ("parallelism", "ddp"),
}
"""Separate arguments in other trainers that are entries of one argument in accmt."""

REPLACED: Mapping[str, Callable[[Any], str]] = {
    "hooks": lambda value: "callbacks=[...]",
    "batch_sampler": lambda value: 'data_options={"batch_sampler": ...}',
    **{
        f"{name}_{phase}": partial("{0}={{{1!r}: ...}}".format, name, phase)
        for name in ("collate_fn", "sampler")
        for phase in ("train", "val")
    },
    "save_last": lambda value: 'model_saving=["best_valid_loss", "last"]',
    "clip_grad_type": lambda value: f"clip_grad={{{value!r}: 0.5}}",
    "compile_kwargs": lambda value: f"compile={value!r}",
    "enable_checkpointing": lambda value: "checkpoint_every=" + ('"epoch"' if value else "None"),
    "evaluate_every_n_epochs": lambda value: f'evaluate_every_n_steps="{value} epochs"',
    "min_epochs": lambda value: f'min_length="{value} epochs"',
    "min_steps": lambda value: f'min_length="{value} steps"',
}
"""Arguments that accmt expresses with another one, and the line to write."""


def find_foreign(
    name: str, value: Any = EXAMPLE, beside: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, str] | None:
    """Return which trainer has an argument and what to write in accmt, or None for an unknown name.

    Args:
        name: The name.
        value: Its value, which is inserted into the suggested line.
        beside: The other arguments, which may belong into the same line.
    """
    for owner, names in FOREIGN.items():
        if name in names:
            advice = None if value is EXAMPLE else advise(name, value, beside)
            return owner, _write(advice or example_of(name))
    return None


def example_of(name: str) -> str:
    """Return the line to write for a name whose value is unknown or has no equivalent."""
    row = _ROWS[name]
    text = row if isinstance(row, str) else row[0] if isinstance(row, tuple) else next(iter(row.values()))
    line, section = text.partition(" | ")[0], _section_of(name)
    return _VALUE.sub(r"\1", line) if section is None else _write_section(section, [line], {})


def advise(name: str, value: Any, beside: Mapping[str, Any] = MappingProxyType({})) -> str | None:
    """Return the line for an argument with this value, or None if only the example can be shown.

    Arguments of one section of the hyper-parameters share one line. Separate lines would contradict each other: `lr:
    5e-5` in one, and an example of a learning rate in the next.
    """
    given = {each: getattr(item, "value", item) if isinstance(item, Enum) else item for each, item in beside.items()}
    given = {each: item for each, item in given.items() if item is not None}
    value = value.value if isinstance(value, Enum) else value
    both = given.get("per_device_train_batch_size"), given.get("per_device_eval_batch_size")
    if name.startswith("per_device_") and all(isinstance(size, int) for size in both):
        return f"batch_size: {list(both)}"
    if name == "load_best_model_at_end" and value and (best := given.get("metric_for_best_model")):
        return _line_of("metric_for_best_model", best)
    section = _section_of(name)
    alone = _line_of(name, value)
    if section is None:
        return alone and _VALUE.sub(r"\1", alone)
    names = [each for each in _ROWS if each in {name: value, **given} and _section_of(each) == section]
    if len(names) == 1 and not (section == "optim" and ("optim" in given or "optimizer" in given)):
        is_part = alone is not None and alone.startswith(f"{section} + ")
        return _write_section(section, [alone], given) if alone and is_part else alone
    values = {**given, name: value}
    lines = [line for each in names if (line := _line_of(each, values[each], is_joint=True)) is not None]
    parts = [line for line in lines if line.startswith(f"{section} + ")]
    return _write_section(section, parts, given) if parts else alone


def _section_of(name: str) -> str | None:
    row = _ROWS[name]
    text = row if isinstance(row, str) else row[0] if isinstance(row, tuple) else ""
    section, plus, _ = text.partition(" + ")
    return section if plus and section in _SECTIONS else None


def _line_of(name: str, value: Any, *, is_joint: bool = False) -> str | None:
    """Return the line with the value in angle brackets; `is_joint` allows 0 in a line of several values."""
    row = _ROWS[name]
    if isinstance(row, tuple):
        line = row[1](value) if isinstance(value, _PLAIN) or name in ("logger", "report_to", "precision") else None
        return line and line.partition(" | ")[0]
    if not isinstance(value, _PLAIN):
        return None
    if not isinstance(row, str):
        key = False if value is None else value
        return row.get(key) if isinstance(key, str | int) else None
    line, _, off = row.partition(" | ")
    leave = f"leave it out: {off}" if off else None
    found, number = _VALUE.search(line), cast(float, value)
    if found is None:
        is_off = not value or (is_number(value) and number <= 0)
        return leave if is_off or not off else line
    text = _read_value(found[1], value)
    if value is None or value is False or (value == {} and found[1][0] == "{"):
        return leave
    if is_number(value) and not is_joint:
        if number <= ABOVE.get(name, 0):
            return leave
        if number > UP_TO.get(name, inf):
            return None
    return None if text is None else _VALUE.sub(lambda _: f"<{text}>", line)


def _read_value(example: str, value: Any) -> str | None:
    """Return a value as written in the line, if it has the type of the example."""
    if example[0].isdigit():
        return str(value) if is_number(value) else None
    if example[0] == "{":
        return repr(value) if isinstance(value, dict) else None
    if example[0] == "[":
        is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        return f"[{', '.join(value)}]" if is_list else value if isinstance(value, str) else None
    return value if isinstance(value, str) and value else None


def _write_section(section: str, lines: Iterable[str], given: Mapping[str, Any]) -> str:
    """Return one line for parts of a section: values override examples, and examples override the default entries."""
    examples: dict[str, str] = dict(_SECTIONS[section])
    values: dict[str, str] = {}
    for line in lines:
        for key, text in _ENTRY.findall(line.partition(" + ")[2]):
            found = _VALUE.fullmatch(text)
            examples[key] = found[1] if found else text
            values |= {key: found[1]} if found else {}
    entries = examples | values
    if section == "optim":
        _settle_optimizer(entries, values, given)
    if section == "scheduler":
        steps = entries.get(_WARMUP[0], "1")
        if float(steps) < 1 and "." in steps:  # newer versions of transformers treat it as a ratio
            entries |= {_WARMUP[1]: entries.pop(_WARMUP[0])}
        if entries["type"] in ("Constant", "ReduceLROnPlateau"):  # which do not warm up
            entries = {key: text for key, text in entries.items() if key not in _WARMUP}
    if all(name in entries for name in _WARMUP):  # as in other trainers, steps override the ratio
        del entries[_WARMUP[float(entries[_WARMUP[0]]) > 0]]
    if any(key.startswith("lora.") for key in entries):
        entries["lora.targets"] = entries.pop("lora.targets", "all-linear")
    texts: dict[str, str] = {}
    for key, text in entries.items():
        outer, _, inner = key.partition(".")
        texts[outer] = f"{texts[outer]}, {inner}: {text}" if outer in texts else f"{inner}: {text}" if inner else text
    nested = {key.partition(".")[0] for key in entries if "." in key}
    written = [f"{key}: {{{text}}}" if key in nested else f"{key}: {text}" for key, text in texts.items()]
    return f"{section}: {{{', '.join(written)}}}"


def _settle_optimizer(entries: dict[str, str], values: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Insert the optimizer from the other arguments, with the betas that it accepts and without a decay of 0."""
    named = given.get("optim", given.get("optimizer"))
    kind = named.get("type") if isinstance(named, Mapping) else named
    if isinstance(kind, str) and "momentum" not in entries:
        entries["type"] = OPTIMIZERS.get(kind, kind)
    if isinstance(named, Mapping) and "lr" in named and "lr" not in values:
        entries["lr"] = str(named["lr"])
    if not float(entries.get("weight_decay", 0)):
        entries.pop("no_decay", None)
    betas = {name: entries.pop(name) for name in ("beta1", "beta2") if name in entries}
    if entries["type"] == "Adafactor":  # as in transformers' Trainer, at the learning rate that is set
        entries |= {"scale_parameter": "false", "relative_step": "false"}
    if betas and any(kind in entries["type"] for kind in ("Adam", "Lion")):
        entries["betas"] = f"[{float(betas.get('beta1', 0.9))}, {float(betas.get('beta2', 0.999))}]"
    if "Adam" not in entries["type"]:
        entries.pop("eps", None)


def find_replaced(name: str, value: Any) -> str | None:
    """Return the line to write for a name that is an entry of another argument, or is replaced by one."""
    if name in JOINED:
        argument, key = JOINED[name]
        return f'write Trainer({argument}={{"{key}": {value!r}}})'
    return f"write Trainer({REPLACED[name](value)})" if name in REPLACED else None


def _write(here: str) -> str:
    if re.match(r"\w+: ", here):
        return f"write `{here}` in the hyper-parameters"
    if here.startswith(("after fit ", "leave ", "there is ")):
        return here
    is_command = " launch " in here or here.startswith("python ")
    return f"start the program with `{here}`" if is_command else f"write {here}"


def advise_key(key: str, values: Mapping[str, Any]) -> str | None:
    """Return a hint for a key that does not belong into the hyper-parameters, or None if it is unknown.

    Args:
        key: The key.
        values: The values of all keys.
    """
    from accmt.options.settings import Settings

    value = values[key]
    foreign = find_foreign(key, value, values)
    if foreign is not None:
        owner, do = foreign
        return f"{do}: `{key}` is an argument of {owner}"
    if key in ("model_path", *Settings.defaults()):
        return f"write Trainer({key}={value!r}): `{key}` is an argument of the Trainer"
    return None
