"""Leaves a run before its time: at a point where it can be continued, or with a safe checkpoint of the last one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from accmt.callbacks.averaging import EMA
from accmt.data import UnsharedLoader
from accmt.errors import Preempted, ProcessFailedError, explain
from accmt.failures import Reason, Watch, is_consequence, is_out_of_memory, kind_of
from accmt.messages import say, warn
from accmt.processes import acting_alone, is_main_process
from accmt.recovery.restart import Restart, free_memory
from accmt.run import Run
from accmt.settings.handlers import Handler

_ALIKE_S = 2.0


def leave_if_asked(run: Run) -> None:
    """Leave the run here, at an update boundary, if somebody asked for it, or end training if its time is used up.

    Processes: all, at the same boundary.

    Raises:
        KeyboardInterrupt: After Ctrl-C.
        Preempted: After SIGTERM or SIGUSR1.
    """
    if run.clock.is_used_up and is_main_process() and not run.interruption.ends_training:
        run.interruption.request(Reason("max_time", "finish"))
    reason = run.interruption.pass_point()
    if reason is not None:
        leave(run, reason)


def leave(run: Run, reason: Reason) -> NoReturn:
    """Leave the run, which is at its last boundary or in something that can be repeated.

    Processes: all, at the same place.

    Raises:
        KeyboardInterrupt: After Ctrl-C.
        Preempted: After SIGTERM or SIGUSR1.
    """
    left = f"the run is left at update {run.state.global_step}"
    say(f"{reason.what}: {left}")
    run.interruption.is_left = True
    if reason.ending == "interrupt":
        raise KeyboardInterrupt(left)
    raise Preempted(run.settings.failures.preempt_exit_code)


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Watch signals and the other processes; where one fails and others do not, this process ends soon for sure."""
    watch = run.watch
    if watch is None:
        yield
        return
    watch.start()
    try:
        yield
    except Restart:
        raise  # all processes together
    except BaseException as error:
        _tell_others(run, watch, error)
        raise
    finally:
        watch.stop()
        if watch.is_apart:
            watch.leave_for_sure()


def settle(run: Run, error: BaseException) -> BaseException:
    """Do what is to be done about the error that ends a run before anything else: tell others, take a checkpoint.

    Returns:
        The error; or, where it only says that another process is gone, one that says what happened there.
    """
    if run.watch is not None:
        _tell_others(run, run.watch, error)
    _keep_safe(run, error)
    return _explain_consequence(run.watch, error) if run.watch is not None and run.watch.is_apart else error


def _tell_others(run: Run, watch: Watch, error: BaseException) -> None:
    if watch.has_failed or run.interruption.is_left:
        return
    watch.tell_failure(error)
    watch.is_apart = not watch.all_failed_alike(_ALIKE_S)


def _explain_consequence(watch: Watch, error: BaseException) -> BaseException:
    if not is_consequence(error):
        return error
    for index, note in watch.failures().items():
        if not note["is_consequence"]:
            do = "mend that; the others only waited for it"
            return ProcessFailedError(explain(f"process {index}", f"it failed:\n{note['text']}", "no error", do))
    silent = ", ".join(map(str, watch.find_silent())) or "another one"
    got = f"it is gone without a word: killed, perhaps because memory ran out ({error})"
    return ProcessFailedError(explain(f"process {silent}", got, "all processes alive", "see the system's log"))


def _keep_safe(run: Run, error: BaseException) -> None:
    """Take a checkpoint of the last update boundary if the error is one to take it at; nothing here hides the error."""
    if not _is_handled(run, error):
        return
    if not run.boundary.can_be_saved:
        warn("no checkpoint is taken of an update that is half done or whose loss is wrong: the newest one stands")
        return
    if is_out_of_memory(error):
        free_memory(run)
    _take_averages_out(run)
    try:
        _save_boundary(run)
    except Exception as own:  # noqa: BLE001 - the error that ends the run goes first
        warn(f"the safe checkpoint could not be taken, the newest one stands: {own}")


def _save_boundary(run: Run) -> None:
    if run.watch is None or not run.watch.is_apart:
        run.checkpoints.save_boundary(run)
    elif is_main_process() and not isinstance(run.train_loader, UnsharedLoader):
        run.checkpoints.wait()  # its thread still acts with the others
        with acting_alone():
            run.checkpoints.save_boundary(run, is_alone=True)


def _is_handled(run: Run, error: BaseException) -> bool:
    if run.interruption.left_at_once:
        return False
    handlers = run.settings.failures.kinds
    if isinstance(error, KeyboardInterrupt | Preempted):
        return run.settings.checkpoints.every is not None or Handler.KEYBOARD in handlers
    return bool(handlers & _kinds_of(run.watch, error))


def _kinds_of(watch: Watch | None, error: BaseException) -> set[Handler | None]:
    """Return the kind of an error; of one that is the consequence of others, theirs too."""
    if watch is None or not is_consequence(error):
        return {kind_of(error)}
    told = {note["kind"] for note in watch.failures().values() if note["kind"] is not None}
    return {Handler[name] for name in told} | {kind_of(error)}


def _take_averages_out(run: Run) -> None:
    """Give the model the weights of training where an evaluation of their average was broken off."""
    for callback in run.callbacks:
        if isinstance(callback, EMA) and callback.is_in_place:
            callback.on_fit_end()
