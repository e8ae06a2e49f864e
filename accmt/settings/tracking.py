"""What the Trainer was told about logging and trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

from accmt.settings.checks import raise_wrong_value, require_mapping, require_text
from accmt.settings.monitor import Monitor


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """What is logged, how often and to whom.

    Args:
        track_name: Name of the project or experiment; None is the base name of `model_path`.
        run_name: Name of this run; None is made of the time and a few letters.
        logging_dir: Folder of logs, or the URL of the tracker's server.
        log_with: A tracker or a list of them: `TensorBoard`, `MLFlow`, `WandB` ..., their names, or any Accelerate
            `GeneralTracker`. `history.jsonl` is written in any case.
        log_every: Updates from one row of training values to the next; -1 is one row at the end of each epoch.
        train_loss_metric_name: Name of the training loss in the logs.
        val_loss_metric_name: Name of the validation loss in the logs.
        monitor: What else is measured and logged: a `Monitor`, a dict of its fields, a list of those to switch on, or
            the path of a file of either; None logs losses and metrics.
        additional_tracker_config: Entries added to the run's configuration.
        tracker_offline: What a tracker whose server cannot be reached means: "auto" goes on and delivers later, False
            is an error at the start, True does not try before `accmt sync`.
        tracker_flush_s: Seconds that the end of a run waits for trackers; what is left then, `accmt sync` delivers.
        tracker_kwargs: Further keywords of the Trainer, handed to the trackers' start; `mlflow={...}` goes to that one
            only.
    """

    track_name: str | None = None
    run_name: str | None = None
    logging_dir: str | PathLike[str] = "logs"
    log_with: Any = None
    log_every: int = 1
    train_loss_metric_name: str = "train_loss"
    val_loss_metric_name: str = "val_loss"
    monitor: Any = None
    additional_tracker_config: Mapping[str, Any] | None = None
    tracker_offline: Any = "auto"
    tracker_flush_s: float = 30
    tracker_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def monitored(self) -> Monitor:
        """What is measured and logged."""
        return Monitor.from_config(self.monitor)

    def __post_init__(self) -> None:
        self.monitored  # noqa: B018 - raises what is wrong with it
        for name in ("train_loss_metric_name", "val_loss_metric_name"):
            require_text(name, getattr(self, name))
        for name in ("track_name", "run_name"):
            if getattr(self, name) is not None:
                require_text(name, getattr(self, name))
        if self.tracker_offline not in ("auto", True, False):
            raise_wrong_value(
                "tracker_offline", self.tracker_offline, '"auto", True or False', 'tracker_offline="auto"'
            )
        seconds = self.tracker_flush_s
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
            raise_wrong_value("tracker_flush_s", seconds, "seconds from 0", "tracker_flush_s=30")
        require_mapping("additional_tracker_config", self.additional_tracker_config)
        is_whole = isinstance(self.log_every, int) and not isinstance(self.log_every, bool)
        if not is_whole or (self.log_every < 1 and self.log_every != -1):
            raise_wrong_value("log_every", self.log_every, "updates from 1, or -1 for each epoch", "log_every=1")
