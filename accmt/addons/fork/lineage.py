"""Which run is a fork of which: `fork.json` in the folder of a fork, and one file per fork in that of its parent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accmt.addons.launches import find_moved
from accmt.files import dumps, loads, write_text
from accmt.tracking.history import HISTORY_FILE

FORK_FILE = "fork.json"
FORKS_FOLDER = "forks"


@dataclass(frozen=True)
class Origin:
    """Where a fork comes from, as `fork.json` holds it.

    Attributes:
        run_name: The name of the fork.
        run_folder: Its run folder.
        parent: The parent's `run_name`, `run_folder`, its `run_ids` in trackers, and the model and checkpoint folders
            that are `taken` by it and by its own parents.
        step: The step at which the fork begins: up to it, it is the parent.
        checkpoint_step: The step of the parent's checkpoint, from which the steps up to `step` are made again.
        hps: The hyper-parameters of the fork, without secrets.
        arguments: The Trainer's arguments that decide its steps.
        parent_hps: The hyper-parameters with which the parent made its steps up to `step`.
        changes: The hyper-parameters that differ, as text.
        model_path: The model folder in the program, by which its Trainer is found again.
    """

    run_name: str
    run_folder: str
    parent: dict[str, Any]
    step: int
    checkpoint_step: int
    hps: dict[str, Any]
    arguments: dict[str, Any]
    parent_hps: dict[str, Any]
    changes: list[str] = field(default_factory=list)
    model_path: str = ""

    @property
    def parent_folder(self) -> Path:
        return Path(self.parent["run_folder"])

    def write(self, folder: Path) -> None:
        """Write it into the folder of the fork."""
        write_text(folder / FORK_FILE, dumps(asdict(self), indent=2) + "\n")


def read_origin(folder: Path) -> Origin | None:
    """Return where a run comes from, with paths where they are now if its project was moved; None if it is no fork."""
    try:
        content = loads((folder / FORK_FILE).read_text(encoding="utf-8"))
        moved, parent = find_moved(content["run_folder"], folder), content["parent"]
        parent["run_folder"] = moved(parent["run_folder"])
        parent["taken"] = [*parent["taken"], *map(moved, parent["taken"])]
        paths = {"run_folder": str(folder.absolute()), "parent": parent, "model_path": moved(content["model_path"])}
        return Origin(**{name: content[name] for name in Origin.__dataclass_fields__} | paths)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note_fork(parent: Path, folder: Path, about: Mapping[str, Any]) -> None:
    """Write a file about a fork into the folder of its parent."""
    place = parent / FORKS_FOLDER
    place.mkdir(exist_ok=True)
    write_text(place / f"{folder.name}.json", dumps({**about, "run_folder": str(folder)}, indent=2) + "\n")


def find_forks(folder: Path) -> list[Path]:
    """Return the folders of the forks of a run: those beside it, and those that its files name."""
    folder = folder.absolute()
    found: dict[Path, int] = {}
    places = [path.parent for path in sorted(folder.parent.glob(f"*/{FORK_FILE}"))]
    for path in sorted((folder / FORKS_FOLDER).glob("*.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            places.append(Path(loads(path.read_text(encoding="utf-8"))["run_folder"]))
    for place in places:
        origin = read_origin(place)
        if origin is not None and origin.parent_folder == folder:
            found[place.absolute()] = origin.step
    return sorted(found, key=lambda place: (found[place], place.name))


def find_parent(folder: Path) -> Path | None:
    """Return the folder of the run that a fork comes from; None if there is none."""
    origin = read_origin(folder)
    return origin.parent_folder if origin is not None and (origin.parent_folder / HISTORY_FILE).is_file() else None


def ancestors_of(folder: Path) -> list[Path]:
    """Return a run, its parent, the parent of that, and so on."""
    found = [folder.absolute()]
    while (parent := find_parent(found[-1])) is not None and parent.absolute() not in found:
        found.append(parent.absolute())
    return found


def family_of(folder: Path) -> list[Path]:
    """Return a run with its ancestors and all their forks, parents first."""
    return list(_descend(ancestors_of(folder)[-1], set()))


def _descend(folder: Path, seen: set[Path]) -> Iterator[Path]:
    if folder not in seen:
        seen.add(folder)
        yield folder
        for fork in find_forks(folder):
            yield from _descend(fork, seen)
