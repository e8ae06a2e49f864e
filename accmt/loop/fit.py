"""A whole run: trial evaluation, epochs, final evaluation, and a true ending whatever happens."""

from __future__ import annotations

from typing import Any

from accmt.loop.evaluation import evaluate, evaluate_and_count
from accmt.loop.run import Run
from accmt.loop.training import log_row, train_epoch
from accmt.loop.update import step_schedule
from accmt.processes import run_on_main_process
from accmt.state import Progress
from accmt.tracking import RunStatus

_TRACKER_STATUS: dict[Progress, RunStatus] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


def fit(run: Run) -> None:
    """Train from the state's counters on, until epochs or `max_steps` are done.

    Processes: collective.

    Raises:
        BaseException: What a step, a hook or the data raised; hooks were told, and trackers closed
    """
    now = run.state.now
    now.fn, now.status = "fit", "running"
    try:
        _try_evaluation(run)
        run_on_main_process(lambda: run.tracking.start(describe(run)))
        run.module.tracker = next(iter(run.tracking.loggers), None)
        _train_and_tell(run)
    finally:
        if now.status == "running":  # it ended before training began
            now.status = "failed"
        run.tracking.finish(_TRACKER_STATUS[now.status])
        restore_model(run)


def _train_and_tell(run: Run) -> None:
    try:
        _train(run)
        run.state.now.status = "finished"
    except BaseException as error:
        _tell_failure(run, error)
        raise
    finally:
        for hook in run.hooks.on_fit_end:
            hook()


def _train(run: Run) -> None:
    for hook in run.hooks.on_fit_start:
        hook()
    if run.settings.evaluation.eval_when_start and run.val_loaders and run.state.global_step == 0:
        evaluate_and_count(run, counts=False)
    while not run.cadence.is_finished(run.state):
        train_epoch(run)
        _end_epoch(run)
    if run.cadence.is_evaluation_due_at_end(run.state):
        evaluate_and_count(run)


def _end_epoch(run: Run) -> None:
    state = run.state
    log_row(run)
    if run.cadence.is_evaluation_due_at_epoch_end(state):
        evaluate_and_count(run)
    if state.now.is_last_training_batch:
        step_schedule(run, at_epoch_end=True)
        state.count_epoch()
    for hook in run.hooks.on_epoch_end:
        hook()


def _try_evaluation(run: Run) -> None:
    """Evaluate a few batches, so that a mistake in validation step or metrics surfaces before the first update."""
    told = run.settings.evaluation
    if not run.val_loaders or told.num_sanity_val_steps == 0 or told.eval_when_start:
        return
    limit = None if told.num_sanity_val_steps == -1 else told.num_sanity_val_steps
    counters = run.state.state_dict()
    run.saver.check(evaluate(run, "sanity_check", max_rounds=limit))
    run.state.load_state_dict(counters)


def _tell_failure(run: Run, error: BaseException) -> None:
    now, hooks = run.state.now, run.hooks
    now.interrupted = isinstance(error, KeyboardInterrupt)
    now.status = "interrupted" if now.interrupted else "failed"
    for hook in hooks.on_keyboard_interrupt if now.interrupted else ():
        hook(error=error)
    for hook in hooks.on_cuda_out_of_memory if is_out_of_memory(error) else ():
        hook(error=error)
    for hook in hooks.on_runtime_error if isinstance(error, RuntimeError) else ():
        hook(error=error)
    for hook in hooks.on_exception if isinstance(error, Exception) else ():
        hook(error=error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left."""
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def restore_model(run: Run) -> None:
    """Give the module its own model back, without the wrappers of the run, and let the Accelerator forget it."""
    model: Any = run.accelerator.unwrap_model(run.model, keep_fp32_wrapper=False)
    model.__dict__.pop("_is_accelerate_prepared", None)
    run.module.model = model
    run.accelerator.free_memory()


def describe(run: Run) -> dict[str, Any]:
    """Return the configuration of a run, as trackers show it."""
    from accmt.version import __version__

    settings = run.settings
    accumulation = run.accumulation_at(0)
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
