"""Whether a state fits: the model's now with the one that it began with, and with that of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from accmt.checkpoint.nested_tensors import describe_kind, is_made_of_others
from accmt.checkpoint.torch_state_dicts import State
from accmt.checkpoint.typed_json import TensorReference, WrappedTensor
from accmt.errors import CheckpointError, explain


def layout_of(state: State) -> dict[str, str]:
    """Return what a model's state has to have in common with the one that is loaded: names, shapes, dtypes."""
    return {name: _describe(entry) for name, entry in state.items()}


def require_same_layout(begun: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Reject a model whose entries have changed since the run was built: a new model could not load them."""
    if begun == now:
        return
    both = sorted(begun.keys() & now.keys())
    faults = [f"{name} is {now[name]}, and was {begun[name]}" for name in both if begun[name] != now[name]]
    faults += [f"{name} is new" for name in now.keys() - begun.keys()]
    faults += [f"{name} is gone" for name in begun.keys() - now.keys()]
    expected = "the entries, shapes and dtypes that it was built with: only into those a resume can load"
    do = "give a buffer its final size when the model is built, and count how much of it is in use"
    if begun.keys() != now.keys():
        do = "add, replace or prune layers when the module is built, before fit"
    raise CheckpointError(explain("the state of the model", "; ".join(faults[:5]), expected, do))


def require_same_model(ours: State, saved: State, stored: Mapping[str, Any]) -> None:
    """Check that a model has the entries of a checkpoint."""
    faults = [f"{name} is not in the checkpoint" for name in ours.keys() - saved.keys()]
    faults += [f"{name} is not in the model" for name in saved.keys() - ours.keys()]
    for name in ours.keys() & saved.keys():
        got, expected = _describe(ours[name]), _describe(_metadata_of(saved[name], stored))
        if got != expected:
            faults.append(f"{name} is {got} in the model, {expected} in the checkpoint")
    if faults:
        got = f"{len(faults)} differences: " + "; ".join(sorted(faults)[:5])
        do = "build it as in the run that saved, or start a new run with `resume=False`"
        raise CheckpointError(explain("the model", got, "the model that was saved", do))


def _metadata_of(entry: Any, stored: Mapping[str, Any]) -> Any:
    return stored.get(entry.name) if isinstance(entry, TensorReference) else entry


def _describe(entry: Any) -> str:
    if isinstance(entry, Tensor):
        kind = f" {describe_kind(type(entry))}" if is_made_of_others(entry) else ""
        return f"{tuple(entry.shape)} {entry.dtype}{kind}"
    if isinstance(entry, WrappedTensor):
        return f"{entry.size} {entry.dtype} {entry.kind}"
    if isinstance(entry, TensorStorageMetadata):
        return f"{tuple(entry.size)} {entry.properties.dtype}"
    return "missing" if entry is None else "no tensor"


def require_same_number(optimizers: Sequence[Optimizer], saved: Sequence[State]) -> None:
    """Check that there are as many optimizers as in a checkpoint."""
    if len(optimizers) != len(saved):
        expected, do = f"{len(saved)}, as in the checkpoint", "build the ones that were saved"
        raise CheckpointError(explain("the optimizers", str(len(optimizers)), expected, do))
