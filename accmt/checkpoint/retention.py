"""Which checkpoint folders are kept, how others are deleted, and where those of an earlier run are moved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accmt.checkpoint.frozen import find_frozen
from accmt.checkpoint.manifest import (
    MANIFEST_NAME,
    SET_ASIDE,
    STEP,
    Damage,
    make_unfinished_name,
    read_manifest,
    step_name,
)
from accmt.checkpoint.state_dicts import model_state
from accmt.errors import CheckpointError
from accmt.files import find_free_name, format_bytes, free_space, fsync_folder
from accmt.messages import warn
from accmt.options.optimizer_and_scheduler_arguments import build_alike, weights_of
from accmt.options.units import Every

PIN_NAME = "PINNED"
"""A file with this name in a checkpoint keeps it permanently."""

KEEP_EVERY = "keep_every\n"
"""The content of this file if accmt wrote it, so that it is not taken for the user's."""


def list_published(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:  # knows which entries are folders without a stat for each
        return sorted(folder / entry.name for entry in entries if STEP.fullmatch(entry.name) and entry.is_dir())


def list_by_age(folder: Path) -> list[tuple[Path, int]]:
    """Return the checkpoints with a readable manifest, each with its sequence number in the folder, oldest first."""
    ages: list[tuple[Path, int]] = []
    for path in list_published(folder):
        with suppress(CheckpointError):  # of a newer accmt, which may need it
            manifest = read_manifest(path)
            if not isinstance(manifest, Damage):
                ages.append((path, manifest.sequence))
    return sorted(ages, key=lambda item: item[1])


def prune(folder: Path, *, newest: Path, num_kept: int) -> None:
    """Delete surplus checkpoints, and damaged ones that are older than the newest.

    Pinned folders stay and do not count. Folders without an accmt manifest are never touched: someone else may have
    written them. A folder that cannot be deleted causes a warning.

    Processes: main only.
    """
    older = [path for path, _ in list_by_age(folder) if path != newest]
    if len(older) >= num_kept:  # otherwise there is no need to inspect each
        older = list(filter(is_deletable, older))
    surplus = older[: max(len(older) - (num_kept - 1), 0)]
    for path in sorted(folder.glob("damaged-*")):
        # Kept until its step has been passed again: a person may still get the furthest weights out of it.
        if SET_ASIDE.fullmatch(path.name) and _step_in(path) <= _step_in(newest) and is_deletable(path):
            surplus.append(path)
    for path in surplus:
        delete(path, step=_step_in(path))


def is_kept_for_good(interval: Every, info: Mapping[str, Any], folder: Path) -> bool:
    """Return whether a new checkpoint is the first one in a new interval, or replaces the one that is kept.

    Args:
        interval: The interval of `keep_every`.
        info: What the manifest of the new checkpoint holds.
        folder: The folder of the run's checkpoints.
    """
    if is_kept_by_interval(folder / step_name(info["global_step"])):
        return True
    number = _interval_of(info, interval)
    for path in reversed(list_published(folder)):
        if (path / PIN_NAME).exists():
            last = read_manifest(path)
            # A checkpoint that another run pinned, in a folder that was continued by this one, says nothing here.
            if not isinstance(last, Damage) and last.info.get("run_name") == info.get("run_name"):
                return number > _interval_of(last.info, interval)
    return number >= 1


def is_kept_by_interval(path: Path) -> bool:
    """Return whether a checkpoint is kept because of `keep_every`, not because a user pinned it."""
    try:
        return (path / PIN_NAME).read_text() == KEEP_EVERY
    except (OSError, UnicodeDecodeError):
        return False


def _interval_of(info: Mapping[str, Any], interval: Every) -> int:
    key = "global_step"
    if interval.unit == "epoch":
        key = "epochs_done"
    counted: int = info[key]
    return int(counted // interval.number)


def is_deletable(path: Path) -> bool:
    """Return whether accmt wrote `path` and nobody pinned it."""
    is_ours = path.is_dir() and not path.is_symlink() and (path / MANIFEST_NAME).is_file()
    return is_ours and not (path / PIN_NAME).exists()


def delete(path: Path, *, step: int) -> None:
    """Delete a checkpoint, renaming it first, so that a kill never leaves half of it. A failure causes a warning."""
    try:
        shutil.rmtree(path.rename(path.with_name(make_unfinished_name("tmp", step))))
    except OSError as error:
        warn(f"could not delete the old checkpoint {path}: {error}")


def publish(staged: Path, step: int) -> Path:
    """Rename a complete, durable checkpoint to its final name, and return that; one with this name is replaced."""
    folder = staged.parent
    published, old = folder / step_name(step), folder / make_unfinished_name("old", step)
    if published.exists():
        published.rename(old)
    try:
        staged.rename(published)
    except OSError:  # without this, the step would have no checkpoint until the next start
        if old.exists():
            old.rename(published)
        raise
    fsync_folder(folder)  # before the old one is deleted: otherwise a power failure could lose both
    if old.exists():
        dispose(old, step=step)
    return published


def dispose(replaced: Path, *, step: int) -> None:
    """Delete a replaced checkpoint, or make it visible if a user pinned it. A failure causes a warning."""
    if is_deletable(replaced) or is_kept_by_interval(replaced):
        delete(replaced, step=step)
        return
    try:
        replaced.rename(find_free_name(replaced.with_name(f"replaced-{step_name(step)}")))
    except OSError as error:
        warn(f"could not rename the replaced checkpoint {replaced}: {error}")


def set_aside(damaged: Path, reason: str) -> None:
    """Rename a checkpoint that cannot be used, with a warning."""
    aside = find_free_name(damaged.with_name(f"damaged-{damaged.name}"))
    try:
        damaged.rename(aside)
        outcome = f"renamed it to {aside.name}"
    except OSError as error:
        outcome = f"could not rename it ({error})"
    warn(f"checkpoint {damaged} is damaged: {reason}; {outcome}")


def move(paths: Sequence[Path], target: Path, *, otherwise: Path) -> Path:
    """Move folders into `target`, or into `otherwise` if they are on another disk; return which one was used."""
    try:
        target.mkdir()
        paths[0].rename(target / paths[0].name)
    except OSError:  # the checkpoint folder is a mount of its own, so that its parent is on another disk
        with suppress(OSError):
            target.rmdir()
        target = otherwise
        target.mkdir()
        paths[0].rename(target / paths[0].name)
    for path in paths[1:]:
        path.rename(target / path.name)
    return target


def move_back(source: Path, folder: Path) -> None:
    """Undo `move`: move the folders in `source` back to `folder`. If interrupted, each is complete in one of them."""
    for path in sorted(source.iterdir(), reverse=True):  # newest first: a resume looks for it
        path.rename(folder / path.name)
    source.rmdir()


def remove(folder: Path) -> None:
    """Delete a folder; warn if that fails."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        warn(f"could not delete leftover checkpoint files: {error}")


def make_durable(folder: Path) -> None:
    """Create a folder that survives a power failure."""
    if folder.is_dir():
        return
    make_durable(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def _step_in(path: Path) -> int:
    match = STEP.fullmatch(path.name) or SET_ASIDE.fullmatch(path.name)
    return int(match[1]) if match else 0


# ---- Whether the disk has enough space for the checkpoints of a run.


def estimate_size(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Estimate the size of a checkpoint in bytes, before the optimizer has any state.

    Leaves out frozen weights under an adapter; frozen weights have no optimizer state. The state per parameter is
    measured by stepping a new optimizer of the same class on a parameter of two elements.
    """
    frozen = find_frozen(model)
    size = estimate_state(optimizer)
    for name, value in model_state(model).items():
        if name not in frozen and isinstance(value, torch.Tensor):
            size += value.nbytes
    return size


def estimate_state(optimizer: torch.optim.Optimizer) -> int:
    """Estimate the size of an optimizer's state in bytes."""
    trained: int = sum(parameter.nbytes for parameter in weights_of(optimizer) if parameter.requires_grad)
    probe = nn.Parameter(torch.zeros(2, 1))
    probe.grad = torch.zeros_like(probe)
    try:
        alike = build_alike(optimizer, optimizer.param_groups[0], probe)
        alike.step()
        state = alike.state[probe].values()
    except Exception:  # noqa: BLE001 - an optimizer of another kind; most keep two values per weight
        return 2 * trained
    # Only values per weight: a step count is a tensor of another shape.
    return trained * sum(isinstance(value, torch.Tensor) and value.shape == probe.shape for value in state)


def find_shortage(bytes_needed: int, folder: Path) -> str | None:
    """Return advice if the checkpoints of a run will not fit on the disk, otherwise None.

    Space used by existing checkpoints in the folder counts as free, because the run replaces them. `bytes_needed`
    includes one extra checkpoint, which is written before the oldest is deleted.
    """
    available = free_space(folder)
    for checkpoint in list_published(folder):
        for path in checkpoint.rglob("*"):
            if path.is_file():
                available += path.stat().st_size
    if bytes_needed <= available:
        return None
    needed, free = format_bytes(bytes_needed), format_bytes(available)
    return (
        f"checkpoints will need {needed} in {folder}, but only {free} are available: "
        "free space there, lower `max_checkpoints`, or pass another `checkpoint` folder"
    )
