"""The Trainer's arguments about logging and trackers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from accmt.errors import ArgumentError, UnknownArgumentError, explain, nearest
from accmt.options.checks import Options, raise_wrong_value, require_mapping, require_text, set_field, write_argument
from accmt.options.units import read_every
from accmt.registry import names

# ---- What a run measures of itself and logs beside losses and metrics.


@dataclass(frozen=True, kw_only=True)
class Monitor:
    """What is logged; each field that is on adds exactly the values it names, to the rows of training values.

    Args:
        train_loss: The training loss.
        validation_loss: The validation losses.
        additional_metrics: What else evaluations result in.
        learning_rate: `learning_rate`; with several groups of parameters `learning_rate_0`, `learning_rate_1` ...
        grad_norm: `grad_norm`, the norm of the gradient of the row's last step, over all parameters, before clipping.
            True is the 2-norm; a number, or "inf", is another order.
        epoch: `epoch`, the epochs that are done, with the fraction of the current one.
        throughput: `samples_per_s` and `batches_per_s` of all processes since the last row, evaluations and saving left
            out; and `tokens_per_s`, where batches have `input_ids`; with `max_tokens` in the hyper-parameters
            `real_tokens_per_s` and the share of `padding`.
        time_split: `seconds_data`, `seconds_compute`, `seconds_evaluation`, `seconds_saving` and `seconds_other` since
            the last row.
        cpu_utilization: `CPU_PROCESS_0`, the memory of the main process in GB; `CPU`, the use of all cores, and `RAM`,
            that of the machine's memory, in percent.
        gpu_utilization: `GPU_0`, the memory that torch holds of the main process's GPU, and `GPU_0_allocated`, the part
            of it in use, in GB; and of each GPU of the machine `GPU_0_used`, GB of all processes, and
            `GPU_0_utilization`, in percent, where the package nvidia-ml-py is installed.
        mfu: `mfu`, the share of the device's peak that the model's own operations make up, from 0 to 1. The peak is
            known of common GPUs; a number gives it, in operations a second.
        checkpoint: `checkpoint`, a row with the number of optimizer steps, whenever a checkpoint was taken.
        added: What other packages measure, by name: entry points of the group `accmt.monitored_values`. In a dict or a
            list their names stand beside those above.

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
            _reject("mfu", self.mfu, "True or False, or operations a second such as 312e12")

    @property
    def norm_order(self) -> float | None:
        """The order of the gradient's norm; None is off."""
        if isinstance(self.grad_norm, bool):
            return 2.0 if self.grad_norm else None
        return float(self.grad_norm)

    @classmethod
    def from_config(cls, config: Any) -> Monitor:
        """Read what the Trainer's `monitor` may be.

        Args:
            config: None is `Monitor()`; a Monitor; a dict of its fields; a list of the fields to switch on; or the path
                of a YAML or JSON file of either.

        Raises:
            UnknownArgumentError: There is no such field; the message names the nearest.
            ArgumentError: `config` is something else, or a value cannot be.
            FileNotFoundError: There is no such file.
        """
        if isinstance(config, str | os.PathLike):
            import yaml

            if not Path(config).is_file():
                got = f"no such file, seen from {Path.cwd()}"
                expected, do = "a YAML or JSON file of its fields, a dict or a list", 'monitor=["grad_norm"]'
                raise FileNotFoundError(explain(f"Trainer(monitor={str(config)!r})", got, expected, do))
            config = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
        if config is None:
            return cls()
        if isinstance(config, cls):
            return config
        if isinstance(config, list | tuple | set):
            config = dict.fromkeys(config, True)
        if not isinstance(config, Mapping):
            _reject_config(config)
        known = [field.name for field in fields(cls)]
        others = {name: is_on for name, is_on in config.items() if name not in known}
        added = names("accmt.monitored_values") if others else []
        for name, is_on in others.items():
            if name not in added:
                _reject_name(name, [*known, *added])
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


def _reject(name: str, value: Any, expected: str) -> NoReturn:
    got = f"{value!r} ({type(value).__name__})"
    raise ArgumentError(explain(f"Monitor({name}=...)", got, expected, f"Monitor({name}=True)"))


def _reject_name(name: Any, names: list[str]) -> NoReturn:
    raise UnknownArgumentError(
        explain(
            "Trainer(monitor=...)",
            f"{name!r}, which is not measured",
            f"any of {names}",
            f"did you mean {nearest(name, names, cutoff=0)}?",
        )
    )


def _reject_config(config: Any) -> NoReturn:
    got, do = f"{config!r} ({type(config).__name__})", 'monitor=["learning_rate", "grad_norm"]'
    raise ArgumentError(explain("Trainer(monitor=...)", got, "a Monitor, a dict, a list of names, or a path", do))


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
