"""The facts about a failed step, as a note on its exception: where it failed, its batch and the model's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from accmt.errors import AccmtError, is_out_of_memory
from accmt.processes import num_processes, process_index
from accmt.state import TrainingState

_STAGES = {
    "train": "training", "sanity_check": "the trial before training", "validate": "validation", "test": "testing",
    "predict": "prediction", "tune": "tuning",
}  # fmt: skip
_MOST_LINES = 12
_MOST_VALUES = 10_000_000  # the range of more takes longer than anybody would wait for a message


def add_note_of_step(error: Exception, state: TrainingState, model: nn.Module, batch: Any) -> None:
    """Add a note with the facts that are known about a failed step.

    Args:
        error: The step's exception. Errors of accmt say what to do, and have no note.
        state: The state of the run.
        model: The model, without wrappers.
        batch: The batch on the host: after a failed assertion, GPU memory cannot be read.
    """
    if isinstance(error, AccmtError) or is_out_of_memory(error):
        return
    with suppress(Exception):  # of a batch or layer of the user's class; the step's own error is what matters
        error.add_note("\n".join([_describe_place(state), *_describe_batch(batch), *_describe_layers(model)]))


def _describe_place(state: TrainingState) -> str:
    stage = _STAGES.get(str(state.stage), "a step")
    batch = state.train_step if state.stage == "train" else state.val_step
    place = f"This happened in {stage}, after {state.global_step:,} optimizer steps: epoch {state.epoch}, batch {batch}"
    return f"{place}, process {process_index()}" if num_processes() > 1 else place


def _describe_batch(batch: Any) -> list[str]:
    lines = [f"batch: {type(batch).__name__} of {len(batch)}"] if isinstance(batch, Mapping | list | tuple) else []
    lines += islice(_describe("batch", batch), _MOST_LINES + 1)
    return [f"  {line}" for line in lines[:_MOST_LINES]] + ["  ..."] * (len(lines) > _MOST_LINES)


def _describe(path: str, value: Any) -> Iterator[str]:
    """Yield a line for each value in a batch: its place, type, shape, and the range of whole numbers."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        yield f"{path}: {kind}{list(value.shape)}{place}{_describe_range(value)}"
    elif isinstance(value, np.ndarray):
        yield f"{path}: {value.dtype}{list(value.shape)} of NumPy, not a tensor"
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _describe(f"{path}[{key!r}]", item)
    elif isinstance(value, list | tuple) and not all(isinstance(item, str | bytes | int | float) for item in value):
        for number, item in enumerate(value):
            yield from _describe(f"{path}[{number}]", item)
    elif isinstance(value, list | tuple):
        kinds = " or ".join(sorted({type(item).__name__ for item in value}))
        yield f"{path}: {type(value).__name__} of {len(value)} {kinds or 'values'}, not a tensor"
    else:
        yield f"{path}: {type(value).__name__}"


def _describe_range(value: torch.Tensor) -> str:
    is_readable = value.device.type == "cpu" and value.layout is torch.strided and 0 < value.numel() <= _MOST_VALUES
    if not is_readable or value.is_floating_point() or value.is_complex() or value.dtype is torch.bool:
        return ""
    return f", from {int(value.min())} to {int(value.max())}"


def _describe_layers(model: nn.Module) -> Iterator[str]:
    """Yield the first and the last layer with weights, in the order in which the model defines them."""
    layers = [(name, layer) for name, layer in model.named_modules() if list(layer.parameters(recurse=False))]
    ends = {"first": layers[0], "last": layers[-1]} if len(layers) > 1 else {"only": layers[0]}
    for end, (name, layer) in ends.items():
        yield f"  {end} layer of the model{f', {name}' if name else ''}: {repr(layer).splitlines()[0]}"
