"""Which run owns a model folder: one run at a time saves there, its status names it, and an earlier model is kept."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from accmt.errors import SavingError, fail
from accmt.files import (
    LOCK_NAME,
    FolderLock,
    FolderTakenError,
    dumps,
    find_surplus,
    fsync_folder,
    loads,
    place_beside,
    place_inside,
    staging_folder,
    write_text,
)
from accmt.options.tracking import Monitor
from accmt.saving.weights import find_entry, stays_inside, weight_files_in
from accmt.secrets import hide

STATUS_NAME = "status.json"
STATUS_VERSION = 1

RUN_KEY = "run_id"
"""The key in `status.json` that identifies the run, across all its interruptions."""

MARK_NAME = "replaced_by.json"
"""A file in a kept model that names the run which replaced it."""


@dataclass(frozen=True)
class ModelFolderClaim:
    """A lock on a model folder, and the folders that were created for it.

    Attributes:
        lock: None on a file system without locks.
        made: Innermost first; those that are still empty at the end are removed.
    """

    lock: FolderLock | None
    made: tuple[Path, ...]

    @classmethod
    def take(cls, folder: Path) -> ModelFolderClaim | None:
        """Lock a folder; None if nothing can be written there, which the first save will report.

        Processes: main only.
        """
        made = tuple(path for path in (folder, *folder.parents) if not path.exists())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return cls(FolderLock.take(folder, "model"), made)
        except FolderTakenError as error:
            got, do = f"in use by another run ({error})", "wait for that run, stop it, or pass another `model_path`"
            expected = "a folder that no other run saves to: each would replace the other's model"
            raise fail(SavingError, f"model folder {folder}", got=got, expected=expected, do=do) from None
        except OSError:
            return None

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()
        with suppress(OSError):  # it is not empty
            for path in self.made:
                path.rmdir()


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Replace `status.json` in `folder` atomically, as strict JSON (infinite numbers and NaN become strings).

    Processes: main only.
    """
    write_text(folder / STATUS_NAME, dumps({"version": STATUS_VERSION, **status}, indent=2) + "\n")


def read_status(folder: Path | str) -> dict[str, Any]:
    """Read the output of `write_status`, including `version`."""
    status: dict[str, Any] = loads((Path(folder) / STATUS_NAME).read_text(encoding="utf-8"))
    return status


def keep_previous(folder: Path, run_id: str) -> Path | None:
    """Keep the model in `folder` as `<folder>.previous`, unless this run saved it.

    The folder is not changed, so that a loader finds a model in it at any moment. Weights are hard-linked, which takes
    no space while both are the same and is safe because nobody modifies these files; files that people edit are copied.
    An existing `.previous` is kept: the name is then `.previous-2`. If nothing can be created next to the folder,
    `previous` inside it is used. Returns None if there is no model or it is this run's.

    Processes: main only.
    """
    if find_entry(folder) is None or holds_model_of(folder, run_id):
        return None
    folder = folder.resolve()  # a link may lead to another disk
    with staging_folder(folder, "previous") as staged:
        for place in find_surplus(folder, 0, _when_kept):
            if _read(place / MARK_NAME).get(RUN_KEY) == run_id:
                return None  # the run was killed after this, before it wrote the status of its own model
        copied = staged / "kept"
        _copy(folder, copied)
        mark = {RUN_KEY: run_id, "files": sorted(_list_files(copied))}
        write_text(copied / MARK_NAME, dumps(mark) + "\n")
        try:
            place = _put(copied, place_beside(folder))
        except OSError:  # the folder around it is another disk, or read-only, as in a container
            place = _put(copied, place_inside(folder))
    (folder / MARK_NAME).unlink(missing_ok=True)  # from here on an ordinary model folder, not a kept one
    return place


def remove_surplus(folder: Path, keep: int | None) -> list[Path]:
    """Delete the kept models of the oldest earlier runs; other files there are kept.

    Processes: main only.
    """
    surplus = find_surplus(folder.resolve(), keep, _when_kept)
    for place in surplus:
        files = _read(place / MARK_NAME).get("files", [])
        for name in [*files, MARK_NAME]:
            (place / name).unlink(missing_ok=True)
        folders = {place}
        for name in files:
            folders.update(map(place.joinpath, PurePath(name).parents))
        for path in sorted(folders, reverse=True):  # deepest first
            with suppress(OSError):  # it contains other files too
                path.rmdir()
    return surplus


def _when_kept(place: Path) -> int | None:
    mark = place / MARK_NAME
    if not mark.is_file():
        return None
    return mark.stat().st_mtime_ns


def holds_model_of(folder: Path, run_id: str) -> bool:
    return _read(folder / STATUS_NAME).get(RUN_KEY) == run_id


def _read(path: Path) -> dict[str, Any]:
    try:
        content = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):  # a file of this name by somebody else
        return {}
    return content


def _copy(folder: Path, target: Path) -> None:
    try:
        weights = weight_files_in(folder)
    except (ValueError, KeyError):  # an index that accmt did not write
        weights = set()  # then everything is copied
    for name in _list_files(folder):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        source = (folder / name).resolve()  # a link may point into the folder that changes
        if name in weights:
            with suppress(OSError):  # a file system without hard links
                os.link(source, target / name)
                continue
        shutil.copy2(source, target / name)


def _list_files(folder: Path) -> set[str]:
    """Return the files of the model; subfolders are other models, unless the status lists files in them."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith((".tmp-", LOCK_NAME))}
    listed = _read(folder / STATUS_NAME).get("files")
    if isinstance(listed, list):  # pretrained models may have a status.json, too
        for name in listed:
            if isinstance(name, str) and stays_inside(name):
                names.add(str(PurePath(name)))
    return {name for name in names if (folder / name).is_file()}


def _put(copied: Path, place: Path) -> Path:
    copied.rename(place)
    fsync_folder(place.parent)
    return place


# ---- Files next to the weights in a model folder: what the model is, its quality, and how it was trained.


CARD_NAME = "README.md"
HPS_NAME = "hps.yaml"
TRAINER_NAME = "trainer_config.json"
_JOINED_OPTIONS = (
    "checkpoint_options",
    "data_options",
    "failures",
    "limit_batches",
    "metric_options",
    "torch_flags",
    "tracker_options",
)
CARD_MARK = "<!-- accmt writes this file again at each save; without this line it is yours and stays as it is. -->"
HPS_MARK = "# accmt writes this file again at each save; without this line it is yours and stays as it is."
TRAINER_MARK = '"hps_config":'


def write_hps(folder: Path, hps: Mapping[str, Any]) -> bool:
    """Write `hps.yaml` for `Trainer(hps_config=...)`, unless there is one that accmt did not write.

    Secrets are omitted.

    Processes: main only.
    """
    import yaml

    text = yaml.safe_dump(hide(dict(hps), leave_out=True), sort_keys=False)
    return replace_own_file(folder / HPS_NAME, HPS_MARK, f"{HPS_MARK}\n{text}")


def write_trainer_config(folder: Path, arguments: Mapping[str, Any]) -> bool:
    """Write `trainer_config.json` for `Trainer.from_config`, unless there is one that accmt did not write.

    Arguments that a file cannot represent, such as callbacks and functions, are omitted; so are secrets.

    Processes: main only.
    """
    plain = hide(_to_plain(arguments), leave_out=True)
    config = {}
    for name, value in plain.items():
        if name in _JOINED_OPTIONS and isinstance(value, dict):  # whose options are checked one by one
            options = {key: item for key, item in value.items() if _can_be_written(item)}
            if options or not value:
                config[name] = options
        elif name != "hps_config" and _can_be_written(value):
            config[name] = value
    config["hps_config"] = hide(arguments["hps_config"], leave_out=True)
    return replace_own_file(folder / TRAINER_NAME, TRAINER_MARK, dumps(config, indent=2) + "\n")


def _to_plain(value: Any) -> Any:
    """Return an argument in a form that a file can represent."""
    match value:
        case Enum():
            return value.name
        case timedelta():
            return {"seconds": value.total_seconds()}
        case Monitor():
            return _to_plain(vars(value))
        case Mapping():
            plain = {}
            for name, item in value.items():
                # JSON keys are strings; `Trainer.from_config` converts them back.
                key = str(name) if type(name) is int else name
                plain[key] = _to_plain(item)
            return plain
        case list() | tuple() | set():
            return list(map(_to_plain, value))
        case _:
            return value


def _can_be_written(value: Any) -> bool:
    try:
        return bool(json.loads(dumps(value)) == value)  # infinity would be read back as a string
    except TypeError:
        return False


def replace_own_file(path: Path, mark: str, text: str) -> bool:
    """Write a file that accmt writes again at each save, and return whether it is accmt's, by its mark."""
    # A card or a config that came with a pretrained model, or that the user has edited.
    if path.is_file() and mark not in path.read_text(encoding="utf-8", errors="replace"):
        return False
    write_text(path, text)
    return True
