"""What the Trainer was told about the model folder and about checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from accmt.settings.checks import raise_wrong_value, require_flags, require_int

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:/")  # one slash: `Path` makes one of two
_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*[KMGT]B\s*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class SavingSettings:
    """When and where the model is saved.

    Args:
        model_path: Folder of the saved model; made when something is saved.
        model_saving: When to save: "best_valid_loss", "best_train_loss", "best_<metric>", "always" (at each
            evaluation), or None for never. Without validation data "best_valid_loss" means "best_train_loss": the mean
            since the last evaluation. Of equal values the first stays.
        model_saving_below: Saves only while the value that decides is below this.
        model_saving_above: Saves only while the value that decides is above this.
        max_shard_size: Largest weight file: bytes, or text such as "5GB".
        safe_serialization: True writes safetensors, tied weights included; False writes `pytorch_model*.bin`.
        save_last: Whether the last weights are saved to `<model_path>/last` too.
        patience: Evaluations without a better value before training ends.
    """

    model_path: str | PathLike[str]
    model_saving: Any = "best_valid_loss"
    model_saving_below: float | None = None
    model_saving_above: float | None = None
    max_shard_size: int | str = "10GB"
    safe_serialization: bool = True
    save_last: bool = False
    patience: Any = None

    def __post_init__(self) -> None:
        require_flags(self)
        path, size = self.model_path, self.max_shard_size
        if not isinstance(path, str | PathLike) or not str(path).strip():
            raise_wrong_value("model_path", path, "the path of a folder", 'model_path="out/my_model"')
        if _URL.match(str(path)):
            do = "mount the remote storage, or copy the folder after training"
            raise_wrong_value("model_path", path, "a folder of this machine", do)
        if isinstance(size, str) and not _SIZE.fullmatch(size):
            raise_wrong_value(
                "max_shard_size", size, "bytes, or a number with KB, MB, GB or TB", 'max_shard_size="5GB"'
            )
        if not isinstance(size, str):
            require_int("max_shard_size", size, at_least=1)

    @property
    def folder(self) -> Path:
        """The model folder."""
        return Path(self.model_path)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When and where checkpoints are written.

    Args:
        checkpoint: Folder of the checkpoints; None is `<parent of model_path>/checkpoint-<its name>`.
        resume: False starts anew; True continues from the newest checkpoint; "auto" or None continues if there is one;
            a path continues from that checkpoint.
        checkpoint_every: How often: a number and a unit of "epoch", "step" or "eval", such as "2 epochs"; None is
            never.
        max_checkpoints: How many are kept; None keeps the newest.
        checkpointer: An object of yours that stores checkpoints instead.
        async_checkpointing: Whether files are written while training goes on.
        reset_optimizer_on_resume: Whether optimizer and schedule start anew when training continues.
        enable_checkpointing: False is `checkpoint_every=None`.
    """

    checkpoint: str | PathLike[str] | None = None
    resume: Any = False
    checkpoint_every: str | None = "epoch"
    max_checkpoints: int | None = None
    checkpointer: Any = None
    async_checkpointing: bool = True
    reset_optimizer_on_resume: bool = False
    enable_checkpointing: bool = True

    def __post_init__(self) -> None:
        require_flags(self)
        if self.max_checkpoints is not None:
            require_int("max_checkpoints", self.max_checkpoints, at_least=1)

    @property
    def is_on(self) -> bool:
        """Whether checkpoints are asked for."""
        return self.enable_checkpointing and self.checkpoint_every is not None
