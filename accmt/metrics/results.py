"""Reads the outputs of validation steps and metrics: pairs and numbers."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from accmt.errors import MetricError, ModuleContractError, fail
from accmt.options.checks import as_float


class TooFewSamplesError(MetricError):
    """The samples so far do not suffice to compute a metric; all samples of a set may."""


def metric_error(name: str, got: str, expected: str, do: str) -> MetricError:
    return fail(MetricError, f"metric {name!r}", got=got, expected=expected, do=do)


def is_pair(entry: Any) -> bool:
    """Return whether an entry looks like `(predictions, references)`."""
    return isinstance(entry, tuple | list) and len(entry) == 2


def require_pair(name: str, entry: Any) -> tuple[Any, Any]:
    """Return the predictions and references of an entry."""
    if not is_pair(entry):
        do = f'return {{"{name}": (predictions, references)}}'
        got = f"{name!r}: {describe(entry)}"
        raise fail(ModuleContractError, "validation_step", got=got, expected="(predictions, references)", do=do)
    return entry[0], entry[1]


def find_scalar(value: Any) -> torch.Tensor | None:
    """Return a number, or a tensor or array of one element, as a detached tensor of shape []; None for others."""
    if isinstance(value, torch.Tensor):
        scalar = value.detach() if value.requires_grad else value
        if scalar.ndim == 0:
            return scalar
        return scalar.reshape(()) if scalar.numel() == 1 else None
    if isinstance(value, numbers.Real):
        return torch.tensor(as_float(value), dtype=torch.float64)
    return None


def read_result(name: str, main_metric: str, result: Any) -> dict[str, float]:
    """Return the values that a metric computed, as numbers; waits for the device, unlike `read_scalars`."""
    return {entry: float(scalar) for entry, scalar in read_scalars(name, main_metric, result).items()}


def read_scalars(name: str, main_metric: str, result: Any) -> dict[str, torch.Tensor]:
    """Return the values that a metric computed, as detached tensors of shape []."""
    if not isinstance(result, dict) or main_metric not in result:  # often the number itself
        expected, do = f"a dict with the entry {main_metric!r}", f'return {{"{main_metric}": value}}'
        raise metric_error(name, f"compute returned {describe(result)}", expected, do)
    scalars = {}
    for entry, value in result.items():
        scalar = find_scalar(value)
        if scalar is None:
            do = f'return {{"{entry}": value.item()}}, with one entry per number'
            got = f"compute returned {entry!r}: {describe(value)}"
            raise metric_error(name, got, "a number or a tensor of one element", do)
        scalars[str(entry)] = scalar
    return scalars


def describe(value: Any) -> str:
    """Return the shape of a tensor or array, or the shortened value and its type."""
    shape = getattr(value, "shape", None)
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            return f"a tensor of shape {tuple(value.shape)}"
    elif shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return f"{value!r:.80} ({type(value).__name__})"
