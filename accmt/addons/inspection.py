"""Inspecting checkpoints without loading, renaming or writing anything."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from accmt.checkpoint.manifest import MANIFEST_NAME, STEP, Damage, Manifest, find_faults, read_manifest
from accmt.checkpoint.retention import PIN_NAME, list_published
from accmt.errors import CheckpointError, NoCheckpointError, fail


@dataclass(frozen=True)
class Inspection:
    """The result of verifying a checkpoint folder.

    Attributes:
        manifest: Its manifest; None if unreadable.
        faults: Each damaged file and its problem; empty if the checkpoint is complete.
        is_known: Whether this accmt can read its format; a resume stops at an unknown format.
        num_tensors: Tensors in its files; 0 if it is not complete.
        num_values: Elements in the model's parameters and buffers, each counted once.
    """

    folder: Path
    manifest: Manifest | None
    faults: tuple[str, ...]
    is_known: bool = True
    num_tensors: int = 0
    num_values: int = 0

    @property
    def is_complete(self) -> bool:
        return not self.faults

    @property
    def is_pinned(self) -> bool:
        return (self.folder / PIN_NAME).exists()


def inspect(path: Path) -> list[Inspection]:
    """Verify every file of a checkpoint, or of all checkpoints in a folder.

    The newest is last; checkpoints without a readable manifest count as newest.
    """
    if (path / MANIFEST_NAME).is_file() or (path.is_dir() and STEP.fullmatch(path.name)):
        return [_inspect_one(path)]
    found = [_inspect_one(folder) for folder in list_published(path)]
    if not found:
        got = "a folder without checkpoints" if path.is_dir() else "a file" if path.exists() else "no such folder"
        expected = f"a checkpoint (a folder with its {MANIFEST_NAME}), or a folder of checkpoints (step-00000120 ...)"
        raise fail(NoCheckpointError, f"checkpoint {path}", got=got, expected=expected, do="check the path")
    return sorted(found, key=lambda one: math.inf if one.manifest is None else one.manifest.sequence)


def find_resumable(found: list[Inspection]) -> Inspection | None:
    """Return the checkpoint that a resume would use: the newest complete one.

    None if there is none, or if one has an unknown format: a resume stops there, so that nothing is lost.
    """
    if not all(one.is_known for one in found):
        return None
    return next((one for one in reversed(found) if one.is_complete), None)


def _inspect_one(folder: Path) -> Inspection:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Inspection(folder, None, (str(error),), is_known=False)
    if isinstance(manifest, Damage):
        return Inspection(folder, None, (manifest.reason,))
    faults = list(find_faults(folder, manifest))
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            faults.append(f"{path.name} does not belong to it, but would be read with it")
    if faults:
        return Inspection(folder, manifest, tuple(faults))
    shapes: list[tuple[str, list[int]]] = []
    for path in (folder / name for name in manifest.files if name.endswith(".safetensors")):
        with safe_open(path, framework="numpy") as file:
            shapes += [(name, file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 - not a dict
    num_values = sum(math.prod(shape) for name, shape in shapes if name.startswith("model."))
    return Inspection(folder, manifest, (), num_tensors=len({name for name, _ in shapes}), num_values=num_values)
