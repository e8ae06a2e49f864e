"""What a run measures of itself and logs beside losses and metrics."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from accmt.errors import ArgumentError, UnknownArgumentError, explain, nearest
from accmt.registry import names


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
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool" and not isinstance(value, bool):
                _reject(field.name, value, "True or False")
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
