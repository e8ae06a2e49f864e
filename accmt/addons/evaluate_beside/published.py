"""Finds the checkpoints and models that a run has published, and keeps the files of one while it is evaluated."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open

from accmt.checkpoint.manifest import Checkpoint, Manifest, examine, read_manifest
from accmt.checkpoint.retention import list_published
from accmt.errors import WeightsError
from accmt.saving import RUN_KEY, read_status
from accmt.saving.load_weights import require_files
from accmt.saving.model_folder import STATUS_NAME
from accmt.saving.weights import DIGEST_KEY, PICKLE, SAFETENSORS, files_of, find_entry

_TRIES = 20
_BETWEEN_TRIES_S = 0.25


class Origin(NamedTuple):
    """The step that was saved: of which run, in which of its attempts."""

    run_id: str | None
    attempt: int | None
    step: int


@dataclass(frozen=True)
class Published:
    """A checkpoint or a model.

    Attributes:
        folder: Its folder.
        origin: The step.
        digest: What changes whenever another one takes its place.
        is_model: Whether it is a model.
    """

    folder: Path
    origin: Origin
    digest: str
    is_model: bool = False

    @property
    def step(self) -> int:
        return self.origin.step

    @property
    def order(self) -> tuple[int, int, bool]:
        """Oldest first; of the same step, the checkpoint first, which also has the state of callbacks."""
        return self.origin.attempt or 0, self.origin.step, self.is_model


def find_checkpoints(folder: Path, run_name: str) -> list[Published]:
    """Return the checkpoints of a run in its checkpoint folder."""
    found = []
    for place in list_published(folder):
        manifest = read_manifest(place)
        if isinstance(manifest, Manifest) and manifest.info.get("run_name") == run_name:
            info = manifest.info
            origin = Origin(info.get(RUN_KEY), info.get("attempt"), manifest.step)
            found.append(Published(place, origin, manifest.digest))
    return found


def find_models(folder: Path, *, without: Path) -> list[Published]:
    """Return the models in a model folder and its subfolders, except in one of them."""
    found = []
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(place, name) != without and not name.startswith(".")]
        if STATUS_NAME in files and (model := read_model(Path(place))) is not None:
            found.append(model)
    return found


def read_model(folder: Path) -> Published | None:
    """Return the model that a Trainer has saved in a folder; None if there is none."""
    try:
        status = read_status(folder)
        origin = Origin(status[RUN_KEY], status.get("attempt"), status["global_step"])
        return Published(folder, origin, f"{status['digest']} of step {origin.step}", is_model=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass(frozen=True)
class Lineage:
    """Which steps of which attempts the run consists of: a resumed run makes the steps after its checkpoint again.

    Attributes:
        ends: The last valid step of each attempt, by the id of the run and the number of the attempt.
    """

    ends: Mapping[tuple[str | None, int | None], float] = field(default_factory=dict)

    @classmethod
    def of(cls, launches: Sequence[Mapping[str, Any]]) -> Lineage:
        """Read it from the starts of the run."""
        ends: dict[tuple[str | None, int | None], float] = {}
        end = math.inf
        for start in reversed(launches):
            ends.setdefault((start.get(RUN_KEY), start.get("attempt")), end)
            if not start.get("is_resumed"):
                break
            end = min(end, start["step"])
        return cls(ends)

    def has(self, origin: Origin) -> bool:
        """Return whether the run contains a step, so that its row belongs to the history."""
        return origin.step <= self.ends.get((origin.run_id, origin.attempt), -1)


# ---- The files of one, held


def hold(published: Published, *, beside: Path, otherwise: Path) -> Path | str:
    """Link the files into a folder of our own, so that the run may delete or replace them meanwhile.

    A model is replaced file by file: its weights, and then its status. Both are read until they belong together.

    Args:
        published: The checkpoint or model.
        beside: The folder next to which ours is created.
        otherwise: The folder in which it is created if that is not possible.

    Returns:
        The folder, or why there is none.
    """
    place = beside.with_name(f"{beside.name}.evaluated")
    try:
        shutil.rmtree(place, ignore_errors=True)  # of a process that was killed
        place.mkdir()
    except OSError:
        place = otherwise / "evaluated"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    held = place / published.folder.name
    reason = _hold_model(published, held) if published.is_model else _hold_checkpoint(published, held)
    if reason is None:
        return held
    let_go(held)
    return reason


def let_go(held: Path) -> None:
    """Delete the links."""
    shutil.rmtree(held.parent, ignore_errors=True)


def _hold_checkpoint(published: Published, held: Path) -> str | None:
    try:
        files = [path for path in sorted(published.folder.rglob("*")) if not path.is_dir()]
        _link(published.folder, held, [path.relative_to(published.folder).as_posix() for path in files])
        found = examine(held)
    except FileNotFoundError:
        found = None
    if isinstance(found, Checkpoint) and found.manifest.digest == published.digest:
        return None
    if found is None or isinstance(found, Checkpoint) or not published.folder.exists():
        return "the run has deleted it meanwhile; checkpoint_options={'max_checkpoints': 3} keeps more"
    return found.reason


def _hold_model(published: Published, held: Path) -> str | None:
    reason = ""
    for number in range(_TRIES):
        if number:
            time.sleep(_BETWEEN_TRIES_S)
        if _is_replaced(published):
            return "the run has replaced the model meanwhile"
        shutil.rmtree(held, ignore_errors=True)
        try:
            entry = find_entry(published.folder)
            names = set(require_files(published.folder)) | {STATUS_NAME} | ({entry.name} if entry else set())
            _link(published.folder, held, sorted(names))
        except (FileNotFoundError, WeightsError) as error:
            reason = str(error)
            continue
        if _belong_together(held) and not _is_replaced(published):
            return None
        reason = f"its weights are not those of its {STATUS_NAME}: they were replaced without it"
    return reason


def _is_replaced(published: Published) -> bool:
    if not published.digest:  # a model that no Trainer has saved
        return False
    now = read_model(published.folder)
    return now is None or now.digest != published.digest


def _belong_together(held: Path) -> bool:
    """Return whether weights and status are from the same save: the status is written last."""
    status = held / STATUS_NAME
    if not status.exists():
        return True
    digest = read_digest(held)
    if digest is not None:
        return bool(digest == read_status(held).get("digest"))
    return all((held / name).stat().st_mtime_ns <= status.stat().st_mtime_ns for name in require_files(held))


def _link(source: Path, target: Path, names: Sequence[str]) -> None:
    """Copy files by hard links, or as files where the file system has none; a missing status is left out."""
    for name in names:
        copied = target / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        if name == STATUS_NAME and not (source / name).exists():
            continue
        try:
            os.link(source / name, copied)
        except FileNotFoundError:
            raise
        except OSError:
            with suppress(FileExistsError):
                shutil.copy2(source / name, copied)


def read_digest(folder: Path) -> str | None:
    """Return the digest that was saved with the weights of a folder; None if there is none, as in one `.bin` file.

    Raises:
        OSError: The weights cannot be read.
    """
    entry = find_entry(folder)
    if entry is None:
        return None
    if entry.name in (SAFETENSORS.index, PICKLE.index):
        metadata = json.loads(entry.read_text(encoding="utf-8")).get("metadata") or {}
        return metadata.get(DIGEST_KEY)
    path = folder / files_of(entry)[0]
    if path.suffix != SAFETENSORS.extension:
        return None
    with safe_open(path, framework="pt") as file:
        return (file.metadata() or {}).get(DIGEST_KEY)
