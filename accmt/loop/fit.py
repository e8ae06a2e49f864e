"""A whole run: its epochs, and the setup, cleanup and error handling around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from accmt.callbacks.callback import Hook
from accmt.data import derive_seed, note_dead_worker, seed_generators
from accmt.errors import DataError, ModuleContractError, Preempted, fail, is_out_of_memory
from accmt.failures import listening
from accmt.loop.evaluation import evaluate_and_count
from accmt.loop.preflight import check_room, try_evaluation, try_largest, try_saving
from accmt.loop.stages import TRAINING, evaluate_before_training, finish_epoch, finish_step, resume_stages
from accmt.loop.train_step import AutomaticSteps
from accmt.messages import say, warn
from accmt.processes import run_on_every_process, run_on_main_process
from accmt.registry import addon
from accmt.run import Run
from accmt.run.restart import Restart
from accmt.run.run_state import keeping_state
from accmt.run.shutdown import handle_failure, watching
from accmt.saving.selection import TRAIN_LOSS, VALID_LOSS
from accmt.state import Progress
from accmt.tracking import RunStatus
from accmt.tracking.values import HIGHER_IS_BETTER, LOWER_IS_BETTER

_TRACKER_STATUS: dict[Progress, RunStatus] = {
    "finished": "FINISHED",
    "interrupted": "KILLED",
    "preempted": "PREEMPTED",
    "failed": "FAILED",
}


def fit(run: Run) -> None:
    """Train from the state's counters until epochs or `max_steps` are done, or until another run has to continue.

    In the latter case, `run.recovery` has the checkpoint to continue from.

    Processes: collective.

    Raises:
        BaseException: An error of a step, a hook or the data, after hooks were called and trackers closed.
    """
    with ExitStack() as stack:  # exits in reverse order
        stack.enter_context(addon("printing_resume_hint")(run))
        stack.enter_context(run.features.running())
        stack.enter_context(_closing(run))
        stack.enter_context(_recording_outcome(run))
        stack.enter_context(listening(run.interruption, run.settings.failures.preempt_exit_code))
        stack.enter_context(watching(run))
        state = run.state
        has_stages_left = run.snapshot.next_stage < TRAINING or run.cadence.is_evaluation_due_at_end(state)
        has_stages_left |= bool(run.saver.selection.unsaved)  # missing models still have to be saved
        has_stages_left |= any(has_work_left() for has_work_left in run.features.has_work_left)
        # `resume="auto"` in a script that is started again after its end: no empty run in the trackers.
        if run.is_resumed and run.is_finished and not has_stages_left:
            done = f"step {state.global_step}, epoch {state.epoch}"
            do = "there is nothing left to train; raise epochs or max_steps to continue it"
            say(f"this run is complete ({done}): {do}")
            state.now.status = "finished"
            return
        _open(run)
        stack.enter_context(_handling_failures(run))
        _train(run)


def _train(run: Run) -> None:
    run.saver.update_patience_left()
    run.snapshot.capture(run, run.snapshot.next_stage)
    for on_training_start in run.features.on_training_start:
        on_training_start()
    for hook in run.hooks.on_resume if run.is_resumed else ():
        hook()
    for hook in run.hooks.on_fit_start:
        hook()
    run.stepper.begin_training()
    run.trained.begin()
    try_largest(run)
    run.attributes.begin()
    run.snapshot.capture_all(run)
    evaluate_before_training(run)
    run.stepper.zero_grad()  # hooks or an earlier, failed run may have left some
    resume_stages(run)
    is_only_saving = run.is_finished
    while not run.is_finished:
        is_used_up = _train_epoch(run)
        finish_epoch(run, is_used_up=is_used_up)
    if run.cadence.is_evaluation_due_at_end(run.state):
        evaluate_and_count(run)
    elif is_only_saving and run.saver.lacks_best:
        say("a best model was not saved before: evaluating the weights again, and saving them if they are the best")
        evaluate_and_count(run, counts=False)
    if run.interruption.ends_training:
        say(f"training ends early at step {run.state.global_step}: stopped by {run.interruption.ended_by}")
    elif run.saver.patience is not None and not run.cadence.is_finished(run.state):
        say(f"early stopping at step {run.state.global_step}: {run.saver.patience.describe_exhausted()}")
    _require_steps(run)
    run.require_equal_replicas()
    for on_training_end in run.features.on_training_end:
        on_training_end()
    if run.settings.saving.saves_last:
        run.saver.save_last(run)
    run.checkpoints.save_last(run)
    run.stepper.end_training()
    run.saver.require_saved(run.settings.model_folder)


def _require_steps(run: Run) -> None:
    """Reject a run that skipped all its optimizer steps: its model would pass for a trained one."""
    state = run.state
    if state.global_step or not state.skipped_steps or run.interruption.ends_training:
        return
    got = f"all {state.skipped_steps} optimizer steps were skipped"
    if run.accelerator.scaler is not None:  # it tries out scales at first
        warn(f'{got} for gradients that overflow in float16: train longer, or with mixed_precision="bf16"')
        return
    if state.skipped_batches:
        got += f": training_step returned None for {state.skipped_batches} batches"
    do = "look at why: a training_step that returns None for every batch, losses of weight 0, or losses "
    do += "that are not finite"
    raise fail(ModuleContractError, "training", got=got, expected="at least one step: nothing was trained", do=do)


def _train_epoch(run: Run) -> bool:
    """Train until the epoch or the run ends.

    Returns:
        Whether the epoch's data is exhausted.
    """
    state = run.state
    seed_generators(derive_seed(run.seed, "epoch", state.epoch), run.device)  # for data that is rebuilt
    run.loaders.reload_if_due()
    state.grad_accum_steps = run.accumulation_at(state.epoch) or 1
    state.now.stage = "train"
    state.now.is_last_epoch = run.cadence.is_last_epoch(state, run.steps_per_epoch(state.epoch))
    modes = {module.training for module in run.unwrapped_model.modules()}
    if not run.unwrapped_model.training or modes == {True}:  # else some are in evaluation mode by the user's choice
        run.unwrapped_model.train()  # which the model may override, to freeze a part
    with keeping_state(run) if state.train_step else nullcontext():  # a resumed epoch
        for hook in run.hooks.on_epoch_start:
            hook()
    run.trained.decide()
    makers = run.features.make_steps
    steps = makers[0]() if makers else AutomaticSteps(run)
    is_used_up = True  # also if a checkpoint was written after the last step of an epoch
    windows = run.loaders.train.windows(state.epoch, first=state.train_step)
    for reading in run.features.reading:
        windows = reading(windows)
    for window in windows:
        has_ended = steps.train(window)
        if callable(state.now.is_last_training_batch):
            with run.features.doing("data"):
                state.now.is_last_training_batch = state.is_last_training_batch
        is_used_up = state.is_last_training_batch
        if has_ended and finish_step(run):
            break
    # A sampler without indices, or drop_last with less than one batch: the loop would go through all epochs in no
    # time.
    if state.train_step == 0:
        expected, do = "at least one batch", "check the data, the sampler, and drop_last in data_options"
        raise fail(DataError, "the training data", got="an epoch without a batch", expected=expected, do=do)
    return is_used_up


def _open(run: Run) -> None:
    """Run the checks before training, and open everything that training writes to."""
    if not run.is_resumed:
        try_evaluation(run)
    if run.settings.failures.preflight:
        try_saving(run)
    run.saver.claim(run)
    run.tracking.call_run(run_on_main_process(lambda: run.tracking.start(describe(run))))
    run.module.tracker = next(iter(run.tracking.loggers), None)
    run.checkpoints.begin(run)
    for on_start in run.features.on_start:
        on_start()
    if run.settings.failures.preflight:
        check_room(run)


@contextmanager
def _recording_outcome(run: Run) -> Iterator[None]:
    """Set the status of the run, and record its outcome for the next start."""
    activity = run.state.now
    activity.fn, activity.status = "fit", "running"
    try:
        yield
    except Restart:  # another run continues
        activity.status = "failed"
    except BaseException as error:
        note_dead_worker(error)
        _set_failed_status(run, error)
        for on_end in run.features.on_end:
            on_end(error)
        raise
    else:
        for on_end in run.features.on_end:
            on_end(None)


@contextmanager
def _handling_failures(run: Run) -> Iterator[None]:
    """Always call the end hooks; after an error, first write an emergency checkpoint and call the error hooks."""
    try:
        yield
        run.state.now.status = "finished"
        run.saver.warn_if_nothing_was_saved()
    except Restart:
        _call_end_hooks(run)
        raise
    except BaseException as error:
        try:
            failure = handle_failure(run, error)
            _call_error_hooks(run, failure)
        finally:
            _call_end_hooks(run)
        if failure is not error:
            raise failure from error
        raise
    run_on_every_process(lambda: _call_end_hooks(run))  # a finished process must not exit successfully if another fails


@contextmanager
def _closing(run: Run) -> Iterator[None]:
    """Release the run's resources at the end; errors in this do not hide the error that ended the run."""
    try:
        yield
    except BaseException:
        try:
            _close(run)
        except Exception as own:  # noqa: BLE001 - the error that ended the run is more important
            warn(f"releasing the run's resources failed: {own}")
        raise
    _close(run)


def _close(run: Run) -> None:
    try:
        run.checkpoints.close(has_result=run.state.finished or run.saver.selection.has_saved)
    finally:
        run.saver.release()
        run.tracking.finish(
            _TRACKER_STATUS[run.state.now.status], flush_s=run.settings.tracking.tracker_options.flush_s
        )


def _set_failed_status(run: Run, error: BaseException) -> None:
    activity = run.state.now
    activity.interrupted = isinstance(error, KeyboardInterrupt)
    activity.status = "failed"
    if activity.interrupted:
        activity.status = "interrupted"
    elif isinstance(error, Preempted):
        activity.status = "preempted"


def _call_error_hooks(run: Run, error: BaseException) -> None:
    """Call the error hooks; their own errors must not hide the original one."""
    _set_failed_status(run, error)
    hooks = run.hooks
    called: list[Hook] = []
    if run.state.interrupted:
        called += hooks.on_keyboard_interrupt
    if is_out_of_memory(error):
        called += hooks.on_cuda_out_of_memory
    if isinstance(error, RuntimeError):
        called += hooks.on_runtime_error
    if isinstance(error, Exception):
        called += hooks.on_exception
    for hook in called:
        try:
            hook(error=error)
        except Exception as own:  # noqa: BLE001 - the error that ended the run is more important
            warn(f"an error hook raised {type(own).__name__}: {own}")


def _call_end_hooks(run: Run) -> None:
    """Call every `on_fit_end`, even if one fails, and raise the first error."""
    failures = []
    for hook in run.hooks.on_fit_end:
        try:
            hook()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)
    if failures:
        run.state.now.status = "failed"
        raise failures[0]


def describe(run: Run) -> dict[str, Any]:
    """Return the configuration of a run for trackers."""
    from accmt.version import __version__

    settings = run.settings
    optional: dict[str, Any] = {}
    samples = run.samples_per_step()
    if samples is not None:
        optional["effective_batch_size"] = samples
    if run.saver.selection.rule:
        optional["model_saving"] = run.saver.selection.rule
    metrics = {}
    for name, is_better in run.saver.selection.directions.items():
        if f"best_{name}" not in (VALID_LOSS, TRAIN_LOSS):
            metrics[name] = HIGHER_IS_BETTER if is_better(1.0, 0.0) else LOWER_IS_BETTER
    if metrics:
        optional["metrics"] = metrics
    return {
        **settings.hps.get_config(run.replaced_hps()),
        "grad_accumulation_steps": settings.optimization.window_maker or settings.optimization.accumulation_at(0),
        "num_processes": run.state.num_processes,
        "mixed_precision": str(run.accelerator.mixed_precision),
        "seed": run.seed,
        "model_path": str(settings.saving.model_path),
        **optional,
        "accmt_version": __version__,
        **(settings.tracking.tracker_options.config or {}),
    }
