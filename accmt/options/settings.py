"""All Trainer settings in one frozen object."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from accmt.errors import ArgumentError, HyperParameterError, join_errors
from accmt.files import is_current
from accmt.options.checks import Options, hints_of, is_off, to_plain
from accmt.options.data import DataSettings
from accmt.options.evaluation import EvaluationSettings
from accmt.options.failures import Failures, FailureSettings
from accmt.options.hyperparameters import HyperParameters
from accmt.options.optimization import OptimizationSettings
from accmt.options.running import RunningSettings
from accmt.options.saving import CheckpointSettings, SavingSettings
from accmt.options.tracking import TrackingSettings
from accmt.registry import addon
from accmt.secrets import remember


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a Trainer, checked and grouped.

    Attributes:
        hps: The hyper-parameters.
        saving: About the model folder.
        checkpoints: About checkpoints.
        evaluation: About validation.
        tracking: About logs and trackers.
        optimization: About optimizer steps.
        data: About batches.
        running: About the run as a whole.
        handling: About failures.
        home: The working folder when the Trainer was created; relative paths start there, even after `os.chdir`.
    """

    hps: HyperParameters
    saving: SavingSettings
    checkpoints: CheckpointSettings
    evaluation: EvaluationSettings
    tracking: TrackingSettings
    optimization: OptimizationSettings
    data: DataSettings
    running: RunningSettings
    handling: FailureSettings
    home: Path = field(default_factory=Path.cwd, compare=False)

    GROUPS: ClassVar[dict[str, type]] = {
        "saving": SavingSettings,
        "checkpoints": CheckpointSettings,
        "evaluation": EvaluationSettings,
        "tracking": TrackingSettings,
        "optimization": OptimizationSettings,
        "data": DataSettings,
        "running": RunningSettings,
        "handling": FailureSettings,
    }

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> Settings:
        """Sort the Trainer's arguments into groups and check them.

        Args:
            arguments: Every argument of the Trainer by name, `hps_config` included.

        Raises:
            ArgumentError: An invalid value.
            UnknownArgumentError: An argument that does not exist.
            HyperParameterError: Invalid hyper-parameters.
            CombinedError: Invalid hyper-parameters and other errors.
        """
        values = {name: to_plain(value) for name, value in arguments.items()}
        remember(values)
        makers: dict[str, Callable[[], Any]] = {}
        for name, group in cls.GROUPS.items():
            makers[name] = partial(group, **{key: values[key] for key in hints_of(group) if key in values})
        makers["hps"] = partial(HyperParameters.from_config, arguments["hps_config"])
        errors: list[ArgumentError | HyperParameterError] = []
        if values["tracker_kwargs"]:
            has_tracker = not is_off(values["log_with"])
            try:
                names = values.keys() - {"tracker_kwargs"}
                addon("check_keywords")(values["tracker_kwargs"], names, has_tracker=has_tracker)
            except ArgumentError as error:
                errors.append(error)
        parts = {}
        for name, make in makers.items():
            try:
                parts[name] = make()
            except (ArgumentError, HyperParameterError) as error:
                errors.append(error)
        if errors:
            raise join_errors(errors)
        return cls(**parts)

    @property
    def failures(self) -> Failures:
        """How the run reacts to failures."""
        return self.handling.failures

    def is_set(self, argument: str) -> bool:
        """Return whether a setting, a hyper-parameter or an argument of the Trainer, is neither None nor False."""
        owners = [self.hps, *(getattr(self, name) for name in self.GROUPS)]
        values = [getattr(owner, argument, None) for owner in owners]
        return any(value is not None and value is not False for value in values)

    def samples_per_batch(self, num_parts: int) -> int:
        """Return the samples of a full batch over all processes."""
        return self.hps.train_batch_size * (1 if self.optimization.same_bits else num_parts)

    def samples_per_step(self, num_parts: int, epoch: int = 0) -> int | None:
        """Return the samples of a full optimizer step of an epoch; None if a window maker decides.

        Args:
            num_parts: The number of processes, or groups of processes, that train on different data.
            epoch: The epoch, from 0.
        """
        batches = self.optimization.accumulation_at(epoch)
        return None if batches is None else self.samples_per_batch(num_parts) * batches

    def from_home(self, path: str | PathLike[str]) -> Path:
        """Return a path unchanged while `home` is the working folder, and an absolute one otherwise."""
        return Path(path) if is_current(self.home) else self.home / path

    @property
    def model_folder(self) -> Path:
        """The model folder."""
        return self.from_home(self.saving.local_model_path)

    @property
    def checkpoint_folder(self) -> Path:
        """The local checkpoint folder: as set, or `checkpoint-<name>` next to the model folder."""
        if self.checkpoints.checkpoint is not None and self.checkpoints.url is None:
            return self.from_home(self.checkpoints.checkpoint)
        model = self.model_folder
        if model.name in ("", ".."):
            model = model.resolve()
        return model.with_name(f"checkpoint-{model.name}")

    def resuming_newest(self) -> Settings:
        """Return these settings with `resume="auto"`."""
        return replace(self, checkpoints=replace(self.checkpoints, resume="auto"))

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each argument that has one, by name."""
        defaults = {}
        for group in cls.GROUPS.values():
            for setting in fields(group):
                if setting.default is not MISSING:
                    defaults[setting.name] = setting.default
        return defaults

    def to_arguments(self) -> dict[str, Any]:
        """Return the arguments that recreate these settings, without those at their default."""
        arguments: dict[str, Any] = {"hps_config": self.hps.to_dict()}
        for name in self.GROUPS:
            group = getattr(self, name)
            for setting in fields(group):
                value = getattr(group, setting.name)
                if isinstance(value, Options):
                    value = value.to_dict() or setting.default
                if isinstance(value, Mapping):
                    value = {key: _to_plain(entry) for key, entry in value.items()}
                # 1 is one batch and 1.0 all, so that values of another type differ.
                if type(value) is not type(setting.default) or value != setting.default:
                    arguments[setting.name] = value
        arguments.update(arguments.pop("tracker_kwargs"))
        return arguments


def _to_plain(value: Any) -> Any:
    """Return options as a dict, and any other value unchanged."""
    return value.to_dict() if isinstance(value, Options) else value


# ---- Trial runs: `fast_dev_run` saves nothing, `overfit_batches` trains and validates on the same data.


def apply_trials(settings: Settings) -> Settings:
    """Return settings with `fast_dev_run` and `overfit_batches` applied."""
    if number := settings.data.overfit_batches:
        limits = {"train": number, "val": number, "test": settings.data.limits.test}
        data = replace(
            settings.data,
            limit_batches={**limits, "predict": settings.data.limits.predict},
            shuffle_train=False,
            shuffle_validation=False,
            sampler=None,
        )
        settings = replace(settings, data=data)
    if settings.running.fast_dev_run:
        number = int(settings.running.fast_dev_run)
        hps = copy.copy(settings.hps)
        hps.epochs, hps.max_steps, hps.max_samples, hps.max_target_tokens = 1, number, None, None
        quiet = without_traces(settings)
        settings = replace(
            quiet,
            hps=hps,
            data=replace(quiet.data, limit_batches=number),
            evaluation=replace(quiet.evaluation, num_sanity_val_steps=0, evaluate_every_n_steps=None),
            running=replace(quiet.running, min_length=None, max_time=None),
        )
    return settings


def without_traces(settings: Settings) -> Settings:
    """Return settings for a run without models, checkpoints and trackers."""
    return replace(
        settings,
        saving=replace(settings.saving, model_saving=None, patience=None),
        checkpoints=replace(
            settings.checkpoints, checkpoint=None, resume=False, checkpoint_every=None, checkpointer=None, fork=None
        ),
        evaluation=replace(settings.evaluation, eval_when_start=False),
        tracking=replace(settings.tracking, log_with=None),
        handling=replace(settings.handling, handlers=None),
    )
