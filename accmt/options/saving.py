"""Trainer arguments about the model folder and checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias, runtime_checkable

from accmt.errors import nearest
from accmt.options.checks import (
    Expected,
    Group,
    Off,
    Options,
    Range,
    is_off,
    raise_wrong_value,
    set_field,
    to_python,
)
from accmt.options.units import Every, read_every, read_size
from accmt.registry import addon, find, names

_RESUME_WORDS = {"true": True, "yes": True, "false": False, "no": False, "none": None, "auto": "auto"}
_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")  # one slash: `Path` collapses two


LAST = "last"
"""The entry of `model_saving` for the weights at the end of training."""


@dataclass(frozen=True)
class RegisteredSaving:
    """A saving rule added by `Trainer.register_model_saving`, with its thresholds."""

    name: str
    below: float | Mapping[str, float] | None = None
    above: float | Mapping[str, float] | None = None


@runtime_checkable
class Checkpointer(Protocol):
    """Custom checkpoint storage: `Trainer(checkpointer=...)` accepts any object with these two methods.

    Both are called on all processes together.
    """

    def save(self, write: Callable[[Path], object], step: int, *, force: bool) -> None:
        """Store a checkpoint."""

    def load(self) -> Path | None:
        """Return a folder with the files of the checkpoint to resume from; None if there is none."""


_read_evaluations = partial(read_every, units=["eval"], plain="eval")
_read_steps_or_epochs = partial(read_every, units=["epoch", "step"], plain="step")
_read_checkpoint_interval = partial(
    read_every, units=("epoch", "step", "eval", "second", "auto"), plain="step", fractions=True
)
_PATH = Expected("a folder path", '"out/my_model"')
_FORK = Expected("a run folder, @ and a step", '"logs/news/run-a@1200"')
_DELTA = Expected("a number from 0", "0.01")
_THRESHOLD = Expected("a number", "0.01")
_THRESHOLDS = Expected("a number, or a dict of numbers by name", "0.5")
_PATIENCE = Expected("a whole number of evaluations from 1, such as 3 or '3 evals', or a dict of them by value", "3")
_RULES = Expected(
    '"best_valid_loss", "best_train_loss", "best_<metric>", "always", "last", a list of them, or None',
    '"best_valid_loss"',
)

Thresholds: TypeAlias = Annotated[float | Mapping[str, float] | None, _THRESHOLDS, Off()]
"""A bound for all results by which models are saved, or one for each name."""

Evaluations: TypeAlias = Annotated[int, Range(ge=1)] | str
"""A number of evaluations, or a number with a unit."""


@dataclass(frozen=True, kw_only=True)
class PatienceOptions(Options):
    """Early stopping by one value.

    Args:
        patience: Consecutive evaluations without improvement after which training ends. None means no limit.
        min_delta: Minimum difference from the best value that counts as an improvement.
        stopping_threshold: Training ends as soon as the value reaches this threshold.
        check_finite: Whether training ends as soon as the value is NaN or infinite.
    """

    patience: Annotated[int | str | None, _read_evaluations, Off()] = None
    min_delta: Annotated[float, Range(ge=0, lt=inf), _DELTA] = 0.0
    stopping_threshold: Annotated[Annotated[float, Range(gt=-inf, lt=inf)] | None, _THRESHOLD, Off()] = None
    check_finite: bool = False

    def check(self, name: str) -> None:
        """Reject options that would never end training."""
        # Such options look like early stopping, but would never stop.
        if self.patience is None and not self.may_end:
            expected = "patience, stopping_threshold or check_finite"
            do = 'for example patience={"valid_loss": PatienceOptions(patience=3, min_delta=0.01)}'
            raise_wrong_value(name, self.to_dict(), expected, do)

    @property
    def may_end(self) -> bool:
        """Whether a single evaluation can end training."""
        return self.stopping_threshold is not None or self.check_finite

    @property
    def evaluations(self) -> int | None:
        """`patience` as a number."""
        evaluations: int | None = _count_evaluations(self.patience)
        return evaluations


def _name_of_url(url: str) -> str:
    """Return the last part of a URL's path; "" if it has none."""
    _, _, path = url.partition("://")
    return path.rstrip("/").rpartition("/")[2]


def _require_model_path(name: str, value: Any) -> None:
    """Reject what `Path` would take for another folder than the user means."""
    if not str(value).strip():
        raise_wrong_value(name, value, _PATH.text, f"model_path={_PATH.example}")
    if _URL.match(str(value)) and not (isinstance(value, str) and _name_of_url(value)):
        do = 'model_path="s3://bucket/models/news"'
        raise_wrong_value(name, value, "a local folder, or a URL as a string that ends in a name", do)
    # A callback writes to the Hub, not the uploads to object storage.
    if str(value).startswith("hf://"):
        do = 'pass a local `model_path`, and callbacks=PushToHub("user/name")'
        raise_wrong_value(name, value, "a local folder, or the URL of object storage", do)


@dataclass(frozen=True, kw_only=True)
class SavingSettings(Group):
    """Saving the model.

    Args:
        model_path: Folder of the saved model, created on the first save. With a URL, such as "s3://bucket/models/news",
            the folder is `out/news`, and saved models are also uploaded there.
        model_saving: Which model to save: "best_valid_loss", "best_train_loss", "best_<metric>", "always" (at each
            evaluation), "last" (at the end, in `<model_path>/last`), None, or a list of these. Without validation data,
            "best_valid_loss" means "best_train_loss". With several validation sets, "best_<metric>" uses the mean over
            the sets, and "best_<metric>@<set>" one set. "best_accuracy/f1" requires both metrics to improve.
        model_saving_below: Save only if the monitored value is below this limit. A dict sets limits by name.
        model_saving_above: Save only if the monitored value is above this limit. A dict sets limits by name.
        max_shard_size: Maximum size of a weight file: bytes, or a string such as "5GB".
        safe_serialization: True writes safetensors, including tied weights; False writes `pytorch_model*.bin`.
        patience: Consecutive evaluations without improvement after which training ends, such as 3 or "3 evals". A dict,
            such as `{"accuracy": 3}`, counts separately for each value, and can contain `PatienceOptions`.
    """

    model_path: Annotated[str | PathLike[str], _PATH, _require_model_path]
    model_saving: Annotated[str | Sequence[str | None] | None, _RULES, Off()] = "best_valid_loss"
    model_saving_below: Thresholds = None
    model_saving_above: Thresholds = None
    max_shard_size: Annotated[int | str, read_size] = "10GB"
    safe_serialization: bool = True
    patience: Annotated[
        Evaluations | Mapping[str, Evaluations | PatienceOptions | Mapping[str, Any]] | None, _PATIENCE, Off()
    ] = None

    def __post_init__(self) -> None:
        patience: Any = self.patience
        if isinstance(patience, Mapping):
            read = {}
            for name, value in patience.items():
                if isinstance(value, Mapping) and value:
                    read[name] = PatienceOptions.read(f"patience.{name}", value)
                elif not is_off(value):
                    read[name] = to_python(value)
            set_field(self, "patience", read)
        super().__post_init__()

    @property
    def model_url(self) -> str | None:
        """`model_path` if it is a URL: models are saved in a local folder, and copied there."""
        return self.model_path if isinstance(self.model_path, str) and _URL.match(self.model_path) else None

    @property
    def local_model_path(self) -> str | PathLike[str]:
        """The local model folder."""
        return self.model_path if self.model_url is None else Path("out", _name_of_url(self.model_url))

    @property
    def rule(self) -> str | Sequence[str | None] | None:
        """`model_saving` without "last"."""
        if self.model_saving == LAST:
            return None
        if isinstance(self.model_saving, str) or self.model_saving is None:
            return self.model_saving
        return [rule for rule in self.model_saving if rule != LAST] or None

    @property
    def saves_last(self) -> bool:
        """Whether to save the last weights."""
        return self.model_saving is not None and self.rule != self.model_saving

    @property
    def patience_evaluations(self) -> Any:
        """`patience` with numbers in place of strings such as "3 evals"."""
        patience = self.patience
        if isinstance(patience, Mapping):
            return {name: _count_evaluations(value) for name, value in patience.items()}
        return _count_evaluations(patience)


def _count_evaluations(patience: Any) -> Any:
    """Return the number in a string such as "3 evals", and any other value unchanged."""
    return int(_read_evaluations("patience", patience).number) if isinstance(patience, str) else patience


def _require_folder(name: str, value: Any) -> None:
    # An empty path is the working folder.
    if not isinstance(value, str | PathLike) or not str(value).strip():
        raise_wrong_value(name, value, "a folder", f'{name}="out/checkpoint"')
    if _URL.match(str(value)) and not (isinstance(value, str) and "://" in value):
        raise_wrong_value(name, value, "a local folder, or a URL as a string", f'{name}="s3://bucket/run"')


def _require_resume(name: str, value: Any) -> None:
    if value is True or value is False or value == "auto":
        return
    expected = 'True, False, "auto", None, or the path of a checkpoint'
    if not isinstance(value, str | PathLike) or not str(value).strip():
        raise_wrong_value(name, value, expected, "resume=True")
    # Reject strings such as "true" that are not paths, and misspelled ones unless such a path exists.
    word = nearest(value, _RESUME_WORDS, cutoff=0.7)
    if word and (str(value).lower() in _RESUME_WORDS or not Path(value).exists()):
        meant = _RESUME_WORDS[word]
        quotes = "" if meant == "auto" else ", without quotes"
        raise_wrong_value(name, value, expected, f"resume={meant!r}{quotes}")
    _require_folder(name, value)


def _require_checkpointer(name: str, value: Any) -> None:
    # A class has the methods too, but they could not be called.
    if isinstance(value, type) or not isinstance(value, Checkpointer):
        expected = "an object with the methods of accmt.Checkpointer: save(write, step, force) and load()"
        raise_wrong_value(name, value, expected, "checkpointer=None")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """How checkpoints are written, and how many are kept.

    Args:
        max_checkpoints: Number of checkpoints to keep. None keeps only the newest.
        keep_every: Interval at which a checkpoint is kept permanently, such as "1 epoch" or "5000 steps"; a file named
            `PINNED` marks it. None keeps no additional checkpoints.
        max_previous_runs: Number of earlier runs whose models and checkpoints are kept (`<folder>.previous`,
            `.previous-2` ...) when a new run starts in their folders; 0 overwrites them, None keeps all.
        async_checkpointing: Whether to write files while training continues.
        reset_optimizer_on_resume: Whether to start optimizer and scheduler from scratch when resuming.
    """

    max_checkpoints: Annotated[Annotated[int, Range(ge=1)] | None, Off()] = None
    keep_every: Annotated[int | str | None, _read_steps_or_epochs, Off()] = None
    max_previous_runs: Annotated[Annotated[int, Range(ge=0)] | None, Off()] = 3
    async_checkpointing: bool = True
    reset_optimizer_on_resume: bool = False

    @property
    def keeps(self) -> Every | None:
        """`keep_every` as an interval."""
        return None if self.keep_every is None else _read_steps_or_epochs("keep_every", self.keep_every)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings(Group):
    """Checkpoints and resuming.

    Args:
        checkpoint: Checkpoint folder. None means `checkpoint-<name of the model folder>`, next to the model folder.
            With a URL, such as "s3://bucket/run", checkpoints are uploaded from that default folder.
        resume: False starts from scratch, and moves the checkpoints of an earlier run to `<folder>.previous`; True
            resumes from the newest checkpoint; "auto" or None resumes if there is one; a path or URL resumes from that
            checkpoint or the newest one in that folder.
        checkpoint_every: How often to save: steps or an interval, such as "500 steps", "2 epochs" or "3 evals"; a time,
            such as "10 minutes"; or "auto", which measures the cost of a checkpoint and of a failure, and chooses the
            interval with the lowest total cost. With None, no checkpoints are written. A checkpoint is also written at
            the end of the run.
        checkpoint_options: How many checkpoints to keep, and how to write them: `CheckpointOptions(max_checkpoints=3)`,
            or a dict.
        checkpointer: Custom checkpoint storage: an object with the methods of `accmt.Checkpointer`, or the name of
            another package's class (entry-point group `accmt.checkpointers`).
        fork: The run folder and the step of another run, such as "logs/news/run-a@1200": this run continues from there
            with its own name, folders and settings. Started again, it resumes.
    """

    checkpoint: Annotated[str | PathLike[str] | None, _require_folder] = None
    resume: Annotated[bool | str | PathLike[str] | None, _require_resume] = False
    checkpoint_every: Annotated[int | float | str | None, _read_checkpoint_interval, Off()] = "epoch"
    checkpoint_options: Annotated[CheckpointOptions, Off()] = None  # type: ignore[assignment]  # set in __post_init__
    checkpointer: Annotated[Checkpointer | None, _require_checkpointer, Off()] = None
    fork: Annotated[str | None, _FORK] = None

    def __post_init__(self) -> None:
        checkpointer: Any = self.checkpointer
        if isinstance(checkpointer, str) and not is_off(checkpointer):
            # A name is that of a class in another package, created for this run.
            try:
                kind: Callable[[], Checkpointer] = find("accmt.checkpointers", checkpointer)
            except KeyError:
                known = names("accmt.checkpointers")
                expected = f"an object with the methods of accmt.Checkpointer, or one of {known} from other packages"
                do = f"checkpointer={nearest(checkpointer, known)!r}"
                raise_wrong_value("checkpointer", checkpointer, expected, do)
            set_field(self, "checkpointer", kind())
        super().__post_init__()

    def check(self, name: str) -> None:
        """Check the run and the step of a fork."""
        if self.fork is not None:
            addon("check_fork")(self)

    @property
    def fork_origin(self) -> tuple[str, int]:
        """The run folder and the step in `fork`."""
        run, _, step = str(self.fork).rpartition("@")
        return run, int(step)

    @property
    def url(self) -> str | None:
        """`checkpoint` if it is a URL: checkpoints are written to the default local folder, and copied there."""
        return self.checkpoint if isinstance(self.checkpoint, str) and _URL.match(self.checkpoint) else None

    @property
    def writes_to_folder(self) -> bool:
        """Whether regular checkpoints go to the checkpoint folder: they are on, and there is no custom storage."""
        return self.checkpoint_every is not None and self.checkpointer is None

    @property
    def every(self) -> Every | None:
        """How often to write a checkpoint; None is never."""
        interval = self.checkpoint_every
        return None if interval is None else _read_checkpoint_interval("checkpoint_every", interval)
