"""Trainer arguments about logging and trackers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from accmt.errors import ArgumentError, ArgumentFileError, UnknownArgumentError, fail, nearest
from accmt.options.checks import (
    Options,
    is_number,
    raise_wrong_value,
    require_mapping,
    require_text,
    set_field,
    write_argument,
)
from accmt.options.units import read_every
from accmt.registry import MONITORED_VALUES, names

# ---- What a run measures and logs in addition to losses and metrics.


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What to measure and log. Each enabled field adds exactly the values listed here to the training rows.

    `record_goodput` and `price_per_hour` add none.

    Args:
        train_loss: The training loss.
        validation_loss: The validation losses.
        additional_metrics: All other evaluation results.
        learning_rate: `learning_rate`; with several parameter groups `learning_rate_0`, `learning_rate_1` ...
        grad_norm: `grad_norm`, the gradient norm of the row's last step over all parameters, before clipping. True is
            the 2-norm; a number or "inf" is another order.
        epoch: `epoch`, the number of epochs so far, including the fraction of the current one.
        throughput: `samples_per_s` and `batches_per_s` of all processes since the last row, excluding evaluations and
            saving; `tokens_per_s` if batches have `input_ids`; with `max_tokens` in the hyper-parameters also
            `real_tokens_per_s` and the fraction of `padding`.
        time_split: `seconds_data`, `seconds_compute`, `seconds_evaluation`, `seconds_saving` and `seconds_other` since
            the last row.
        cpu_utilization: `CPU_PROCESS_0`, the main process's memory in GB; `CPU` and `RAM`, the use of all cores and of
            the machine's memory, in percent.
        gpu_utilization: `GPU_0` and `GPU_0_allocated`, the memory that torch reserves and uses on the main process's
            GPU, in GB; and for each GPU of the machine `GPU_0_used`, the memory of all processes in GB, and
            `GPU_0_utilization` in percent, if the package nvidia-ml-py is installed.
        mfu: `mfu`, model FLOPs utilization: the fraction of the device's peak used by the model's operations, from 0
            to 1. Peaks of common GPUs are known; a number sets the peak, in operations per second.
        goodput: `goodput`, the fraction of all time since the run first started that trained the model;
            `goodput_overhead`, that of waiting for data, evaluating and saving; `goodput_lost`, that of starts,
            interruptions and steps made again. On several processes also `slowest_process`, the one that the others
            waited for since the last row, and `slowest_process_s`, for how long.
        record_goodput: Whether to record how the run spends its time, in `goodput.jsonl` in the run folder, for
            `accmt goodput` and the report. `goodput`, `price_per_hour` and `checkpoint_every="auto"` record it too.
        price_per_hour: The price of one hour on all machines of the run, in any currency; `accmt goodput` and the
            report then show the cost of the run.
        checkpoint: `checkpoint`, a row with the number of optimizer steps at each checkpoint.
        added: Measurements from other packages, by name: entry points in the group `accmt.monitored_values`. In a dict
            or list, use their names like those above.

    Raises:
        ArgumentError: An invalid value.
    """

    train_loss: bool = True
    validation_loss: bool = True
    additional_metrics: bool = True
    learning_rate: bool = False
    grad_norm: bool | float | str = False
    epoch: bool = False
    throughput: bool = False
    time_split: bool = False
    cpu_utilization: bool = False
    gpu_utilization: bool = False
    mfu: bool | float = False
    goodput: bool = False
    record_goodput: bool = False
    price_per_hour: float | None = None
    checkpoint: bool = False
    added: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.type == "bool" and not isinstance(value, bool):
                _reject(setting.name, value, "True or False")
        if not isinstance(self.grad_norm, bool) and _to_positive(self.grad_norm) is None:
            _reject("grad_norm", self.grad_norm, 'True or False, a number above 0, or "inf"')
        peak = _to_positive(self.mfu)
        if not isinstance(self.mfu, bool) and (peak is None or math.isinf(peak)):
            _reject("mfu", self.mfu, "True or False, or operations per second such as 312e12")
        price = self.price_per_hour
        if price is not None and not (is_number(price) and 0 <= price < math.inf):
            _reject("price_per_hour", price, "a number from 0, or None", example=2.5)

    @property
    def has_measurements(self) -> bool:
        """Whether anything is measured, besides what training and evaluation compute anyway."""
        use = self.cpu_utilization or self.gpu_utilization or self.mfu
        times = self.throughput or self.time_split or self.checkpoint
        return bool(use or times or self.learning_rate or self.epoch or self.added or self.norm_order is not None)

    @property
    def norm_order(self) -> float | None:
        """The order of the gradient's norm; None is off."""
        if isinstance(self.grad_norm, bool):
            return 2.0 if self.grad_norm else None
        return float(self.grad_norm)

    @classmethod
    def from_config(cls, config: Any) -> Monitor:
        """Read the Trainer's `monitor`.

        Args:
            config: None for `Monitor()`; a Monitor; a dict of its fields; a list of fields to enable; or the path
                of a YAML or JSON file with one of these.

        Raises:
            UnknownArgumentError: There is no such field; the message suggests the closest one.
            ArgumentError: `config` is something else, or a value is invalid.
            ArgumentFileError: There is no such file.
        """
        if isinstance(config, str | os.PathLike):
            import yaml

            if not Path(config).is_file():
                got = f"no such file; the working directory is {Path.cwd()}"
                expected, do = "a YAML or JSON file with its fields, a dict or a list", 'monitor=["grad_norm"]'
                raise fail(ArgumentFileError, f"Trainer(monitor={str(config)!r})", got=got, expected=expected, do=do)
            config = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if isinstance(config, list | tuple | set):
            config = dict.fromkeys(config, True)
        if not isinstance(config, Mapping):
            got, do = f"{config!r} ({type(config).__name__})", 'monitor=["learning_rate", "grad_norm"]'
            raise fail(
                ArgumentError,
                "Trainer(monitor=...)",
                got=got,
                expected="a Monitor, a dict, a list of names, or a path",
                do=do,
            )
        known = [field.name for field in fields(cls)]
        others = {name: is_on for name, is_on in config.items() if name not in known}
        added = names(MONITORED_VALUES) if others else []
        for name, is_on in others.items():
            if name not in added:
                every = [*known, *added]
                do = f"did you mean {nearest(name, every, cutoff=0)}?"
                raise fail(
                    UnknownArgumentError, "Trainer(monitor=...)", got=f"{name!r}", expected=f"one of {every}", do=do
                )
            if not isinstance(is_on, bool):
                _reject(name, is_on, "True or False")
        own = {name: value for name, value in config.items() if name in known}
        return cls(**own | {"added": (*own.get("added", ()), *(name for name, is_on in others.items() if is_on))})


def _to_positive(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if number > 0 else None


def _reject(name: str, value: Any, expected: str, *, example: bool | float = True) -> NoReturn:
    got = f"{value!r} ({type(value).__name__})"
    raise fail(ArgumentError, f"Monitor({name}=...)", got=got, expected=expected, do=f"Monitor({name}={example})")


def _require_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise_wrong_value(name, value, "a number of seconds from 0", write_argument(name, 30))


@dataclass(frozen=True, kw_only=True)
class TrackerOptions(Options):
    """What trackers get, and how rows are delivered to them.

    Args:
        config: Additional entries for the run's configuration.
        offline: What to do if a tracker's server is unreachable: "auto" continues and delivers later, False raises an
            error at the start, True does not connect until `accmt sync`.
        flush_s: Seconds to wait for trackers at the end of a run; `accmt sync` delivers the rest.
    """

    config: Annotated[Mapping[str, Any], require_mapping] | None = None
    offline: bool | Literal["auto"] = "auto"
    flush_s: Annotated[float, _require_seconds] = 30


def _require_steps(name: str, value: Any) -> None:
    read_every(name, value, ("step",), plain="step")


@dataclass(frozen=True, kw_only=True)
class Ledger(Options):
    """The ledger of a run: what each optimizer step computed, in `ledger.jsonl` in the run folder.

    Args:
        every: Optimizer steps between checksums of weights, gradients and optimizer state, such as "1000 steps"; None:
            only at the first step of each start and at checkpoints.
        on_difference: What to do if a resumed run repeats a step and gets a different result, although code, data,
            settings and hardware have not changed: "stop" raises an error, "warn" continues.
    """

    every: Annotated[int | str, _require_steps] | None = "1000 steps"
    on_difference: Literal["stop", "warn"] = "stop"

    @property
    def steps(self) -> int | None:
        """`every` as a number of optimizer steps."""
        return None if self.every is None else int(read_every("every", self.every, ("step",), plain="step").number)


@dataclass(frozen=True, kw_only=True)
class TrackingSettings:
    """Logging and trackers.

    Args:
        track_name: Name of the project or experiment. None uses the base name of `model_path`.
        run_name: Name of this run; None generates one from the time and a few letters.
        logging_dir: Log folder, or the URL of the tracker's server.
        log_with: A tracker or a list of trackers: `TensorBoard`, `MLFlow`, `WandB` ..., their names, or any Accelerate
            `GeneralTracker`. `history.jsonl` is always written.
        log_every: Optimizer steps between rows of training values: a number, or a string such as "10 steps"; -1 or
            "epoch" logs one row at the end of each epoch.
        train_loss_metric_name: Name of the training loss in the logs.
        val_loss_metric_name: Name of the validation loss in the logs.
        monitor: What to measure and log in addition to losses and metrics: a `Monitor`, a dict of its fields, a list of
            fields to enable, or the path of a file with one of these.
        tracker_options: Additional entries for the run's configuration, and what to do if a tracker's server is
            unreachable: `TrackerOptions(offline=False)`, or a dict of its arguments.
        ledger: Whether to record the result of each step, for `accmt replay` and `accmt diff`;
            `Ledger(every="100 steps")`, or a dict of its arguments, sets the interval of checksums.
        tracker_kwargs: Other keywords of the Trainer are passed to the trackers when they start. `mlflow={...}` passes
            them to one tracker only.
    """

    track_name: str | None = None
    run_name: str | None = None
    logging_dir: str | PathLike[str] = "logs"
    log_with: Any = None
    log_every: int | str = 1
    train_loss_metric_name: str = "train_loss"
    val_loss_metric_name: str = "val_loss"
    monitor: Any = None
    tracker_options: TrackerOptions = None  # type: ignore[assignment]  # set in __post_init__
    ledger: bool | Ledger | Mapping[str, Any] = False
    tracker_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def monitored(self) -> Monitor:
        """The values to measure and log."""
        return Monitor.from_config(self.monitor)

    def __post_init__(self) -> None:
        self.monitored  # noqa: B018 - raises if invalid
        for name in ("train_loss_metric_name", "val_loss_metric_name"):
            require_text(name, getattr(self, name))
        for name in ("track_name", "run_name"):
            if getattr(self, name) is not None:
                require_text(name, getattr(self, name))
        set_field(self, "tracker_options", TrackerOptions.read("tracker_options", self.tracker_options))
        if not isinstance(self.ledger, bool):
            set_field(self, "ledger", Ledger.read("ledger", self.ledger, ", or True or False"))
        self.log_steps  # noqa: B018 - raises if invalid

    @property
    def ledger_options(self) -> Ledger | None:
        """The options of the ledger; None if it is off."""
        return (
            (Ledger() if self.ledger else None) if isinstance(self.ledger, bool) else Ledger.read("ledger", self.ledger)
        )

    @property
    def log_steps(self) -> int:
        """Optimizer steps between rows; -1 is one row at the end of each epoch."""
        every = self.log_every
        if every == -1 and isinstance(every, int):
            return -1
        read = read_every("log_every", every, ("epoch", "step"), plain="step", also="; -1 means each epoch")
        if read.unit == "epoch" and read.number != 1:
            raise_wrong_value(
                "log_every", every, 'steps, or "epoch" for one row at the end of each epoch', 'log_every="epoch"'
            )
        return -1 if read.unit == "epoch" else int(read.number)
