"""Looking at checkpoints without loading, renaming or writing anything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from accmt.checkpoint.folder_names import STEP
from accmt.checkpoint.manifest import MANIFEST_NAME, Damage, Manifest, find_faults, read_manifest
from accmt.checkpoint.retention import PIN_NAME, list_published
from accmt.errors import CheckpointError, NoCheckpointError, explain


@dataclass(frozen=True)
class Inspection:
    """What was found in the folder of a checkpoint.

    Attributes:
        manifest: What it should hold; None where that cannot be read.
        faults: Each file at fault and what is wrong with it; none: the checkpoint is complete.
        is_known: Whether its format is one that this accmt reads; a resume stops at one that is not.
        num_tensors: Tensors in its files; 0 where it is not complete.
        num_values: Numbers in the model's tensors: its parameters and buffers, each once.
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

    The newest is the last; those without a readable manifest count as newest.
    """
    if (path / MANIFEST_NAME).is_file() or (path.is_dir() and STEP.fullmatch(path.name)):
        return [_inspect_one(path)]
    found = [_inspect_one(folder) for folder in list_published(path)]
    if not found:
        got = "a folder without any" if path.is_dir() else "a file" if path.exists() else "no such folder"
        expected = f"a checkpoint (a folder with its {MANIFEST_NAME}), or a folder of checkpoints (step-00000120 ...)"
        raise NoCheckpointError(explain(f"checkpoint {path}", got, expected, "check the path"))
    return sorted(found, key=lambda one: math.inf if one.manifest is None else one.manifest.sequence)


def find_resumable(found: list[Inspection]) -> Inspection | None:
    """Return the one of a folder's checkpoints that a resume would take: the newest complete one.

    None where there is none, and where one is of an unknown format: there a resume stops, so that nothing is lost.
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
    faults = (*find_faults(folder, manifest), *_find_unexpected(folder, manifest))
    if faults:
        return Inspection(folder, manifest, faults)
    shapes = list(_read_shapes(folder, manifest))
    num_values = sum(math.prod(shape) for name, shape in shapes if name.startswith("model."))
    return Inspection(folder, manifest, (), num_tensors=len({name for name, _ in shapes}), num_values=num_values)


def _find_unexpected(folder: Path, manifest: Manifest) -> Iterator[str]:
    for path in sorted(folder.glob("*.safetensors")):
        if path.name not in manifest.files:
            yield f"{path.name} is not part of it, and would be read with it"


def _read_shapes(folder: Path, manifest: Manifest) -> Iterator[tuple[str, list[int]]]:
    for path in (folder / name for name in manifest.files if name.endswith(".safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_slice(name).get_shape()
