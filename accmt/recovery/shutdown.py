"""Ends a run before its time: where another one can resume it, with a hint how, or with an emergency checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from accmt.callbacks.averaging import EMA
from accmt.data import Loader, MicroBatch, UnshardedLoader, WrappedLoader, reader_of
from accmt.errors import Preempted, ProcessFailedError, explain, is_out_of_memory
from accmt.failures import Interruption, Reason, Watch, is_consequence, kind_of
from accmt.messages import say, warn
from accmt.processes import acting_alone, gather_objects, is_main_process, num_processes
from accmt.recovery.restart import Restart, free_memory
from accmt.run import Run
from accmt.settings.handlers import Handler

if TYPE_CHECKING:
    from accmt.protocols import TrainerProtocol

_SAME_FAILURE_S = 2.0


def stop_if_requested(run: Run) -> None:
    """Stop the run here, between two optimizer steps, if somebody asked for it, or end training if its time is up.

    Processes: all, after the same step.
    """
    if run.clock.is_used_up and is_main_process() and not run.interruption.ends_training:
        run.interruption.request(Reason("max_time", "finish"))
    reason = run.interruption.pass_point()
    if reason is not None:
        stop_run(run, reason)


def stop_run(run: Run, reason: Reason) -> NoReturn:
    """Stop the run, which is between two optimizer steps or in something that can be repeated.

    Processes: all, at the same place.
    """
    stopped = f"the run stops at step {run.state.global_step}"
    say(f"{reason.what}: {stopped}")
    run.interruption.is_left = True
    if reason.ending == "interrupt":
        raise KeyboardInterrupt(stopped)
    raise Preempted(run.settings.failures.preempt_exit_code)


@contextmanager
def watching(run: Run) -> Iterator[None]:
    """Watch signals and the other processes; where one fails and others do not, this process is sure to end soon."""
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
        _send_failure(run, watch, error)
        raise
    finally:
        watch.stop()
        if watch.is_apart:
            watch.exit_soon()


def handle_failure(run: Run, error: BaseException) -> BaseException:
    """Do first what an error that ends a run asks for: inform the other processes, take an emergency checkpoint."""
    if run.watch is not None:
        _send_failure(run, run.watch, error)
    _save_emergency_checkpoint(run, error)
    return _explain_consequence(run.watch, error) if run.watch is not None and run.watch.is_apart else error


def _send_failure(run: Run, watch: Watch, error: BaseException) -> None:
    if watch.has_failed or run.interruption.is_left:
        return
    watch.report_failure(error)
    watch.is_apart = not watch.all_failed_alike(_SAME_FAILURE_S)


def _explain_consequence(watch: Watch, error: BaseException) -> BaseException:
    if not is_consequence(error):
        return error
    for index, note in watch.failures().items():
        if not note["is_consequence"]:
            do = "fix that error; the other processes were waiting for it"
            return ProcessFailedError(explain(f"process {index}", f"it failed:\n{note['text']}", "no error", do))
    silent = ", ".join(map(str, watch.find_silent())) or "another one"
    got = f"it exited without an error message: killed, perhaps because memory ran out ({error})"
    return ProcessFailedError(explain(f"process {silent}", got, "all processes alive", "look at the system's log"))


def _save_emergency_checkpoint(run: Run, error: BaseException) -> None:
    """Take a checkpoint of the last step snapshot if a handler asks for it; nothing here hides the error."""
    if not _is_handled(run, error):
        return
    if not run.snapshot.can_be_saved:
        warn("no emergency checkpoint: the run is in the middle of a step, or its loss is wrong; the newest one stays")
        return
    if is_out_of_memory(error):
        free_memory(run)
    _restore_trained_weights(run)
    try:
        _save_snapshot(run)
    except Exception as own:  # noqa: BLE001 - the error that ends the run goes first
        warn(f"the emergency checkpoint could not be taken, the newest one stays: {own}")


def _save_snapshot(run: Run) -> None:
    if run.watch is None or not run.watch.is_apart:
        run.checkpoints.save_snapshot(run)
    elif run.is_sharded:
        warn("no emergency checkpoint: the shards of the other processes are gone with them; the newest one stays")
    elif is_main_process() and not isinstance(reader_of(run.train_loader), UnshardedLoader):
        run.checkpoints.wait()  # its thread still acts with the others
        with acting_alone():
            run.checkpoints.save_snapshot(run, is_alone=True)


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
    kinds = {note["kind"] for note in watch.failures().values() if note["kind"] is not None}
    return {Handler[name] for name in kinds} | {kind_of(error)}


def _restore_trained_weights(run: Run) -> None:
    """Give the model its trained weights back where an evaluation of their average was interrupted."""
    for callback in run.callbacks:
        if isinstance(callback, EMA) and callback.is_in_place:
            callback.on_fit_end()


class InterruptibleLoader(WrappedLoader):
    """Validation data whose micro-batches end early, on all processes, when the run is to stop.

    A process that learns of it stops reading at once. At the end of the data, where processes wait for one another
    anyway, it informs the others, and all stop the run there. The resumed run does the evaluation again.
    """

    def __init__(self, own: Loader, trainer: TrainerProtocol) -> None:
        super().__init__(own)
        self._trainer = trainer

    def micro_batches(self, epoch: int, first: int = 0) -> Iterator[MicroBatch]:
        reason: Reason | None = None
        may_stop = self._may_stop()
        for micro_batch in self.own.micro_batches(epoch, first):
            reason = self._interruption.reason_to_leave if may_stop else None
            if reason is not None:
                break
            yield micro_batch
        if may_stop:
            agreed = next((one for one in gather_objects(reason) if one is not None), None)
            if agreed is not None:
                stop_run(self._trainer.run, agreed)

    @property
    def _interruption(self) -> Interruption:
        interruption: Interruption = self._trainer.run.interruption
        return interruption

    def _may_stop(self) -> bool:
        """Return whether processes need not keep in step, and there is something to resume from."""
        keeps_in_step = num_processes() > 1 and not self._trainer.settings.evaluation.report_loss_after_eval
        return self._trainer.state.stage == "validate" and self._interruption.is_listening and not keeps_in_step
