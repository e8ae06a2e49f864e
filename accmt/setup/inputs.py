"""Finds and checks the inputs of a run before anything is built: data, metrics, model selection, trackers."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from accmt.errors import ArgumentError, fail
from accmt.files import require_writable_folder
from accmt.messages import say_once
from accmt.metrics import Metric, build_metrics
from accmt.metrics.metric import IsBetter
from accmt.module import AcceleratorModule
from accmt.options import Settings
from accmt.options.optimizer_and_scheduler_arguments import watches_a_result
from accmt.options.saving import RegisteredSaving
from accmt.options.yaml_reader import SECTIONS
from accmt.processes import broadcast_object, is_main_process
from accmt.registry import addon
from accmt.saving import TRAIN_LOSS, Patience, Selection, without_validation
from accmt.saving.selection import Quantity
from accmt.setup.datasets import UserData, find_sets
from accmt.setup.module_checks import check_validation
from accmt.tracking import Tracking, default_run_name, default_track_name, resolve_trackers

if TYPE_CHECKING:
    from accmt import Trainer
    from accmt.recovery.resume import Resumed


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a run.

    Attributes:
        train_data: The training data.
        val_data: The validation sets by name; a single one has the name "".
        metrics: The metrics of each validation set.
        selection: The rules by which models are saved.
        patience: Early stopping, or None.
        tracking: The trackers.
    """

    train_data: Any
    val_data: Mapping[str, Any]
    metrics: Mapping[str, tuple[Metric, ...]]
    selection: Selection
    patience: Patience | None
    tracking: Tracking


def check_inputs(trainer: Trainer, module: AcceleratorModule, user_data: UserData, resumed: Resumed | None) -> Inputs:
    """Find and check the inputs before anything is built.

    Processes: collective.
    """
    settings = trainer.settings
    train, val_sets = find_sets(module, user_data, settings)
    if val_sets:
        check_validation(module)
    if settings.saving.model_saving is not None or trainer.registered_savings:
        require_writable_folder(settings.model_folder, "model_path")
    metrics = metrics_of_sets(settings.evaluation.metrics, list(val_sets) or [""])
    saving, sets, got = settings.saving, list(val_sets), "no validation data"
    rule = saving.rule if sets else without_validation(saving.rule)
    if rule != saving.rule:
        say_once(f"{got}: models are saved by best_train_loss")
    selection = _selection_of(settings, rule, metrics, trainer.registered_savings, sets=sets)
    if selection.needs_validation and not sets:
        do = "pass validation data to fit, or model_saving='best_train_loss'"
        raise fail(ArgumentError, f"Trainer(model_saving={rule!r})", got=got, expected="validation data", do=do)
    patience = _patience_of(settings, rule, metrics, sets=sets)
    if patience is not None and patience.needs_validation and not sets:
        do = "pass validation data to fit, or patience={'train_loss': 3}"
        raise fail(ArgumentError, f"Trainer(patience={saving.patience!r})", got=got, expected="validation data", do=do)
    return Inputs(
        train_data=train,
        val_data=val_sets,
        metrics=metrics,
        selection=selection,
        patience=patience,
        tracking=trainer.chosen_tracking or _build_tracking(settings, resumed),
    )


def check_metrics(settings: Settings, registered: Sequence[RegisteredSaving] = ()) -> None:
    """Check metrics, saving rules and patience as far as possible without data."""
    if settings.evaluation.is_off:
        addon("reject_without_evaluations")(settings, registered)
    user_metrics = settings.evaluation.metrics
    groups = user_metrics.values() if _is_by_set(user_metrics) else [user_metrics]
    metrics = {str(number): build_metrics(group) for number, group in enumerate(groups)}
    selection = _selection_of(settings, settings.saving.rule, metrics, registered, sets=None)
    if "monitor" in settings.hps.scheduler_kwargs and watches_a_result(settings.hps.scheduler_class):
        find_monitored(settings, selection, settings.hps.scheduler_kwargs["monitor"])
    _patience_of(settings, settings.saving.rule, metrics, sets=None)


def find_monitored(settings: Settings, selection: Selection, name: str, *, is_own: bool = False) -> Quantity:
    """Return the result that a scheduler monitors.

    Args:
        is_own: Whether the module's `get_scheduler` chose it, rather than the hyper-parameters.

    Raises:
        ArgumentError: There is no such result, or it is a training result.
    """
    found = selection.find_quantity(name)
    if found is not None and found.key != TRAIN_LOSS:
        return found
    names = [one for one in selection.directions if f"best_{one}" != TRAIN_LOSS]
    is_loss = name in (settings.tracking.val_loss_metric_name, "val_loss", "eval_loss", "loss")
    do = f'metrics={{"{name}": "max"}}, or "min", where a step, self.log or a hook reports it; or add the metric'
    where = settings.hps.where("scheduler", "monitor")
    if is_loss:
        do = "write `monitor: valid_loss`, or leave it out"
    if is_own:
        where, do = "scheduler.monitor, set in get_scheduler", do.replace("`monitor: valid_loss`", "'valid_loss'")
    raise fail(
        ArgumentError, where, got=repr(name), expected=f"one of {', '.join(names)}, or another metric's name", do=do
    )


def _is_by_set(user_metrics: Any) -> bool:
    """Return whether the keys of a dict must be validation sets: a list of metrics has no name."""
    return isinstance(user_metrics, Mapping) and any(isinstance(value, list | tuple) for value in user_metrics.values())


def metrics_of_sets(user_metrics: Any, sets: Sequence[str]) -> dict[str, tuple[Metric, ...]]:
    """Return the metrics of each validation set."""
    is_by_set = _is_by_set(user_metrics) or (isinstance(user_metrics, Mapping) and set(user_metrics) <= set(sets))
    if not is_by_set:
        return {name: build_metrics(user_metrics) for name in sets}
    unknown = [name for name in user_metrics if name not in sets]
    if unknown:
        got, expected = f"metrics for {unknown[0]!r}", f"names of the validation sets: {list(sets)}"
        raise fail(ArgumentError, "Trainer(metrics=...)", got=got, expected=expected, do="rename one of the two")
    return {name: build_metrics(user_metrics.get(name)) for name in sets}


_Metrics = Mapping[str, tuple[Metric, ...]]


def _directions(settings: Settings, metrics: _Metrics, sets: Sequence[str] | None) -> dict[str, IsBetter]:
    every = {
        (set_name, entry): is_better
        for set_name, group in metrics.items()
        for metric in group
        for entry, is_better in metric.directions.items()
    }
    directions: dict[str, IsBetter] = {}
    for section in map(settings.hps.section, SECTIONS):  # of the hyper-parameters, which may add results
        directions |= section.directions() if hasattr(section, "directions") else {}
    directions |= {entry: is_better for (_, entry), is_better in every.items()}
    choices = settings.evaluation.metric_options.averages
    if choices is None:
        return directions
    if sets is None:  # so the inputs are unknown until it is called, but the results are known
        return dict.fromkeys(choices, operator.gt) | directions
    of_sets = {f"{entry}__{name}" if name else entry: is_better for (name, entry), is_better in every.items()}
    of_averages: dict[str, IsBetter] = addon("averages")(choices).find_directions(of_sets)
    return of_averages | directions


def _selection_of(
    settings: Settings,
    rule: Any,
    metrics: _Metrics,
    registered: Sequence[RegisteredSaving],
    *,
    sets: Sequence[str] | None,
) -> Selection:
    below, above = settings.saving.model_saving_below, settings.saving.model_saving_above
    selection = Selection(rule, _directions(settings, metrics, sets), sets=sets, below=below, above=above)
    for saving in registered:
        selection.register(saving.name, below=saving.below, above=saving.above)
    return selection


def _patience_of(settings: Settings, rule: Any, metrics: _Metrics, *, sets: Sequence[str] | None) -> Patience | None:
    patience = settings.saving.patience_evaluations
    return None if patience is None else Patience(patience, rule, _directions(settings, metrics, sets), sets=sets)


def _build_tracking(settings: Settings, resumed: Resumed | None) -> Tracking:
    logging = settings.tracking
    name = logging.run_name or default_run_name() if resumed is None else resumed.others["run_name"]
    return Tracking(
        resolve_trackers(logging.log_with),
        track_name=logging.track_name or default_track_name(settings.model_folder),
        run_name=broadcast_object(name),
        logging_dir=logging.logging_dir,
        home=settings.home,
        tracker_kwargs=logging.tracker_kwargs,
        is_main_process=is_main_process() and not settings.running.fast_dev_run,  # other processes write nothing
        verbose=settings.running.verbose,
        offline=logging.tracker_options.offline,
    )
