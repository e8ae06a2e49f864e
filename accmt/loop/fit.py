"""A whole run: trial evaluation, epochs, final evaluation, and a true ending whatever happens."""

from __future__ import annotations

from typing import Any

from accmt.callbacks.dispatch import Hook
from accmt.errors import DataError, explain
from accmt.loop.evaluation import evaluate, evaluate_and_count
from accmt.loop.run import Run
from accmt.loop.saver import save_model
from accmt.loop.training import log_row, train_epoch
from accmt.loop.update import step_schedule
from accmt.messages import say, warn
from accmt.processes import run_on_main_process
from accmt.state import Progress
from accmt.tracking import RunStatus

_TRACKER_STATUS: dict[Progress, RunStatus] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


def fit(run: Run) -> None:
    """Train from the state's counters on, until epochs or `max_steps` are done.

    Processes: collective.

    Raises:
        BaseException: What a step, a hook or the data raised; hooks were told, and trackers closed.
    """
    now = run.state.now
    now.fn, now.status = "fit", "running"
    try:
        if run.is_resumed and run.is_finished and not run.cadence.is_evaluation_due_at_end(run.state):
            _tell_complete(run)
        else:
            _begin(run)
            _train_and_tell(run)
    except BaseException as error:
        _mark_failure(run, error)
        raise
    finally:
        _close(run)


def _tell_complete(run: Run) -> None:
    state = run.state
    done = f"update {state.global_step}, epoch {state.epoch}"
    say(f"this run is complete ({done}): there is nothing left to train; raise epochs or max_steps to go on")
    state.now.status = "finished"


def _begin(run: Run) -> None:
    if not run.is_resumed:
        _try_evaluation(run)
    run_on_main_process(lambda: run.tracking.start(describe(run)))
    run.module.tracker = next(iter(run.tracking.loggers), None)
    run.checkpoints.begin(run)


def _close(run: Run) -> None:
    try:
        run.checkpoints.close()
    finally:
        run.tracking.finish(_TRACKER_STATUS[run.state.now.status], flush_s=run.settings.tracking.tracker_flush_s)
        restore_model(run)


def _train_and_tell(run: Run) -> None:
    try:
        _train(run)
        run.state.now.status = "finished"
        run.saver.warn_if_nothing_was_saved()
    except BaseException as error:
        _tell_failure(run, error)
        raise
    finally:
        _call_end_hooks(run)


def _train(run: Run) -> None:
    for hook in run.hooks.on_resume if run.is_resumed else ():
        hook()
    for hook in run.hooks.on_fit_start:
        hook()
    if run.settings.evaluation.eval_when_start and run.val_loaders and not run.is_resumed:
        evaluate_and_count(run, counts=False)
    run.stepper.zero_grad()  # whatever an earlier, broken run left behind
    while not run.is_finished:
        _end_epoch(run, is_used_up=train_epoch(run))
    if run.cadence.is_evaluation_due_at_end(run.state):
        evaluate_and_count(run)
    _tell_early_end(run)
    if run.settings.saving.save_last:
        save_model(run, run.settings.saving.folder / "last")
    run.checkpoints.save_last(run)


def _tell_early_end(run: Run) -> None:
    if not run.cadence.is_finished(run.state):
        watched = run.saver.selection.rule if isinstance(run.state.patience_left, int) else run.state.patience_left
        say(f"training ends early at update {run.state.global_step}: patience with {watched} is used up")


def _end_epoch(run: Run, *, is_used_up: bool) -> None:
    state = run.state
    log_row(run)
    is_evaluation_due = run.cadence.is_evaluation_due_at_epoch_end(state)
    if is_evaluation_due:
        evaluate_and_count(run)
    _require_updates(run)
    if is_used_up:
        step_schedule(run, at_epoch_end=True)
        state.count_epoch()
    for hook in run.hooks.on_epoch_end:
        hook()
    run.checkpoints.save_if_due(run, epoch_ended=is_used_up, evaluated=is_evaluation_due)


def _require_updates(run: Run) -> None:
    """Refuse to go on for ever: `max_steps` is the only end, and an epoch made no update towards it."""
    if run.cadence.epochs is None and run.state.epoch_step == 0 and run.accelerator.scaler is None:
        got = "an epoch without an update: the weights of all its batches are 0"
        raise DataError(explain("training until max_steps", got, "a batch that weighs something", "look at the data"))


def _try_evaluation(run: Run) -> None:
    """Evaluate a few batches, so that a mistake in validation step or metrics surfaces before the first update."""
    told = run.settings.evaluation
    if not run.val_loaders or told.num_sanity_val_steps == 0 or told.eval_when_start:
        return
    limit = None if told.num_sanity_val_steps == -1 else told.num_sanity_val_steps
    counters = run.state.state_dict()
    run.saver.check(evaluate(run, "sanity_check", max_rounds=limit))
    run.state.load_state_dict(counters)


def _mark_failure(run: Run, error: BaseException) -> None:
    now = run.state.now
    now.interrupted = isinstance(error, KeyboardInterrupt)
    now.status = "interrupted" if now.interrupted else "failed"


def _tell_failure(run: Run, error: BaseException) -> None:
    """Call the hooks for an error; one that fails itself must not hide it."""
    _mark_failure(run, error)
    hooks = run.hooks
    told: list[Hook] = []
    told += hooks.on_keyboard_interrupt if run.state.interrupted else ()
    told += hooks.on_cuda_out_of_memory if is_out_of_memory(error) else ()
    told += hooks.on_runtime_error if isinstance(error, RuntimeError) else ()
    told += hooks.on_exception if isinstance(error, Exception) else ()
    for hook in told:
        try:
            hook(error=error)
        except Exception as own:  # noqa: BLE001 - the error that ends the run goes first
            warn(f"a hook for errors raised {type(own).__name__}: {own}")


def _call_end_hooks(run: Run) -> None:
    """Call every `on_fit_end`, also after one that fails, and raise the first failure."""
    failures = []
    for hook in run.hooks.on_fit_end:
        try:
            hook()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    if failures:
        run.state.now.status = "failed"
        raise failures[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def restore_model(run: Run) -> None:
    """Give the module its own model back, without the wrappers of the run, and let the Accelerator forget it."""
    model: Any = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False, keep_torch_compile=False)
    model.__dict__.pop("_is_accelerate_prepared", None)
    run.module.model = model
    for loader in (run.train_loader, *run.val_loaders.values()):
        loader.dataloader._iterator = None  # ends its worker processes
    if run.accelerator is not run.settings.running.accelerator:  # what a user prepared is not ours to forget
        run.accelerator.free_memory()


def describe(run: Run) -> dict[str, Any]:
    """Return the configuration of a run, as trackers show it."""
    from accmt.version import __version__

    settings = run.settings
    accumulation = settings.optimization.accumulation_at(0)
    return {
        **settings.hps.get_config(),
        "effective_batch_size": settings.hps.train_batch_size * accumulation * run.state.num_processes,
        "grad_accumulation_steps": accumulation,
        "num_processes": run.state.num_processes,
        "mixed_precision": str(run.accelerator.mixed_precision),
        "seed": run.seed,
        "model_path": str(settings.saving.model_path),
        "accmt_version": __version__,
        **(settings.tracking.additional_tracker_config or {}),
    }
