"""Whether the disk will hold the checkpoints of a run."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from accmt.checkpoint.frozen import find_frozen
from accmt.checkpoint.retention import list_published
from accmt.checkpoint.torch_state_dicts import model_state
from accmt.files import format_bytes, free_space


def estimate_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return about how many bytes a checkpoint will have, before the optimizer has any state.

    The frozen weights under an adapter are not in it, and nothing frozen has a state. How much state an optimizer keeps
    per parameter is seen on a parameter of two elements that a copy of it steps.
    """
    frozen = find_frozen(model)
    kept = {name: value for name, value in model_state(model).items() if name not in frozen}
    weights = sum(value.nbytes for value in kept.values() if isinstance(value, torch.Tensor))
    return weights + estimate_state(optimizer)


def estimate_state(optimizer: torch.optim.Optimizer) -> int:
    """Return about how many bytes the state of an optimizer will have."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    trained: int = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    return trained * _state_per_parameter(optimizer)


def _state_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    probe = nn.Parameter(torch.zeros(2, 1))
    probe.grad = torch.zeros_like(probe)
    settings = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    try:
        twin = type(optimizer)([probe], **copy.deepcopy(optimizer.defaults))
        twin.param_groups[0].update(settings)
        twin.step()
    except Exception:  # noqa: BLE001 - an optimizer of another kind; most have two values per weight
        return 2
    state = twin.state[probe].values()
    return sum(isinstance(value, torch.Tensor) and value.shape == probe.shape for value in state)


def find_shortage(bytes_needed: int, folder: Path) -> str | None:
    """Say what to change when the checkpoints of a run will not fit; None when they will.

    What the folder's checkpoints occupy now counts as room: they are replaced by those of the run. `bytes_needed` is
    for those kept and one more, which is written before the oldest goes.
    """
    occupied = sum(_size_of(path) for path in list_published(folder))
    room = free_space(folder) + occupied
    if bytes_needed <= room:
        return None
    return (
        f"checkpoints will need {format_bytes(bytes_needed)} in {folder}, and there is room for {format_bytes(room)}: "
        "free space there, lower `max_checkpoints`, or pass another `checkpoint` folder"
    )


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
