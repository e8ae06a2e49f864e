"""The Trainer's arguments about the model folder and about checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Protocol

from accmt.errors import nearest
from accmt.options.checks import (
    Options,
    is_number,
    raise_wrong_value,
    require_flags,
    require_int,
    set_field,
    write_argument,
)
from accmt.options.units import Every, read_every, read_size
from accmt.registry import find, names

_RESUME_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None, "auto": "auto"}
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")  # one slash: `Path` makes one of two


@dataclass(frozen=True)
class RegisteredSaving:
    """A rule that `Trainer.register_model_saving` adds, with thresholds of its own."""

    name: str
    below: float | Mapping[str, float] | None = None
    above: float | Mapping[str, float] | None = None


class Checkpointer(Protocol):
    """What stores checkpoints instead of accmt: `Trainer(checkpointer=...)` takes any object with these two methods.

    Both are called on every process, together.
    """

    def save(self, write: Callable[[Path], object], step: int, *, force: bool) -> None:
        """Store a checkpoint."""

    def load(self) -> Path | None:
        """Return a folder with the files of the checkpoint to continue from; None where there is none."""


def _require_evaluations(name: str, value: Any) -> None:
    read_every(name, value, ["eval"], plain="eval")


def _require_finite(name: str, value: Any, least: float = -inf) -> None:
    if not is_number(value) or not isfinite(value) or value < least:
        expected = "a number from 0" if least == 0 else "a number"
        raise_wrong_value(name, value, expected, write_argument(name, 0.01))


@dataclass(frozen=True, kw_only=True)
class PatienceOptions(Options):
    """What ends training by one value, in place of a number of evaluations.

    Args:
        patience: Evaluations in a row without a better value; without it their number does not end training.
        min_delta: By how much a value has to be better than the best one, to count as better.
        stopping_threshold: Training ends as soon as the value is as good as this.
        check_finite: Whether training ends as soon as the value is NaN or infinite.
    """

    patience: Annotated[int | str, _require_evaluations] | None = None
    min_delta: Annotated[float, partial(_require_finite, least=0)] = 0.0
    stopping_threshold: Annotated[float, _require_finite] | None = None
    check_finite: bool = False

    def check(self, name: str) -> None:
        """Refuse what would never end training."""
        if self.patience is None and not self.may_end:
            expected = "patience, stopping_threshold or check_finite"
            do = 'patience={"valid_loss": PatienceOptions(patience=3, min_delta=0.01)}, for example'
            raise_wrong_value(name, self.to_dict(), expected, do)

    @property
    def may_end(self) -> bool:
        """Whether one evaluation can end training, whatever the number of those before."""
        return self.stopping_threshold is not None or self.check_finite

    @property
    def evaluations(self) -> int | None:
        """`patience` as a number."""
        every = self.patience
        return None if every is None else int(read_every("patience", every, ["eval"], plain="eval").number)


@dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """When and where the model is saved.

    Args:
        model_path: Folder of the saved model; made when something is saved.
        model_saving: When to save: "best_valid_loss", "best_train_loss", "best_<metric>", "always" (at each
            evaluation), None for never, or a list of them, each saved in a folder of its own in `model_path`. Without
            validation data "best_valid_loss" means "best_train_loss": the mean since the last evaluation. Of several
            validation sets "best_<metric>" is the mean, "best_<metric>@<set>" one of them; "best_accuracy/f1" wants
            both to be better. Of equal values the first stays.
        model_saving_below: Saves only while the value that decides is below this; a dict is by name.
        model_saving_above: Saves only while the value that decides is above this; a dict is by name.
        max_shard_size: Largest weight file: bytes, or text such as "5GB".
        safe_serialization: True writes safetensors, tied weights included; False writes `pytorch_model*.bin`.
        save_last: Whether the last weights are saved to `<model_path>/last` too; with `EMA` or `SWA` their average.
        patience: Evaluations in a row without a better value before training ends: a number, or text such as
            "3 evals"; a dict, such as `{"accuracy": 3}`, counts each value for itself, and may hold options of each,
            `{"accuracy": PatienceOptions(patience=3, min_delta=0.001, stopping_threshold=0.99, check_finite=True)}`, or
            dicts of these. A value that is better by less than `min_delta` does not count as better; training ends at
            once where it is as good as `stopping_threshold`, or with `check_finite` where it is NaN or infinite.
            `min_length` holds it back.
    """

    model_path: str | PathLike[str]
    model_saving: str | Sequence[str | None] | None = "best_valid_loss"
    model_saving_below: float | Mapping[str, float] | None = None
    model_saving_above: float | Mapping[str, float] | None = None
    max_shard_size: int | str = "10GB"
    safe_serialization: bool = True
    save_last: bool = False
    patience: int | str | Mapping[str, int | str | PatienceOptions | Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        require_flags(self)
        path = self.model_path
        if not isinstance(path, str | PathLike) or not str(path).strip():
            raise_wrong_value("model_path", path, "the path of a folder", 'model_path="out/my_model"')
        if _URL.match(str(path)):
            do = "mount the remote storage, or copy the folder after training"
            raise_wrong_value("model_path", path, "a folder of this machine", do)
        read_size("max_shard_size", self.max_shard_size)
        if isinstance(self.patience, Mapping):
            items = self.patience.items()
            read = {
                name: PatienceOptions.read("patience", one) if isinstance(one, Mapping) else one for name, one in items
            }
            set_field(self, "patience", read)
        saving: Any = self.model_saving
        rules = saving if isinstance(saving, list | tuple) else [saving]
        if not all(rule is None or isinstance(rule, str) for rule in rules):
            do = "model_saving=None" if saving is False else 'model_saving="best_valid_loss"'
            expected = '"best_valid_loss", "best_train_loss", "best_<metric>", "always", a list of them, or None'
            raise_wrong_value("model_saving", saving, expected, do)

    @property
    def patience_evaluations(self) -> Any:
        """`patience` with numbers for text such as "3 evals"."""

        def read(value: Any) -> Any:
            is_text = isinstance(value, str)
            return int(read_every("patience", value, ["eval"], plain="eval").number) if is_text else value

        patience = self.patience
        return {n: read(v) for n, v in patience.items()} if isinstance(patience, Mapping) else read(patience)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When and where checkpoints are written.

    Args:
        checkpoint: Folder of the checkpoints; None is `<parent of model_path>/checkpoint-<its name>`.
        resume: False starts from the beginning (checkpoints of an earlier run are moved to `<folder>.previous`, and
            back if the run ends before its first own one); True continues from the newest checkpoint; "auto" or None
            continues if there is one; a path continues from that checkpoint, or from the newest one in that folder.
        checkpoint_every: How often: a number of optimizer steps; as a float up to 1.0 a fraction of an epoch; or a
            number and a unit, such as "500 steps", "2 epochs", "0.25 epochs" or "3 evals"; None is never. The end of
            the run is saved too.
        max_checkpoints: How many are kept; None keeps the newest.
        max_previous_runs: How many earlier runs' models and checkpoints are kept (`<folder>.previous`, `.previous-2`
            ...) when a new run starts in their folders; 0 overwrites them, None keeps all.
        checkpointer: An object of yours that stores checkpoints instead: `accmt.Checkpointer`; or the name of one that
            another package adds (an entry point of the group `accmt.checkpointers`).
        async_checkpointing: Whether files are written while training continues.
        reset_optimizer_on_resume: Whether optimizer and scheduler start from the beginning when training resumes.
    """

    checkpoint: str | PathLike[str] | None = None
    resume: bool | str | PathLike[str] | None = False
    checkpoint_every: int | float | str | None = "epoch"
    max_checkpoints: int | None = None
    max_previous_runs: int | None = 3
    checkpointer: Checkpointer | None = None
    async_checkpointing: bool = True
    reset_optimizer_on_resume: bool = False

    def __post_init__(self) -> None:
        require_flags(self)
        self.every  # noqa: B018 - raises what is wrong with it
        if self.max_checkpoints is not None:
            require_int("max_checkpoints", self.max_checkpoints, at_least=1)
        if self.max_previous_runs is not None:
            require_int("max_previous_runs", self.max_previous_runs, at_least=0)
        if isinstance(self.resume, str) and self.resume != "auto":
            _reject_word(self.resume)
        for name in ("checkpoint", "resume"):
            self._check_path(name, getattr(self, name))
        given: Any = self.checkpointer
        if isinstance(given, str):
            object.__setattr__(self, "checkpointer", _make_checkpointer(given))
        if self.checkpointer is not None and not _can_store(self.checkpointer):
            expected = "an object with the methods of accmt.Checkpointer: save(write, step, force) and load()"
            raise_wrong_value("checkpointer", self.checkpointer, expected, "checkpointer=None")

    @staticmethod
    def _check_path(name: str, value: Any) -> None:
        if value is None or isinstance(value, bool) and name == "resume":
            return
        if not isinstance(value, str | PathLike) or not str(value).strip():
            expected = "a folder" if name == "checkpoint" else 'False, True, "auto", None, or the path of a checkpoint'
            raise_wrong_value(name, value, expected, "resume=True" if name == "resume" else 'checkpoint="out/ck"')
        if _URL.match(str(value)):
            do = "mount the remote storage, or copy the folder"
            raise_wrong_value(name, value, "a folder of this machine", do)

    @property
    def every(self) -> Every | None:
        """How often a checkpoint is written; None is never."""
        if self.checkpoint_every is None:
            return None
        return read_every(
            "checkpoint_every", self.checkpoint_every, ("epoch", "step", "eval"), plain="step", fractions=True
        )


def _reject_word(resume: str) -> None:
    """Refuse text that means no path: a word of Python, or nearly one where nothing of that name exists."""
    word = nearest(resume, _RESUME_WORDS, cutoff=0.7)
    if word and (resume.lower() in _RESUME_WORDS or not Path(resume).exists()):
        meant = _RESUME_WORDS[word]
        do = f"resume={meant!r}" + ("" if meant == "auto" else ", without quotes")
        raise_wrong_value("resume", resume, 'True, False, "auto", None, or the path of a checkpoint', do)


def _make_checkpointer(name: str) -> Checkpointer:
    try:
        kind: Callable[[], Checkpointer] = find("accmt.checkpointers", name)
    except KeyError:
        known = names("accmt.checkpointers")
        expected = f"an object with the methods of accmt.Checkpointer, or one of the names {known} that packages add"
        raise_wrong_value("checkpointer", name, expected, f"checkpointer={nearest(name, known)!r}")
    return kind()


def _can_store(checkpointer: Any) -> bool:
    is_object = not isinstance(checkpointer, type)
    return is_object and all(callable(getattr(checkpointer, name, None)) for name in ("save", "load"))
