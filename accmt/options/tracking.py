"""Trainer arguments about logging and trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from accmt.errors import ArgumentFileError, UnknownArgumentError, describe_value, fail, nearest
from accmt.options.checks import Expected, Group, Off, Options, Range, raise_wrong_value, read_numbers, require_text
from accmt.options.units import read_every
from accmt.registry import MONITORED_VALUES, names

_NORM = Expected('True or False, a number above 0, or "inf"', "True")
_PEAK = Expected("True or False, or operations per second such as 312e12", "True")
_PRICE = Expected("a number from 0, or None", "2.5")
_SECONDS = Expected("a number of seconds from 0", "30")
_CONFIG = Expected("a dict", '{"team": "vision"}')
_NAMES = Expected("names of measurements of other packages", '("name",)')
_FOLDER = Expected("a folder path", '"logs"')

# ---- What a run measures and logs in addition to losses and metrics.


@dataclass(frozen=True, kw_only=True)
class Monitor(Options):
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
        checkpoint: Checkpoint folder. None means `checkpoint-<name of the model folder>`, next to the model folder.
            With a URL, such as "s3://bucket/run", checkpoints are uploaded from that default folder.
        added: Measurements from other packages, by name: entry points in the group `accmt.monitored_values`. In a dict
            or list, use their names like those above.

    Raises:
        ArgumentError: An invalid value.
    """

    train_loss: bool = True
    validation_loss: bool = True
    additional_metrics: bool = True
    learning_rate: bool = False
    grad_norm: Annotated[bool | Annotated[float, Range(gt=0)] | Literal["inf"], _NORM] = False
    epoch: bool = False
    throughput: bool = False
    time_split: bool = False
    cpu_utilization: bool = False
    gpu_utilization: bool = False
    mfu: Annotated[bool | Annotated[float, Range(gt=0, lt=math.inf)], _PEAK] = False
    goodput: bool = False
    record_goodput: bool = False
    price_per_hour: Annotated[Annotated[float, Range(ge=0, lt=math.inf)] | None, _PRICE] = None
    checkpoint: bool = False
    added: Annotated[Sequence[str], _NAMES] = ()

    @property
    def has_measurements(self) -> bool:
        """Whether anything is measured, besides what training and evaluation compute anyway."""
        use = self.cpu_utilization or self.gpu_utilization or self.mfu
        times = self.throughput or self.time_split or self.checkpoint
        return bool(use or times or self.learning_rate or self.epoch or self.added or self.norm_order is not None)

    @property
    def norm_order(self) -> float | None:
        """The order of the gradient's norm; None is off."""
        if self.grad_norm is False:
            return None
        if self.grad_norm is True:
            return 2.0
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
        if isinstance(config, str | PathLike):
            import yaml

            if not Path(config).is_file():
                got = f"no such file; the working directory is {Path.cwd()}"
                expected, do = "a YAML or JSON file with its fields, a dict or a list", 'monitor=["grad_norm"]'
                raise fail(ArgumentFileError, f"Trainer(monitor={str(config)!r})", got=got, expected=expected, do=do)
            # YAML reads 312e12 as a string.
            config = read_numbers(yaml.safe_load(Path(config).read_text(encoding="utf-8")))
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if isinstance(config, list | tuple | set):
            config = dict.fromkeys(config, True)
        if not isinstance(config, Mapping):
            do = 'monitor=["learning_rate", "grad_norm"]'
            raise_wrong_value("monitor", config, "a Monitor, a dict, a list of names, or a path", do)
        # Names of other packages' measurements may stand among the fields.
        values = dict(config)
        added = list(values.pop("added", ()))
        known = [field.name for field in fields(cls)]
        for name in list(values):
            if name in known:
                continue
            is_on = values.pop(name)
            available = [*known, *names(MONITORED_VALUES)]
            if name not in available:
                got, expected = describe_value(name), f"one of {available}"
                do = f"did you mean {nearest(name, available, cutoff=0)}?"
                raise fail(UnknownArgumentError, "Trainer(monitor=...)", got=got, expected=expected, do=do)
            if is_on is True:
                added.append(name)
            elif is_on is not False:
                raise_wrong_value(f"monitor.{name}", is_on, "True or False", f'monitor={{"{name}": True}}')
        return cls.read("monitor", {**values, "added": tuple(added)})


@dataclass(frozen=True, kw_only=True)
class TrackerOptions(Options):
    """What trackers get, and how rows are delivered to them.

    Args:
        config: Additional entries for the run's configuration.
        offline: What to do if a tracker's server is unreachable: "auto" continues and delivers later, False raises an
            error at the start, True does not connect until `accmt sync`.
        flush_s: Seconds to wait for trackers at the end of a run; `accmt sync` delivers the rest.
    """

    config: Annotated[Mapping[str, Any] | None, _CONFIG, Off()] = None
    offline: bool | Literal["auto"] = "auto"
    flush_s: Annotated[float, Range(ge=0, lt=math.inf), _SECONDS] = 30


_read_steps = partial(read_every, units=("step",), plain="step")


@dataclass(frozen=True, kw_only=True)
class Ledger(Options):
    """The ledger of a run: what each optimizer step computed, in `ledger.jsonl` in the run folder.

    Args:
        every: Interval between checksums of weights, gradients and optimizer state; None: only at the first step of
            each start and at checkpoints.
        on_difference: What to do if a resumed run repeats a step with a different result, although code, data, settings
            and hardware have not changed: "stop" raises an error, "warn" continues.
    """

    every: Annotated[int | str | None, _read_steps, Off()] = "1000 steps"
    on_difference: Literal["stop", "warn"] = "stop"

    @property
    def steps(self) -> int | None:
        """`every` as a number of optimizer steps."""
        if self.every is None:
            return None
        return int(_read_steps("every", self.every).number)


def _require_monitor(name: str, value: Any) -> None:
    Monitor.from_config(value)


def read_log_interval(name: str, value: Any) -> int:
    """Return the optimizer steps between rows; -1 is one row at the end of each epoch.

    Raises:
        ArgumentError: It is neither a number of steps nor "epoch".
    """
    if value == -1 and isinstance(value, int):
        return -1
    interval = read_every(name, value, ("step", "epoch"), plain="step", also="; -1 means each epoch")
    # The loop knows only one row for each epoch.
    if interval.unit == "epoch" and interval.number != 1:
        expected = 'steps, or "epoch" for one row at the end of each epoch'
        raise_wrong_value(name, value, expected, 'log_every="epoch"')
    if interval.unit == "epoch":
        return -1
    return int(interval.number)


@dataclass(frozen=True, kw_only=True)
class TrackingSettings(Group):
    """Logging and trackers.

    Args:
        track_name: Name of the project or experiment. None uses the base name of `model_path`.
        run_name: Name of this run; None generates one from the time and a few letters.
        logging_dir: Log folder, or the URL of the tracker's server.
        log_with: A tracker or a list of trackers: `TensorBoard`, `MLFlow`, `WandB` ..., their names, or any Accelerate
            `GeneralTracker`.
        log_every: Steps or interval between rows of training values, such as "10 steps"; -1 or "epoch" logs one row at
            the end of each epoch.
        train_loss_metric_name: Name of the training loss in the logs.
        val_loss_metric_name: Name of the validation loss in the logs.
        monitor: What to log in addition to losses and metrics: a `Monitor`, a dict of its fields, a list of fields to
            enable, or the path of a file with one of these.
        tracker_options: Additional configuration, and what to do if a tracker's server is unreachable:
            `TrackerOptions(offline=False)`, or a dict.
        ledger: Whether to record the result of each step, for `accmt replay` and `accmt diff`; `Ledger(every="100
            steps")`, or a dict, sets the interval of checksums.
        tracker_kwargs: Other keywords are passed to the trackers when they start; `mlflow={...}` to one tracker only.
    """

    track_name: Annotated[str | None, require_text] = None
    run_name: Annotated[str | None, require_text] = None
    logging_dir: Annotated[str | PathLike[str], _FOLDER] = "logs"
    log_with: Annotated[Any, Off()] = None
    log_every: Annotated[int | str, read_log_interval] = 1
    train_loss_metric_name: Annotated[str, require_text] = "train_loss"
    val_loss_metric_name: Annotated[str, require_text] = "val_loss"
    monitor: Annotated[Any, _require_monitor] = None
    tracker_options: Annotated[TrackerOptions, Off()] = None  # type: ignore[assignment]  # set in __post_init__
    ledger: bool | Ledger | Mapping[str, Any] = False
    tracker_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def monitored(self) -> Monitor:
        """The values to measure and log."""
        return Monitor.from_config(self.monitor)

    @property
    def ledger_options(self) -> Ledger | None:
        """The options of the ledger; None if it is off."""
        if isinstance(self.ledger, Ledger):
            return self.ledger
        return Ledger() if self.ledger else None

    @property
    def log_steps(self) -> int:
        """Optimizer steps between rows; -1 is one row at the end of each epoch."""
        return read_log_interval("log_every", self.log_every)
