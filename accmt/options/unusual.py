"""Unusual ways to write a setting, where the meaning is clear: False, [] or "none" for off, None for the default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field
from typing import Any

_OFF: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("accelerator", "callbacks", "checkpoint_every", "checkpoint_options"),
            "checkpointer",
            *("clip_grad", "collate_fn", "data_options"),
            *("grad_accumulation_steps", "handlers", "log_with", "max_time", "metric_options", "metrics"),
            *("min_length", "model_saving", "model_saving_above", "model_saving_below"),
            *("parallelism", "patience", "profiler", "torch_flags", "tracker_options"),
        )
    ),
    "mixed_precision": "no",
    "limit_batches": 1.0,
    "num_sanity_val_steps": 0,
    "overfit_batches": 0,
    "reload_dataloaders_every_n_epochs": 0,
}
"""Arguments that can be off, and the value that means off."""

_COUNTS = ("enable_model_summary", "fast_dev_run", "resume")
"""Flags that may also be a number, or for which a number could mean something else."""

_LISTS = ("callbacks", "collate_fn", "handlers", "log_with", "metrics", "model_saving")


def is_off(value: Any) -> bool:
    """Return whether a value means off where off is possible: None, False, "none", or an empty list or dict."""
    is_word = isinstance(value, str) and value.lower() == "none"
    return value is None or value is False or is_word or is_empty(value)


def is_empty(value: Any) -> bool:
    """Return whether a value is a list, tuple, set or dict without entries."""
    return isinstance(value, list | tuple | set | Mapping) and not value


def read_arguments(arguments: Mapping[str, Any], arguments_fields: Iterable[Field[Any]]) -> dict[str, Any]:
    """Return the Trainer's arguments with unusual values replaced by the usual ones.

    None stands for the default of an argument for which None has no meaning of its own. Values with more than one
    possible meaning, such as `log_every=0`, stay as they are, and are rejected by the checks.
    """
    read = {name: _read(name, value) for name, value in arguments.items()}
    for field in arguments_fields:
        value, kind = read.get(field.name), str(field.type)
        if value is None and field.default not in (MISSING, None) and "None" not in kind:
            read[field.name] = field.default
        elif kind.startswith("bool") and field.name not in _COUNTS and type(value) is int and value in (0, 1):
            read[field.name] = bool(value)
    return read


def _read(name: str, value: Any) -> Any:
    value = to_python(value)
    if name in _LISTS and isinstance(value, list | tuple):
        kept: list[Any] = []
        for one in value:
            is_repeated = isinstance(one, str | type) and one in kept
            if one is not None and not is_repeated:
                kept.append(one)
        value = kept
    elif name == "patience" and isinstance(value, Mapping):
        value = {watched: to_python(one) for watched, one in value.items() if not is_off(one)}
    elif name == "parallelism" and isinstance(value, Mapping) and all(map(is_off, value.values())):
        value = None
    is_written_off = name in _OFF and (value is False or (_OFF[name] is None and is_off(value)))
    return _OFF[name] if is_written_off else value


def to_python(value: Any) -> Any:
    """Return a NumPy scalar, such as the result of a computation, as a Python number, and other values unchanged."""
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value
