"""Ends a run early: at a point where it can be resumed, with a resume hint, or with an emergency checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

from accmt.data import MicroBatch, UnshardedSource
from accmt.errors import Preempted, is_out_of_memory
from accmt.failures import Reason, Watch
from accmt.messages import say, warn
from accmt.options.failures import Handler
from accmt.processes import acting_alone, is_main_process
from accmt.run.restart import Restart, free_memory
from accmt.run.run import Run

if TYPE_CHECKING:
    from accmt import Trainer


def stop_if_requested(run: Run) -> None:
    """Stop the run between two optimizer steps if requested, or end training if its time is up.

    Processes: all, after the same step.
    """
    # The main process decides: clocks differ, and processes would leave at different steps.
    if run.clock.is_used_up and is_main_process() and not run.interruption.ends_training:
        run.interruption.request(Reason("max_time", "finish"))
    reason = run.interruption.pass_point()
    if reason is not None:
        stop_run(run, reason)


def stop_run(run: Run, reason: Reason) -> NoReturn:
    """Stop the run between two optimizer steps, or in something that can be repeated.

    Processes: all, at the same point.
    """
    stopped = f"the run stops at step {run.state.global_step}"
    say(f"{reason.what}: {stopped}")
    run.interruption.is_left = True
    if reason.ending == "interrupt":
        raise KeyboardInterrupt(stopped)
    raise Preempted(run.settings.failures.preempt_exit_code)


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Watch signals and the other processes; if only some processes fail, make sure that this one exits soon."""
    run.watch.start()
    try:
        yield
    except Restart:
        raise  # on all processes together
    except BaseException as error:
        run.watch.report_failure(error)
        raise
    finally:
        run.watch.stop()


@contextmanager
def watching_evaluation(watch: Watch) -> Iterator[None]:
    """Watch the other processes outside training: an error caused by another process names it."""
    watch.start()
    try:
        yield
    except BaseException as error:
        watch.report_failure(error)
        explained = watch.explain(error)
        if explained is error:
            raise
        raise explained from None
    finally:
        watch.stop()


def handle_failure(run: Run, error: BaseException) -> BaseException:
    """Handle an error that ends a run: inform the other processes, take an emergency checkpoint."""
    run.watch.report_failure(error)
    _save_emergency_checkpoint(run, error)
    return run.watch.explain(error)


def _save_emergency_checkpoint(run: Run, error: BaseException) -> None:
    """Save the last step snapshot if a handler requests it; errors here do not hide the original one."""
    handlers = run.settings.handling.kinds
    if isinstance(error, KeyboardInterrupt | Preempted):
        is_handled = run.settings.checkpoints.every is not None or Handler.KEYBOARD in handlers
    else:
        is_handled = bool(handlers & run.watch.kinds_of(error))
    # A second Ctrl-C means now.
    if run.interruption.left_at_once or not is_handled:
        return
    obstacle = run.snapshot.find_obstacle(run)
    if obstacle is not None:
        warn(f"no emergency checkpoint: {obstacle}; the newest one is kept")
        return
    # Moving the state to the host needs memory of the device, too.
    if is_out_of_memory(error):
        free_memory(run.stepper.optimizer)
    for before_emergency_checkpoint in run.features.before_emergency_checkpoint:
        before_emergency_checkpoint()
    try:
        if not run.watch.is_apart:
            run.checkpoints.save_snapshot(run)
        elif run.engine.needs_all:
            lost = "the shards of the other processes are lost with them"
            warn(f"no emergency checkpoint: {lost}; the newest one is kept")
        elif is_main_process() and not isinstance(run.train_loader.source, UnshardedSource):
            with suppress(RuntimeError):  # its thread still communicates with the others, which have exited
                run.checkpoints.wait()
            with acting_alone():
                run.checkpoints.save_snapshot(run, is_alone=True)
    except Exception as own:  # noqa: BLE001 - the error that ends the run has priority
        warn(f"could not write the emergency checkpoint, the newest one is kept: {own}")


def stopping_if_asked(micro_batches: Iterator[MicroBatch], trainer: Trainer) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a validation, and leave at the same one on all processes if requested.

    A sharded model's forward needs every process, so none may leave an evaluation on its own. All pass the same points:
    equally many micro-batches or, if each process splits its samples by a token budget, equally many windows. The
    resumed run repeats the evaluation.
    """
    for micro_batch in micro_batches:
        begins_window = micro_batch.cut is None or micro_batch.cut.number == 0
        if begins_window and trainer.state.stage == "validate":
            run = trainer.run
            reason = run.interruption.pass_point()
            if reason is not None:
                stop_run(run, reason)
        yield micro_batch
