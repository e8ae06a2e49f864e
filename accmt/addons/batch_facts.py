"""The facts about a failure in code of others, as a note on its exception: where it was, the batch, the layers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from traceback import walk_tb
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
_HAPPENED = "This happened"
_MOST_LINES = 12
_MOST_VALUES = 10_000_000  # the range of more takes longer than anybody would wait for a message


_BACKWARD = "the backward pass"
_PHASES = {
    ("/accmt/optimization/stepper.py", "backward"): _BACKWARD,
    ("/accmt/optimization/stepper.py", "step"): "the optimizer step",
    ("/accmt/metrics/", ""): "computing the metrics",
    ("/accmt/run/checkpoints.py", ""): "writing a checkpoint",
    ("/accmt/run/model_saver.py", ""): "saving the model",
}
"""What accmt does in a file or folder, and in its functions if they are named, for an error of code that it calls."""


def add_note_of_phase(error: Exception, state: TrainingState) -> None:
    """Add a note that says what accmt was doing when it called the code that failed.

    Args:
        error: The exception. Errors of accmt, and those of a step, say where they happened.
        state: The state of the run.
    """
    if isinstance(error, AccmtError) or any(note.startswith(_HAPPENED) for note in getattr(error, "__notes__", ())):
        return
    phase = None
    for frame, _ in walk_tb(error.__traceback__):
        file, function = frame.f_code.co_filename.replace(os.sep, "/"), frame.f_code.co_name
        for (part, name), description in _PHASES.items():
            if part in file and name in function:
                phase = description
    if phase is not None:
        error.add_note(_describe_place(state, phase, has_batch=phase == _BACKWARD))


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
        stage = _STAGES.get(str(state.stage), "a step")
        error.add_note(
            "\n".join(
                [_describe_place(state, stage, has_batch=True), *_describe_batch(batch), *_describe_layers(model)]
            )
        )


def _describe_place(state: TrainingState, phase: str, *, has_batch: bool) -> str:
    place = f"{_HAPPENED} in {phase}, after {state.global_step:,} optimizer steps"
    if has_batch:  # the optimizer step has all batches of its window, and the metrics those of a set
        batch = state.train_step if state.stage == "train" else state.val_step
        place += f": batch {batch} of epoch {state.epoch + 1}"
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
