"""Loads saved weights into a model and reports every mismatch in one message."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from accmt.errors import WeightsError, fail
from accmt.messages import say_once
from accmt.precisions import HALVES
from accmt.saving.weights import ENTRY_NAMES, SAFETENSORS, SHARED_KEY, files_of, find_entry, find_tied, plain_names
from accmt.sharded_tensors import class_of, shard_state

_SHOWN = 8


def load_weights(model: nn.Module, folder: Path | str, *, strict: bool = True) -> None:
    """Load the weights in `folder` into `model`, in place; the model keeps its dtype and device.

    The model may be compiled or wrapped for data parallelism, as a whole or in part, regardless of how it was saved.

    Args:
        strict: Whether the model and the folder must have exactly the same weights. Shapes must always match.

    Raises:
        WeightsError: The folder has no weights, a file is missing or damaged, or names or shapes do not match.

    Processes: each loads on its own, also if the model is sharded.
    """
    folder = Path(folder)
    model_names = plain_names(model.state_dict())
    weights = read_weights(folder)
    saved = dict(zip(plain_names(weights).values(), weights.values(), strict=True))
    current = dict(zip(model_names.values(), model.state_dict().values(), strict=True))
    require_fit(saved, current, folder, what=class_of(model).__name__, strict=strict)
    # Log which weights lose precision, such as those of a model loaded in 16 bits and trained in float32.
    rounded = []
    for name in saved.keys() & current.keys():
        if saved[name].dtype == torch.float32 and current[name].dtype in HALVES:
            rounded.append(name)
    if rounded:  # else the saved precision would be lost without a sign
        kind = str(current[min(rounded)].dtype).removeprefix("torch.")
        what = f"{len(rounded)} of {len(saved)} weights in {folder} are float32 and are rounded to the model's {kind}"
        say_once(f'{what}; to keep them, build the model with dtype="float32", or load it from that folder')
    state = {name: saved[plain] for name, plain in model_names.items() if plain in saved}
    # Not strict: `require_fit` has checked it, with tied weights that are saved once.
    model.load_state_dict(shard_state(state, model.state_dict()), strict=False)


def require_fit(
    saved: Mapping[str, Tensor], current: Mapping[str, Tensor], folder: Path, *, what: str, strict: bool = True
) -> None:
    """Check that saved weights match a model, without reading their values."""
    faults = _find_faults(saved, current, strict=strict)
    if faults:
        raise misfit(folder, "; ".join(faults), f"the {len(current)} weights of {what}, with the same names and shapes")


def misfit(folder: Path, got: str, expected: str) -> WeightsError:
    do = "build the model with the arguments it was saved with, or choose the folder that belongs to it"
    return fail(WeightsError, f"weights in {folder}", got=got, expected=expected, do=do)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read all weights in `folder` to the CPU, including tied names."""
    weights: dict[str, Tensor] = {}
    for name in require_files(folder):
        weights |= _read_file(folder / name)
    return weights


def require_files(folder: Path) -> list[str]:
    """Return the names of the weight files in `folder`, after checking that all of them exist."""
    entry = find_entry(folder)
    if entry is None:
        do = "pass the folder of a saved model (the Trainer's model_path, or one of its subfolders)"
        if any(folder.glob("step-*/manifest.json")) or (folder / "manifest.json").is_file():
            do = f"this is a checkpoint: convert it with `accmt get {shlex.quote(str(folder))} OUT`"
        got = "no such folder"
        if folder.is_dir():
            names = sorted(path.name for path in folder.iterdir())
            got = f"a folder with {_list(names)}" if names else "an empty folder"
        elif folder.exists():
            got = "a file, not a folder"
        raise fail(WeightsError, str(folder), got=got, expected=f"one of {', '.join(ENTRY_NAMES)}", do=do)
    try:
        names = files_of(entry)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(entry, error) from error
    missing = [name for name in names if not (entry.parent / name).is_file()]
    if missing:  # an interrupted copy or download
        got, expected = f"missing files: {_list(missing)}", f"all {len(names)} files that it lists, in the same folder"
        do = "copy the whole folder again, or save the model again"
        raise fail(WeightsError, str(entry), got=got, expected=expected, do=do)
    return names


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == SAFETENSORS.extension:
            with safe_open(path, framework="pt") as file:
                weights: dict[str, Tensor] = file.get_tensors()
                tied: dict[str, str] = json.loads((file.metadata() or {}).get(SHARED_KEY, "{}"))
            return weights | {name: weights[first] for name, first in tied.items() if first in weights}
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, UnpicklingError, EOFError) as error:
        raise _damaged(path, error) from error
    # A checkpoint of another trainer often has the weights beside an optimizer's state.
    if not (isinstance(weights, dict) and all(isinstance(value, Tensor) for value in weights.values())):
        raise _damaged(path, TypeError("it contains something other than tensors by name"))
    return weights


def _find_faults(saved: Mapping[str, Tensor], current: Mapping[str, Tensor], *, strict: bool) -> list[str]:
    missing: list[str] = []
    unexpected: list[str] = []
    if strict or saved.keys().isdisjoint(current):  # also if not strict: the weights of another model
        # A saved name comes first, so that the names tied to it are found under it. They need not be saved.
        saved_first = sorted(current, key=lambda name: name not in saved)
        tied = find_tied({name: current[name] for name in saved_first})
        missing = [name for name in current if name not in saved and tied.get(name) not in saved]
        unexpected = [name for name in saved if name not in current]
    shapes = []
    for name, tensor in current.items():
        if name in saved and saved[name].shape != tensor.shape:
            shapes.append(describe_shapes(name, saved[name].shape, tensor.shape))
    faults = {"missing": missing, "unexpected": unexpected, "shapes": shapes}
    return [f"{kind}: {_list(names)}" for kind, names in faults.items() if names]


def describe_shapes(name: str, saved: Sequence[int], current: Sequence[int]) -> str:
    return f"{name} {list(saved)} for {list(current)} in the model"


def _damaged(path: Path, error: Exception) -> WeightsError:
    got, do = f"cannot be read: {error}", "copy it again, or save the model again"
    return fail(WeightsError, str(path), got=got, expected="a complete file", do=do)


def _list(names: Sequence[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:  # a large model has hundreds of weights
        text += f" and {len(names) - _SHOWN} more"
    return text
