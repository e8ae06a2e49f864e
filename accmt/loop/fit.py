"""A whole run: trial evaluation, epochs, final evaluation, and a true ending whatever happens."""

from __future__ import annotations

from typing import Any

from accmt.callbacks.dispatch import Hook
from accmt.data import note_dead_worker
from accmt.errors import DataError, Preempted, explain, is_out_of_memory
from accmt.failures import listening
from accmt.huggingface import computing_without_cache
from accmt.loop.evaluation import evaluate, evaluate_and_count
from accmt.loop.optimizer_step import step_schedule
from accmt.loop.training import finish_update, log_row, save_if_due, train_epoch
from accmt.messages import say, warn
from accmt.processes import run_on_every_process, run_on_main_process
from accmt.recovery.crash_loop import note_end, warn_of_crash_loop
from accmt.recovery.restart import Restart
from accmt.recovery.shutdown import handle_failure, printing_resume_hint, stop_if_requested, watching
from accmt.run import Run
from accmt.setup.datasets import end_workers
from accmt.setup.model import detach_run
from accmt.setup.preflight import check_room, try_saving
from accmt.state import Progress
from accmt.tracking import RunStatus

_TRACKER_STATUS: dict[Progress, RunStatus] = {
    "finished": "FINISHED",
    "interrupted": "KILLED",
    "preempted": "PREEMPTED",
    "failed": "FAILED",
}


def fit(run: Run) -> None:
    """Train from the state's counters on, until epochs or `max_steps` are done, or until another run is to go on.

    In the latter case `run.recovery` holds the checkpoint to go on from.

    Processes: collective.

    Raises:
        BaseException: What a step, a hook or the data raised; hooks were told, and trackers closed.
    """
    with printing_resume_hint(run), computing_without_cache(run.unwrapped_model):
        try:
            _fit(run)
        finally:
            _close(run)


def _fit(run: Run) -> None:
    now = run.state.now
    now.fn, now.status = "fit", "running"
    try:
        with listening(run.interruption, run.settings.failures.preempt_exit_code), watching(run):
            _run(run)
    except Restart:
        now.status = "failed"
    except BaseException as error:
        note_dead_worker(error)
        _mark_failure(run, error)
        note_end(run, error)
        raise
    else:
        note_end(run, None)


def _run(run: Run) -> None:
    is_done = run.boundary.due is None and not run.cadence.is_evaluation_due_at_end(run.state)
    if run.is_resumed and run.is_finished and is_done:
        _tell_complete(run)
    else:
        _begin(run)
        _train_and_tell(run)


def _tell_complete(run: Run) -> None:
    state = run.state
    done = f"update {state.global_step}, epoch {state.epoch}"
    say(f"this run is complete ({done}): there is nothing left to train; raise epochs or max_steps to go on")
    state.now.status = "finished"


def _begin(run: Run) -> None:
    if not run.is_resumed:
        _try_evaluation(run)
    if run.settings.running.preflight:
        try_saving(run)
    run.saver.claim(run)
    run_on_main_process(lambda: run.tracking.start(describe(run)))
    run.module.tracker = next(iter(run.tracking.loggers), None)
    run.checkpoints.begin(run)
    warn_of_crash_loop(run)
    if run.settings.running.preflight:
        check_room(run)


def _close(run: Run) -> None:
    try:
        run.checkpoints.close(has_result=run.state.finished or run.saver.selection.has_saved)
    finally:
        run.saver.release()
        run.tracking.finish(_TRACKER_STATUS[run.state.now.status], flush_s=run.settings.tracking.tracker_flush_s)
        restore_model(run)


def _train_and_tell(run: Run) -> None:
    try:
        _train(run)
        run.state.now.status = "finished"
        run.saver.warn_if_nothing_was_saved()
    except Restart:
        _call_end_hooks(run)
        raise
    except BaseException as error:
        try:
            failure = handle_failure(run, error)
            _tell_failure(run, failure)
        finally:
            _call_end_hooks(run)
        if failure is not error:
            raise failure from None
        raise
    run_on_every_process(lambda: _call_end_hooks(run))  # who is done must not leave as if all were well


def _train(run: Run) -> None:
    _start_training(run)
    run.stepper.zero_grad()  # whatever an earlier, broken run left behind
    _finish_what_was_due(run)
    while not run.is_finished:
        _end_epoch(run, is_used_up=train_epoch(run))
    if run.cadence.is_evaluation_due_at_end(run.state):
        evaluate_and_count(run)
    _tell_early_end(run)
    if run.settings.saving.save_last:
        run.saver.save_last(run)
    run.checkpoints.save_last(run)
    run.saver.require_saved()


def _start_training(run: Run) -> None:
    run.saver.update_patience_left()
    begins = not run.is_resumed or run.boundary.due == "start"
    run.boundary.mark(run, "start" if begins else run.boundary.due)
    if run.guard.reaction == "rollback" and not run.is_resumed:
        run.checkpoints.save_boundary(run)  # what a first update that goes wrong is rolled back to
    for hook in run.hooks.on_resume if run.is_resumed else ():
        hook()
    for hook in run.hooks.on_fit_start:
        hook()
    run.trained.begin()
    if run.settings.evaluation.eval_when_start and run.val_loaders and begins:
        evaluate_and_count(run, counts=False)
        run.boundary.mark(run)


def _finish_what_was_due(run: Run) -> None:
    """Go on with what came after an update, or after an epoch, where the run that is continued was left in it."""
    due, run.boundary.due = run.boundary.due, None
    if due in ("update", "skipped", "evaluation"):
        run.boundary.due = due
        finish_update(run)
        due = run.boundary.due
    if due == "epoch":
        _end_epoch(run, is_used_up=run.state.is_last_training_batch)
    elif due == "epoch_end":
        _tell_epoch_end(run, is_counted=run.state.train_step == 0, evaluated=False)


def _tell_early_end(run: Run) -> None:
    if run.interruption.ends_training:
        say(f"training ends early at update {run.state.global_step}: {run.interruption.ended_by} says so")
    elif not run.cadence.is_finished(run.state):
        watched = run.saver.selection.rule if isinstance(run.state.patience_left, int) else run.state.patience_left
        say(f"training ends early at update {run.state.global_step}: patience with {watched} is used up")


def _end_epoch(run: Run, *, is_used_up: bool) -> None:
    state = run.state
    state.now.is_last_training_batch, run.boundary.due = is_used_up, "epoch"
    log_row(run)
    is_evaluation_due = run.cadence.is_evaluation_due_at_epoch_end(state)
    if is_evaluation_due:
        evaluate_and_count(run)
    _require_updates(run)
    if is_used_up:
        step_schedule(run, at_epoch_end=True)
        state.count_epoch()
        run.running_averages.end_epoch()
    run.boundary.mark(run, "epoch_end")
    _tell_epoch_end(run, is_counted=is_used_up, evaluated=is_evaluation_due)


def _tell_epoch_end(run: Run, *, is_counted: bool, evaluated: bool) -> None:
    for hook in run.hooks.on_epoch_end:
        hook()
    run.boundary.mark(run)
    save_if_due(run, epoch_ended=is_counted, evaluated=evaluated)
    stop_if_requested(run)


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
    run.saver.check(evaluate(run, "sanity_check", max_batches=limit))
    run.state.load_state_dict(counters)


def _mark_failure(run: Run, error: BaseException) -> None:
    now = run.state.now
    now.interrupted = isinstance(error, KeyboardInterrupt)
    now.status = "interrupted" if now.interrupted else "preempted" if isinstance(error, Preempted) else "failed"


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


def restore_model(run: Run) -> None:
    """Give the module its own model back, and end the processes that load data."""
    end_workers((run.train_loader, *run.val_loaders.values()))
    detach_run(run.module, run.model, run.accelerator)
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
