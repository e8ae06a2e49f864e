"""Trainer arguments about the model folder and checkpoints."""

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
from accmt.options.units import Every, Unit, read_every, read_size
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


class Checkpointer(Protocol):
    """Custom checkpoint storage: `Trainer(checkpointer=...)` accepts any object with these two methods.

    Both are called on all processes together.
    """

    def save(self, write: Callable[[Path], object], step: int, *, force: bool) -> None:
        """Store a checkpoint."""

    def load(self) -> Path | None:
        """Return a folder with the files of the checkpoint to resume from; None if there is none."""


def _require_evaluations(name: str, value: Any) -> None:
    read_every(name, value, ["eval"], plain="eval")


def _require_finite(name: str, value: Any, least: float = -inf) -> None:
    if not is_number(value) or not isfinite(value) or value < least:
        expected = "a number from 0" if least == 0 else "a number"
        raise_wrong_value(name, value, expected, write_argument(name, 0.01))


@dataclass(frozen=True, kw_only=True)
class PatienceOptions(Options):
    """Early stopping by one value.

    Args:
        patience: Consecutive evaluations without improvement after which training ends. None means no limit.
        min_delta: Minimum difference from the best value that counts as an improvement.
        stopping_threshold: Training ends as soon as the value reaches this threshold.
        check_finite: Whether training ends as soon as the value is NaN or infinite.
    """

    patience: Annotated[int | str, _require_evaluations] | None = None
    min_delta: Annotated[float, partial(_require_finite, least=0)] = 0.0
    stopping_threshold: Annotated[float, _require_finite] | None = None
    check_finite: bool = False

    def check(self, name: str) -> None:
        """Reject options that would never end training."""
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
        every = self.patience
        return None if every is None else int(read_every("patience", every, ["eval"], plain="eval").number)


def _name_of_url(url: str) -> str:
    """Return the last part of a URL's path; "" if it has none."""
    _, _, path = url.partition("://")
    return path.rstrip("/").rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """Saving the model.

    Args:
        model_path: Folder of the saved model. It is created on the first save. With a URL, such as
            "s3://bucket/models/news", the folder is `out/news`, and saved models are also uploaded there.
        model_saving: Which model to save: "best_valid_loss", "best_train_loss", "best_<metric>", "always" (at each
            evaluation), "last" (the weights at the end, in `<model_path>/last`), None (no model is saved), or a list of
            these. Without validation data, "best_valid_loss" means "best_train_loss". With several validation sets,
            "best_<metric>" uses the mean over the sets, and "best_<metric>@<set>" uses a single set.
            "best_accuracy/f1" requires both metrics to improve.
        model_saving_below: Save only if the monitored value is below this limit. A dict sets limits by name.
        model_saving_above: Save only if the monitored value is above this limit. A dict sets limits by name.
        max_shard_size: Maximum size of a weight file: a number of bytes, or a string such as "5GB".
        safe_serialization: True writes safetensors, including tied weights; False writes `pytorch_model*.bin`.
        patience: Consecutive evaluations without improvement after which training ends, such as 3 or "3 evals". A dict,
            such as `{"accuracy": 3}`, counts separately for each value, and can contain `PatienceOptions`. `min_length`
            takes precedence.
    """

    model_path: str | PathLike[str]
    model_saving: str | Sequence[str | None] | None = "best_valid_loss"
    model_saving_below: float | Mapping[str, float] | None = None
    model_saving_above: float | Mapping[str, float] | None = None
    max_shard_size: int | str = "10GB"
    safe_serialization: bool = True
    patience: int | str | Mapping[str, int | str | PatienceOptions | Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        require_flags(self)
        path = self.model_path
        if not isinstance(path, str | PathLike) or not str(path).strip():
            raise_wrong_value("model_path", path, "a folder path", 'model_path="out/my_model"')
        if _URL.match(str(path)) and not (isinstance(path, str) and _name_of_url(path)):
            do = 'model_path="s3://bucket/models/news"'
            raise_wrong_value("model_path", path, "a local folder, or a URL as a string that ends in a name", do)
        if str(path).startswith("hf://"):
            do = 'pass a local `model_path`, and callbacks=PushToHub("user/name")'
            raise_wrong_value("model_path", path, "a local folder, or the URL of object storage", do)
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
            expected = (
                '"best_valid_loss", "best_train_loss", "best_<metric>", "always", "last", a list of them, or None'
            )
            raise_wrong_value("model_saving", saving, expected, do)

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
        if isinstance(self.model_saving, list | tuple):
            return [rule for rule in self.model_saving if rule != LAST] or None
        return None if self.model_saving == LAST else self.model_saving

    @property
    def saves_last(self) -> bool:
        """Whether to save the last weights."""
        return LAST in self.model_saving if isinstance(self.model_saving, list | tuple) else self.model_saving == LAST

    @property
    def patience_evaluations(self) -> Any:
        """`patience` with numbers in place of strings such as "3 evals"."""

        def read(value: Any) -> Any:
            is_text = isinstance(value, str)
            return int(read_every("patience", value, ["eval"], plain="eval").number) if is_text else value

        patience = self.patience
        return {n: read(v) for n, v in patience.items()} if isinstance(patience, Mapping) else read(patience)


def _require_steps_or_epochs(name: str, value: Any) -> Every:
    return read_every(name, value, ["epoch", "step"], plain="step")


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(Options):
    """How checkpoints are written, and how many are kept.

    Args:
        max_checkpoints: Number of checkpoints to keep. None keeps only the newest.
        keep_every: Interval at which a checkpoint is kept permanently, such as "1 epoch" or "5000 steps"; a file named
            `PINNED` marks it. `accmt replay` starts from the newest checkpoint before a step. None keeps no additional
            checkpoints.
        max_previous_runs: Number of earlier runs whose models and checkpoints are kept (`<folder>.previous`,
            `.previous-2` ...) when a new run starts in their folders; 0 overwrites them, None keeps all.
        async_checkpointing: Whether to write files while training continues.
        reset_optimizer_on_resume: Whether to start optimizer and scheduler from scratch when resuming.
    """

    max_checkpoints: Annotated[int, partial(require_int, at_least=1)] | None = None
    keep_every: Annotated[int | str, _require_steps_or_epochs] | None = None
    max_previous_runs: Annotated[int, partial(require_int, at_least=0)] | None = 3
    async_checkpointing: bool = True
    reset_optimizer_on_resume: bool = False

    @property
    def keeps(self) -> Every | None:
        """`keep_every` as an interval."""
        return None if self.keep_every is None else _require_steps_or_epochs("keep_every", self.keep_every)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints and resuming.

    Args:
        checkpoint: Checkpoint folder. None means `checkpoint-<name of the model folder>`, next to the model folder.
            With a URL, such as "s3://bucket/run", checkpoints are written to that default folder and uploaded from
            there.
        resume: False starts from scratch, and moves the checkpoints of an earlier run to `<folder>.previous`; True
            resumes from the newest checkpoint; "auto" or None resumes if there is one; a path or URL resumes from that
            checkpoint, or from the newest one in that folder.
        checkpoint_every: How often to save: a number of optimizer steps; a float up to 1.0 for a fraction of an epoch;
            a number and a unit, such as "500 steps", "2 epochs", "0.25 epochs" or "3 evals"; a time, such as "10
            minutes"; or "auto", which measures the cost of a checkpoint and of a failure, and chooses the interval with
            the lowest total cost. With None, no checkpoints are written. A checkpoint is also written at the end of the
            run.
        checkpoint_options: How many checkpoints to keep, and how to write them:
            `CheckpointOptions(max_checkpoints=3)`, or a dict of its arguments.
        checkpointer: Custom checkpoint storage: an object with the methods of `accmt.Checkpointer`, or the name of a
            class from another package (an entry point in the group `accmt.checkpointers`).
        fork: The run folder and the step of another run, such as "logs/news/run-a@1200": this run continues from there
            with its own name, folders and settings. Started again, it resumes.
    """

    checkpoint: str | PathLike[str] | None = None
    resume: bool | str | PathLike[str] | None = False
    checkpoint_every: int | float | str | None = "epoch"
    checkpoint_options: CheckpointOptions = None  # type: ignore[assignment]  # set in __post_init__
    checkpointer: Checkpointer | None = None
    fork: str | None = None

    def __post_init__(self) -> None:
        self.every  # noqa: B018 - raises if invalid
        options = CheckpointOptions.read("checkpoint_options", self.checkpoint_options)
        set_field(self, "checkpoint_options", options)
        if isinstance(self.resume, str) and self.resume != "auto":
            # Reject strings such as "true" that are not paths, and misspelled ones unless such a path exists.
            word = nearest(self.resume, _RESUME_WORDS, cutoff=0.7)
            if word and (self.resume.lower() in _RESUME_WORDS or not Path(self.resume).exists()):
                meant = _RESUME_WORDS[word]
                do = f"resume={meant!r}" + ("" if meant == "auto" else ", without quotes")
                raise_wrong_value("resume", self.resume, 'True, False, "auto", None, or the path of a checkpoint', do)
        for name in ("checkpoint", "resume"):
            path = getattr(self, name)
            if path is None or isinstance(path, bool) and name == "resume":
                continue
            if not isinstance(path, str | PathLike) or not str(path).strip():
                expected = 'False, True, "auto", None, or the path of a checkpoint' if name == "resume" else "a folder"
                raise_wrong_value(name, path, expected, "resume=True" if name == "resume" else 'checkpoint="out/ck"')
            if _URL.match(str(path)) and not (isinstance(path, str) and "://" in path):
                raise_wrong_value(name, path, "a local folder, or a URL as a string", f'{name}="s3://bucket/run"')
        given: Any = self.checkpointer
        if isinstance(given, str):
            try:
                kind: Callable[[], Checkpointer] = find("accmt.checkpointers", given)
            except KeyError:
                known = names("accmt.checkpointers")
                expected = f"an object with the methods of accmt.Checkpointer, or one of {known} from other packages"
                raise_wrong_value("checkpointer", given, expected, f"checkpointer={nearest(given, known)!r}")
            object.__setattr__(self, "checkpointer", kind())
        methods = [getattr(self.checkpointer, name, None) for name in ("save", "load")]
        can_store = not isinstance(self.checkpointer, type) and all(map(callable, methods))
        if self.checkpointer is not None and not can_store:
            expected = "an object with the methods of accmt.Checkpointer: save(write, step, force) and load()"
            raise_wrong_value("checkpointer", self.checkpointer, expected, "checkpointer=None")
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
        if self.checkpoint_every is None:
            return None
        units: tuple[Unit, ...] = ("epoch", "step", "eval", "second", "auto")
        return read_every("checkpoint_every", self.checkpoint_every, units, plain="step", fractions=True)
