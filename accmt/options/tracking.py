"""The Trainer's arguments about logging and trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Annotated, Any, Literal

from accmt.options.checks import Options, raise_wrong_value, require_mapping, require_text, set_field, write_argument
from accmt.options.monitor import Monitor
from accmt.options.units import read_every


def _require_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise_wrong_value(name, value, "seconds from 0", write_argument(name, 30))


@dataclass(frozen=True, kw_only=True)
class Delivery(Options):
    """How rows reach trackers.

    Args:
        offline: What a tracker whose server cannot be reached means: "auto" trains on and delivers later, False is an
            error at the start, True does not try before `accmt sync`.
        flush_s: Seconds that the end of a run waits for trackers; what is left then, `accmt sync` delivers.
    """

    offline: bool | Literal["auto"] = "auto"
    flush_s: Annotated[float, _require_seconds] = 30


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """What is logged, how often and to whom.

    Args:
        track_name: Name of the project or experiment; None is the base name of `model_path`.
        run_name: Name of this run; None is made of the time and a few letters.
        logging_dir: Folder of logs, or the URL of the tracker's server.
        log_with: A tracker or a list of them: `TensorBoard`, `MLFlow`, `WandB` ..., their names, or any Accelerate
            `GeneralTracker`. `history.jsonl` is written in any case.
        log_every: Optimizer steps from one row of training values to the next: a number, or text such as "10 steps"; -1
            or "epoch" is one row at the end of each epoch.
        train_loss_metric_name: Name of the training loss in the logs.
        val_loss_metric_name: Name of the validation loss in the logs.
        monitor: What else is measured and logged: a `Monitor`, a dict of its fields, a list of those to switch on, or
            the path of a file of either; None logs losses and metrics.
        additional_tracker_config: Entries added to the run's configuration.
        tracker_delivery: What a tracker whose server cannot be reached means, and how long the end of a run waits:
            `Delivery(offline=False, flush_s=30)`, or a dict of its arguments.
        tracker_kwargs: Further keywords of the Trainer, handed to the trackers' start; `mlflow={...}` goes to that one
            only.
    """

    track_name: str | None = None
    run_name: str | None = None
    logging_dir: str | PathLike[str] = "logs"
    log_with: Any = None
    log_every: int | str = 1
    train_loss_metric_name: str = "train_loss"
    val_loss_metric_name: str = "val_loss"
    monitor: Any = None
    additional_tracker_config: Mapping[str, Any] | None = None
    tracker_delivery: Delivery = None  # type: ignore[assignment]  # which is read when this is made
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
        set_field(self, "tracker_delivery", Delivery.read("tracker_delivery", self.tracker_delivery))
        require_mapping("additional_tracker_config", self.additional_tracker_config)
        self.log_steps  # noqa: B018 - raises what is wrong with it

    @property
    def log_steps(self) -> int:
        """Optimizer steps from one row to the next; -1 is one row at the end of each epoch."""
        every = self.log_every
        if every == -1 and isinstance(every, int):
            return -1
        read = read_every("log_every", every, ("epoch", "step"), plain="step", also="; -1 is each epoch")
        if read.unit == "epoch" and read.number != 1:
            raise_wrong_value(
                "log_every", every, 'steps, or "epoch" for one row at the end of each', 'log_every="epoch"'
            )
        return -1 if read.unit == "epoch" else int(read.number)
