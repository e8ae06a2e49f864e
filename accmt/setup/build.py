"""Builds a Run: checks the module, starts the Accelerator, makes loaders, optimizer, scheduler and hooks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from accmt.attributes import Attributes
from accmt.cadence import Cadence, RunLength
from accmt.callbacks import (
    Callback,
    Hooks,
    MainProcessCallback,
    StatelessCallback,
    build_callbacks,
    name_by_class,
)
from accmt.callbacks.console import DynamicRows, EndSummary, EvaluationReport, ModelSummary
from accmt.callbacks.progress import ProgressBar, is_notebook
from accmt.data import Loader, derive_seed, draw_seed, seed_generators
from accmt.data.seeding import seed_with_global
from accmt.engine.accelerator import build_accelerator
from accmt.errors import ArgumentError, fail
from accmt.failures import Board, Clock, Interruption, Watch
from accmt.features.listed import all_features
from accmt.loaders import Loaders, UserData, at_epoch_of_building, check_reloading
from accmt.loop.evaluation import EvaluationResults
from accmt.loop.logging import RowLogger, logging_step
from accmt.metrics import RunningAverages
from accmt.module import AcceleratorModule, defines
from accmt.optimization.schedulers import monitored_by
from accmt.options import Settings
from accmt.options.units import read_max_time
from accmt.processes import broadcast_object, is_main_process, num_processes
from accmt.registry import addon
from accmt.run import Actions, Run
from accmt.run.checkpoints import Checkpoints
from accmt.run.model_saver import ModelSaver
from accmt.run.restart import Recovery, is_relaunched
from accmt.run.resume import Resumed, find_newest, find_resumed
from accmt.run.run_state import StepSnapshot, restore
from accmt.run.shutdown import stopping_if_asked
from accmt.run.trained_parameters import TrainedParameters
from accmt.run.weighting import Weighting
from accmt.saving import TRAIN_LOSS, Selection
from accmt.saving.selection import Quantity
from accmt.setup.model import Prepared, attach_run, configure_model, measure_run, prepare
from accmt.setup.user_methods import adapt_training_step, adapt_validation_step
from accmt.state import Counters, TrainingState
from accmt.tracking import Tracking, default_run_name, default_track_name

if TYPE_CHECKING:
    from accmt import Trainer


# ---- Built-in callbacks.


def make_builtin_callbacks(settings: Settings, tracking: Tracking, saver: ModelSaver) -> list[Callback]:
    """Return the built-in callbacks, in the order in which those with equal `order` are called."""
    running, logging = settings.running, settings.tracking
    loss_name = logging.train_loss_metric_name
    callbacks: list[Callback] = []
    outer: list[Callback] = []  # called last, after those that they measure
    if running.compile_buckets is not None:
        callbacks.append(DynamicRows())
    if running.profiler is not None:
        first, last = addon("profiler")(running.profiler, is_main_process=is_main_process())
        callbacks += first
        outer = last
    if logging.monitored.has_measurements:
        first, last = addon("monitor")(logging.monitored, loss_name, is_main_process=is_main_process())
        callbacks += first
        outer = [*last, *outer]
    if running.enable_model_summary:
        callbacks.append(ModelSummary(int(running.enable_model_summary)))
    enable_bar = running.enable_progress_bar
    bar: ProgressBar | None = None
    has_bar = running.verbose if enable_bar is None else enable_bar
    if has_bar:
        views, stream = [], None
        # In a notebook, a terminal bar and the curve would overwrite each other: the bar writes into the view.
        if is_notebook():
            view = addon("notebook_curve")(loss_name, logging.val_loss_metric_name)
            views, stream = [view], view.terminal
        bar = ProgressBar(enable=enable_bar, loss_name=loss_name, stream=stream)
        callbacks += [bar, *views]
    callbacks += [EvaluationReport(loss_name), EvaluationResults(), RowLogger(tracking, bar, logging.monitored), saver]
    if running.verbose and not running.fast_dev_run:
        callbacks.append(EndSummary(loss_name))
    return [*callbacks, *outer]


def build_run(trainer: Trainer, module: Any, user_data: UserData, recovery: Recovery) -> Run:
    """Build a run, and check everything that can be checked before the first batch.

    Processes: collective.
    """
    accelerator = build_accelerator(trainer.settings.running)
    # A restart of the same fork has a checkpoint of its own, and must not begin again.
    if trainer.settings.checkpoints.fork is not None and recovery.checkpoint is None:
        addon("begin_fork")(trainer, recovery)
    settings, state = trainer.settings, trainer.state
    resumed = _find_start(trainer, module, recovery)
    seed = _choose_seed(settings, resumed)
    # After the seed, which a resumed run takes from its checkpoint: weights that are drawn here are the same then.
    configure_model(module, accelerator, seed=seed)
    # Before the data are asked for, which a datamodule may download.
    if user_data.has_datamodule:
        addon("check_stage")("module", settings, module=module)
    check_reloading(settings.data, module, user_data)
    user_data.begin("fit", trainer, accelerator)
    known = {"module": module, "user_data": user_data, "accelerator": accelerator}
    with at_epoch_of_building(state, settings.data):
        facts = addon("check_stage")("inputs", settings, registered=trainer.registered_savings, **known)
    engine, tracking = facts.engine, trainer.chosen_tracking or _build_tracking(settings, resumed)
    steps = adapt_training_step(module, state), adapt_validation_step(module, "validation_step", facts.metrics)
    through = partial(stopping_if_asked, trainer=trainer)
    loaders = Loaders(trainer, module, user_data, recovery.lessons, engine, seed=seed, through=through)
    loaders.build(facts.train_data, facts.sets)
    saver = ModelSaver(facts.selection, facts.patience)
    callbacks = gather_callbacks(trainer, module)
    # After all loaders, which seed the generators of their own data.
    seed_with_global(module)
    seed_with_global(*callbacks)
    builtin = make_builtin_callbacks(settings, tracking, saver)
    hooks = connect_hooks(trainer, module, callbacks, builtin, seed=seed, device=accelerator.device)
    cadence = Cadence.of(settings)
    # Before the optimizer: the scheduler needs the number of steps.
    length = _place(trainer, module, loaders, cadence, resumed)
    prepared = prepare(module, engine, settings, cadence, length, callbacks)
    _settle_monitor(prepared.scheduler, settings, facts.selection, loaders.validation)
    state.num_processes, state.best = num_processes(), facts.selection.best
    attach_run(trainer, module, accelerator, prepared)
    saves = settings.checkpoints.every is not None or bool(settings.handling.kinds)
    watch = make_watch(settings, state, is_listening=saves, hang_timeout_s=settings.failures.hang_timeout_s)
    optimizer, own_model = prepared.stepper.optimizer, prepared.unwrapped_model
    replicas = None
    if num_processes() > 1 and settings.failures.compare_replicas:
        replicas = addon("replicas")(own_model, optimizer, state.global_step)
    run = Run(
        **vars(prepared),
        watch=watch,
        settings=settings,
        engine=engine,
        accelerator=accelerator,
        module=module,
        state=state,
        seed=seed,
        is_resumed=resumed is not None,
        length=length,
        training_step=logging_step(steps[0], module.logs.of_training),
        validation_step=steps[1],
        loaders=loaders,
        val_loaders=loaders.validation,
        counts_own_samples=defines(module, "get_batch_size"),
        metrics=facts.metrics,
        callbacks=tuple(callbacks),
        hooks=hooks,
        feature_kinds=all_features(settings, module, *callbacks),
        cadence=cadence,
        clock=Clock(read_max_time(settings.running.max_time)),
        saver=saver,
        tracking=tracking,
        actions=Actions.of(trainer, prepared.stepper),
        weighting=Weighting(engine.divisor),
        running_averages=RunningAverages(module.logs.of_training),
        checkpoints=Checkpoints(settings, prepared.model, optimizer),
        snapshot=StepSnapshot(own_model, is_kept=saves),
        recovery=recovery,
        attributes=Attributes(
            _name_owners(module, callbacks),
            own_model,
            accelerator.device,
            _objects_of(prepared, (facts.train_data, *facts.sets.values()), settings),
        ),
        trained=TrainedParameters(module, engine, optimizer, replicas),
    )
    if resumed is not None:
        restore(run, resumed)
        recovery.clear_up(resumed.folder)
    return run


def _name_owners(module: AcceleratorModule, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Return the objects whose attributes are state: the module, and callbacks without a `state_dict`."""
    kinds = (MainProcessCallback, StatelessCallback)
    owners = []
    for callback in callbacks:
        if type(callback).state_dict is Callback.state_dict and not isinstance(callback, kinds):
            owners.append(callback)
    return {"self": module} | name_by_class(owners)


def _objects_of(prepared: Prepared, data: Sequence[Any], settings: Settings) -> Iterator[Any]:
    """Yield the run's own objects, whose state checkpoints contain elsewhere: a module may have them in attributes."""
    if not settings.data.reload_epochs:  # otherwise, each epoch has others
        yield from data
        for part in data:
            if isinstance(part, DataLoader):
                yield part.dataset
    stepping = (prepared.stepper.optimizer, prepared.scheduler)
    yield from stepping
    # A wrapper of an optimizer, and several chained ones, have others in attributes: their state is in the wrapper's.
    for wrapper in stepping:
        if wrapper is None:
            continue
        for value in vars(wrapper).values():
            if isinstance(value, list | tuple):
                yield from value
            else:
                yield value


def _find_start(trainer: Trainer, module: AcceleratorModule, recovery: Recovery) -> Resumed | None:
    """Return the checkpoint to resume from, and set its position before the module's data methods are called."""
    # First: with different settings, processes would look for different checkpoints, and wait for each other.
    addon("check_stage")("start", trainer.settings)
    if num_processes() > 1:
        addon("find_disks")(trainer.settings)
    folder = recovery.take_checkpoint()
    # torchrun starts the same program again, whose `resume=False` would throw the progress away.
    if folder is None and is_relaunched(trainer.settings):
        folder = _find_folder(trainer.settings.resuming_newest()) or find_newest(trainer.settings)
    folder = folder or trainer.chosen_checkpoint or _find_folder(trainer.settings)
    resumed = find_resumed(trainer.settings, folder)
    if resumed is not None:
        recovery.learn(resumed.states["lessons"])
        trainer.state.load_state_dict(resumed.counters)
    # Methods of the module that make the data read the epoch of the checkpoint.
    module.trainer, module.state = trainer, trainer.state
    return resumed


def _find_folder(settings: Settings) -> Path | None:
    """Return the checkpoint that a feature has found in place of `resume`, or None."""
    folders = [feature.before_resume(settings) for feature in all_features(settings)]  # each acts, whatever is found
    return next((folder for folder in folders if folder is not None), None)


def make_watch(settings: Settings, state: TrainingState, *, is_listening: bool, hang_timeout_s: float | None) -> Watch:
    """Create the watch for signals and other processes.

    Processes: collective.
    """
    # Nobody else to watch, and a thread would cost each run its start.
    if num_processes() == 1 and hang_timeout_s is None:
        return Watch(Interruption(is_listening=is_listening))
    board = Board.open()
    interruption = Interruption(is_listening=is_listening, board=board)
    timeouts = {"hang_timeout_s": hang_timeout_s, "machine_timeout_s": settings.failures.machine_timeout_s}
    watch: Watch = addon("build_watch")(board, interruption, state, **timeouts)
    return watch


def _place(
    trainer: Trainer, module: AcceleratorModule, loaders: Loaders, cadence: Cadence, resumed: Resumed | None
) -> RunLength:
    """Set counters and data to the start of the run, and return its length."""
    state, source = trainer.state, loaders.train.source
    micro_batches_per_epoch = source.num_micro_batches
    if resumed is not None:
        source.resume_from(state.epoch, state.train_step, resumed.states["data"])
    done = Counters() if module.uses_manual_optimization else state  # its steps are not planned
    length = measure_run(trainer.settings, cadence, source, micro_batches_per_epoch, loaders.samples_per_step(), done)
    reloads = trainer.settings.data.reload_epochs > 0
    # Reloaded data may have grown: the scheduler keeps the length that it was planned for.
    if resumed is None or not reloads:
        return length
    return length.keep(resumed.states.get("plan"))


def _choose_seed(settings: Settings, resumed: Resumed | None) -> int:
    if resumed is not None:
        seed: int = resumed.states["seed"]
        return seed
    seed = draw_seed() if settings.running.seed is None else settings.running.seed
    return broadcast_object(seed)  # one that was drawn, or that a script reads from the rank, differs between processes


def _settle_monitor(
    scheduler: Any, settings: Settings, selection: Selection, val_loaders: Mapping[str, Loader]
) -> None:
    """Check what ReduceLROnPlateau monitors, and set its `mode` if it was left out."""
    if not isinstance(scheduler, ReduceLROnPlateau):
        return
    if not val_loaders:
        got = "no validation data for ReduceLROnPlateau, which monitors the validation loss or a metric"
        do = "pass them to fit, or choose another scheduler"
        raise fail(ArgumentError, "scheduler", got=got, expected="validation data", do=do)
    name, kwargs = monitored_by(scheduler), settings.hps.scheduler_kwargs
    is_own = kwargs.get("monitor") != name
    is_rising = find_monitored(settings, selection, name, is_own=is_own).is_better(1.0, 0.0)
    mode, direction, worst = "min", "lower", math.inf
    if is_rising:
        mode, direction, worst = "max", "higher", -math.inf
    # With the wrong mode, the learning rate falls while the metric improves.
    if scheduler.mode == mode:
        return
    if "monitor" in kwargs and "mode" not in kwargs and kwargs["monitor"] == name:
        scheduler.load_state_dict({**scheduler.state_dict(), "mode": mode, "mode_worse": worst, "best": worst})
        return
    got = f"{scheduler.mode!r} for {name}, where {direction} is better"
    do = f"mode: {mode}; or write for example `monitor: accuracy`, or set scheduler.monitor in get_scheduler"
    raise fail(ArgumentError, settings.hps.where("scheduler", "mode"), got=got, expected=repr(mode), do=do)


def find_monitored(settings: Settings, selection: Selection, name: str, *, is_own: bool = False) -> Quantity:
    """Return the result that a scheduler monitors.

    Args:
        is_own: Whether the module's `get_scheduler` chose it, rather than the hyper-parameters.

    Raises:
        ArgumentError: There is no such result, or it is a training result.
    """
    quantity = selection.find_quantity(name)
    # A scheduler is stepped after an evaluation, where the training loss is that of another moment.
    if quantity is not None and quantity.key != TRAIN_LOSS:
        return quantity
    names = [result for result in selection.directions if f"best_{result}" != TRAIN_LOSS]
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


def _build_tracking(settings: Settings, resumed: Resumed | None) -> Tracking:
    logging = settings.tracking
    name = logging.run_name or default_run_name()
    if resumed is not None:
        name = resumed.states["run_name"]
    trackers = []
    if logging.log_with:
        trackers = addon("resolve_trackers")(logging.log_with)
    return Tracking(
        trackers,
        track_name=logging.track_name or default_track_name(settings.model_folder),
        run_name=broadcast_object(name),
        logging_dir=logging.logging_dir,
        home=settings.home,
        tracker_kwargs=logging.tracker_kwargs,
        is_main_process=is_main_process() and not settings.running.fast_dev_run,  # other processes write nothing
        verbose=settings.running.verbose,
        offline=logging.tracker_options.offline,
    )


def gather_callbacks(trainer: Trainer, module: AcceleratorModule) -> list[Callback]:
    """Return the user's callbacks: the module's replace the Trainer's of the same class."""
    of_module = build_callbacks(module.get_callbacks())
    replaced = set(map(type, of_module))
    of_trainer = build_callbacks(trainer.settings.running.callbacks)
    # A module that brings its own EMA would otherwise average twice.
    kept = [callback for callback in of_trainer if type(callback) not in replaced]
    return [*kept, *of_module]


def connect_hooks(
    trainer: Trainer,
    module: AcceleratorModule,
    callbacks: Sequence[Callback],
    builtin: Sequence[Callback] = (),
    *,
    seed: int,
    device: torch.device,
) -> Hooks:
    """Attach callbacks to Trainer and module, and return the hooks of callbacks and module.

    Args:
        seed: The run's seed: random numbers in a hook depend on it, the hook's name and the step.
        device: A device whose generator is also seeded.
    """
    state = trainer.state

    def seed_for(hook: str) -> None:
        seed_generators(derive_seed(seed, hook, state.epoch, state.global_step), device)

    for callback in (*callbacks, *builtin):
        callback.trainer, callback.module, callback.state = trainer, module, trainer.state
    return Hooks([*callbacks, module], builtin=builtin, is_main_process=is_main_process(), seed=seed_for)
