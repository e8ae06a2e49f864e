"""Whether the disk will hold the checkpoints of a run."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
from torch import nn

from accmt.checkpoint.retention import list_published

_UNITS = ("B", "KB", "MB", "GB", "TB")


def estimate_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return about how many bytes a checkpoint will have, before the optimizer has any state.

    How much state an optimizer keeps per parameter is seen on a parameter of two elements that a copy of it steps.
    """
    weights = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
    trained: int = sum(parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])
    return weights + trained * _state_per_parameter(optimizer)


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

    What the folder's checkpoints occupy now counts as room: they are replaced by those of the run.

    Args:
        bytes_needed: Size of a checkpoint times those kept and one more, which is written before the oldest goes.
        folder: The checkpoint folder, which need not exist yet.
    """
    existing = folder.absolute()
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    occupied = sum(_size_of(path) for path in list_published(folder))
    room = shutil.disk_usage(existing).free + occupied
    if bytes_needed <= room:
        return None
    return (
        f"checkpoints will need {_write_bytes(bytes_needed)} in {folder}, and there is room for {_write_bytes(room)}: "
        "free space there, lower `max_checkpoints`, or pass another `checkpoint` folder"
    )


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _write_bytes(number: int) -> str:
    value, unit = float(number), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {_UNITS[unit]}"
