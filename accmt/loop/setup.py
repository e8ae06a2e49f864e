"""Builds a Run: checks the module, starts the Accelerator, makes loaders, optimizer, schedule and hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from accmt.callbacks import Callback, Hooks, build_callbacks
from accmt.callbacks.progress import ProgressBar
from accmt.callbacks.report import EvaluationReport
from accmt.data import Loader, UnsharedLoader, draw_seed
from accmt.errors import ArgumentError, MetricError, ModuleContractError, explain
from accmt.files import require_writable_folder
from accmt.loop.cadence import Cadence
from accmt.loop.contract import adapt_training_step, adapt_validation_step, check_module, check_validation, defines
from accmt.loop.launch import build_accelerator
from accmt.loop.reduction import require_equal_weights
from accmt.loop.row_logger import RowLogger
from accmt.loop.run import Actions, Run
from accmt.loop.saver import ModelSaver
from accmt.loop.sources import build_train_loader, build_validation_loader, find_train_data, find_validation_data
from accmt.loop.weighting import Weighting
from accmt.messages import say_once
from accmt.metrics import Metric, TrainingWindow
from accmt.module import AcceleratorModule
from accmt.optimization import build_optimizer, build_scheduler
from accmt.optimization.stepper import Stepper
from accmt.processes import broadcast_object, is_main_process, num_processes
from accmt.saving import TRAIN_LOSS, VALID_LOSS, Selection
from accmt.settings import Settings
from accmt.tracking import Tracking, default_run_name, default_track_name, resolve_trackers

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt.trainer import Trainer


@dataclass(frozen=True)
class _Inputs:
    """What was given, found and checked without building anything."""

    train_data: Any
    val_data: Any
    metrics: tuple[Metric, ...]
    selection: Selection
    tracking: Tracking


@dataclass(frozen=True)
class _Prepared:
    """What the model, its optimizer and its schedule became."""

    model: nn.Module
    unwrapped_model: nn.Module
    stepper: Stepper
    scheduler: Any


def build_run(trainer: Trainer, module: Any, train_data: Any, val_data: Any) -> Run:
    """Build everything that a run needs, and check all that can be known before the first batch.

    Processes: collective.

    Args:
        trainer: The Trainer, whose settings and overridable steps are used.
        module: The user's module.
        train_data: What `fit` was given to train on.
        val_data: What `fit` was given to validate on.

    Raises:
        AccmtError: A fault in module, data or settings.
    """
    settings, state = trainer.settings, trainer.state
    accelerator = build_accelerator(settings.running)
    inputs = _check_inputs(settings, module, train_data, val_data)
    seed = broadcast_object(draw_seed() if settings.running.seed is None else settings.running.seed)
    train_loader, val_loaders = _build_loaders(module, inputs, settings, seed, accelerator)
    training_step = adapt_training_step(module, state)
    validation_step = adapt_validation_step(module, "validation_step")
    saver = ModelSaver(inputs.selection)
    hooks = _build_hooks(trainer, module, [RowLogger(inputs.tracking), saver])
    cadence = Cadence.of(settings)
    _check_fraction(cadence, train_loader)
    prepared = _prepare(module, accelerator, settings, cadence, train_loader)
    _check_plateau(prepared.scheduler, val_loaders)
    state.num_processes, state.best = num_processes(), inputs.selection.best
    _equip_module(trainer, module, accelerator, prepared)
    return Run(
        settings=settings,
        accelerator=accelerator,
        module=module,
        model=prepared.model,
        unwrapped_model=prepared.unwrapped_model,
        training_step=training_step,
        validation_step=validation_step,
        train_loader=train_loader,
        val_loaders=val_loaders,
        metrics=inputs.metrics,
        stepper=prepared.stepper,
        scheduler=prepared.scheduler,
        actions=Actions(trainer.do_backward, trainer.do_opt_step, trainer.do_zero_grad),
        hooks=hooks,
        cadence=cadence,
        state=state,
        weighting=Weighting(accelerator.device),
        window=TrainingWindow(accelerator.device),
        saver=saver,
        tracking=inputs.tracking,
        seed=seed,
        counts_own_samples=defines(module, "get_batch_size"),
    )


def _check_inputs(settings: Settings, module: Any, train_data: Any, val_data: Any) -> _Inputs:
    if settings.checkpoints.is_on:
        say_once("checkpoints are not written yet in this version; checkpoint_every=None silences this line")
    check_module(module)
    val_data = find_validation_data(module, val_data, settings.data)
    if val_data is not None:
        check_validation(module)
    if settings.saving.model_saving is not None:
        require_writable_folder(settings.saving.folder, "model_path")
    metrics = read_metrics(settings)
    return _Inputs(
        train_data=find_train_data(module, train_data),
        val_data=val_data,
        metrics=metrics,
        selection=_build_selection(settings, metrics, has_validation=val_data is not None),
        tracking=_build_tracking(settings),
    )


def read_metrics(settings: Settings) -> tuple[Metric, ...]:
    """Return the metrics of the settings, and check them and the rule of saving, which needs no data.

    Raises:
        MetricError: Something is no Metric, or two have one name.
        ArgumentError: No such rule of saving.
    """
    value = settings.evaluation.metrics
    metrics = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    for metric in metrics:
        if not isinstance(metric, Metric):
            got = f"the class {metric.__name__}" if isinstance(metric, type) else repr(metric)
            raise MetricError(explain("Trainer(metrics=...)", got, "accmt.Metric objects", "metrics=[Accuracy()]"))
    for names in ([metric.name for metric in metrics], [metric.main_metric for metric in metrics]):
        if len(set(names)) != len(names):
            raise MetricError(explain("Trainer(metrics=...)", f"the names {names}", "each name once", "rename one"))
    _build_selection(settings, metrics, has_validation=True)
    return metrics


def _build_selection(settings: Settings, metrics: tuple[Metric, ...], *, has_validation: bool) -> Selection:
    rule = settings.saving.model_saving
    if rule == VALID_LOSS and not has_validation:
        say_once(f"no validation data: models are saved by {TRAIN_LOSS}")
        rule = TRAIN_LOSS
    selection = Selection(rule, {metric.main_metric: metric.is_better for metric in metrics})
    if selection.needs not in (None, TRAIN_LOSS) and not has_validation:
        do = f"pass validation data to fit, or model_saving={TRAIN_LOSS!r}"
        raise ArgumentError(explain(f"Trainer(model_saving={rule!r})", "no validation data", "validation data", do))
    return selection


def _build_tracking(settings: Settings) -> Tracking:
    told = settings.tracking
    return Tracking(
        resolve_trackers(told.log_with),
        track_name=told.track_name or default_track_name(settings.saving.model_path),
        run_name=broadcast_object(told.run_name or default_run_name()),
        logging_dir=told.logging_dir,
        tracker_kwargs=told.tracker_kwargs,
        is_main_process=is_main_process(),
        verbose=settings.running.verbose,
    )


def _build_loaders(
    module: AcceleratorModule, inputs: _Inputs, settings: Settings, seed: int, accelerator: Accelerator
) -> tuple[Loader, dict[str, Loader]]:
    pin_memory = settings.data.dataloader_pin_memory and accelerator.device.type != "cpu"
    train = build_train_loader(module, inputs.train_data, settings, seed=seed, pin_memory=pin_memory)
    if num_processes() > 1 and not settings.data.shard_dataloaders:
        train = UnsharedLoader(train, accelerator.device)
    if inputs.val_data is None:
        return train, {}
    validation = build_validation_loader(module, inputs.val_data, settings, seed=seed, pin_memory=pin_memory)
    if num_processes() > 1 and not settings.data.shard_dataloaders:
        validation = UnsharedLoader(validation, accelerator.device)
    return train, {"": validation}


def _check_plateau(scheduler: Any, val_loaders: dict[str, Loader]) -> None:
    if isinstance(scheduler, ReduceLROnPlateau) and not val_loaders:
        got = "ReduceLROnPlateau, which steps by the validation loss, and no validation data"
        raise ArgumentError(
            explain("scheduler", got, "validation data", "pass them to fit, or choose another schedule")
        )


def _check_fraction(cadence: Cadence, loader: Loader) -> None:
    every = cadence.evaluate_every
    if isinstance(every, float) and loader.num_rounds is None:
        got = f"{every}, a fraction of an epoch whose length is unknown"
        do = "evaluate_every_n_steps=100, say"
        raise ArgumentError(explain("Trainer(evaluate_every_n_steps=...)", got, "a whole number of updates", do))


def _prepare(
    module: AcceleratorModule, accelerator: Accelerator, settings: Settings, cadence: Cadence, loader: Loader
) -> _Prepared:
    told = settings.running
    if accelerator.device_placement:
        module.model.to(accelerator.device)
    if told.compile:
        module.model.compile(**(told.compile_kwargs or {}))  # in place: names of weights stay as they are
    optimizer = module.get_optimizer() or build_optimizer(settings.hps, module.model.parameters())
    _require_own_parameters(module, optimizer)
    scheduler = _build_scheduler(module, optimizer, settings, cadence, loader)
    model, _ = accelerator.prepare(module.model, optimizer)
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    require_equal_weights(unwrapped)
    stepper = Stepper(
        accelerator,
        optimizer,
        set_to_none=settings.optimization.set_to_none,
        clip=settings.optimization.clip_grad,
        clip_type=settings.optimization.clip_grad_type,
    )
    return _Prepared(model, unwrapped, stepper, scheduler)


def _require_own_parameters(module: AcceleratorModule, optimizer: Any) -> None:
    own = {id(parameter) for parameter in module.model.parameters()}
    if not all(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        got = "an optimizer of parameters that are not in self.model: they would be neither reduced nor saved"
        do = "put their modules into self.model, such as an nn.ModuleDict"
        raise ModuleContractError(
            explain(f"{type(module).__name__}.get_optimizer", got, "parameters of self.model", do)
        )


def _build_scheduler(
    module: AcceleratorModule, optimizer: Any, settings: Settings, cadence: Cadence, loader: Loader
) -> Any:
    total = count_updates(cadence, loader, settings)
    per_epoch = _updates_in(0, loader, settings)
    if defines(module, "get_scheduler"):
        epochs = cadence.epochs or (-(-total // per_epoch) if total and per_epoch else 1)
        own = module.get_scheduler(optimizer, steps_per_epoch=per_epoch or total or 0, epochs=epochs)
        if own is not None:
            return own
    return build_scheduler(settings.hps, optimizer, total_updates=total, updates_per_epoch=per_epoch)


def count_updates(cadence: Cadence, loader: Loader, settings: Settings) -> int | None:
    """Return the updates of a whole run; None if neither epochs of a known length nor `max_steps` bound it."""
    if cadence.epochs is None or loader.num_rounds is None:
        return cadence.max_steps
    updates = sum(_updates_in(epoch, loader, settings) or 0 for epoch in range(cadence.epochs))
    return updates if cadence.max_steps is None else min(updates, cadence.max_steps)


def _updates_in(epoch: int, loader: Loader, settings: Settings) -> int | None:
    if loader.num_rounds is None:
        return None
    return -(-loader.num_rounds // (settings.optimization.accumulation_at(epoch) * loader.micro_batches))


def _equip_module(trainer: Trainer, module: AcceleratorModule, accelerator: Accelerator, prepared: _Prepared) -> None:
    module.trainer = trainer
    module.state = trainer.state
    module.accelerator = accelerator
    module.device = accelerator.device
    module.model = prepared.model
    module.optimizer = prepared.stepper.optimizer
    module.scheduler = prepared.scheduler
    module.tracker = None
    if module.teacher is not None:
        module.teacher.to(accelerator.device).eval().requires_grad_(requires_grad=False)


def _build_hooks(trainer: Trainer, module: AcceleratorModule, builtin: list[Callback]) -> Hooks:
    told = trainer.settings.running
    of_module = build_callbacks(module.get_callbacks())
    replaced = {type(callback) for callback in of_module}
    of_trainer = [callback for callback in build_callbacks(told.callbacks) if type(callback) not in replaced]
    loss_name = trainer.settings.tracking.train_loss_metric_name
    enable_bar = told.verbose if told.enable_progress_bar is None else told.enable_progress_bar
    bar = ProgressBar(
        enable=None if told.enable_progress_bar is None and enable_bar else enable_bar,
        loss_name=loss_name,
    )
    callbacks = [*of_trainer, *of_module, bar, EvaluationReport(loss_name), *builtin]
    for callback in callbacks:
        callback.trainer, callback.module, callback.state = trainer, module, trainer.state
    return Hooks([*callbacks, module], is_main_process=is_main_process())
