"""A thread that handles signals and the other processes while the main thread waits in a collective.

Python runs a signal handler only when its main thread returns from C code, which it does not while it waits for another
process. The system's handler writes the signal number to a socket (`signal.set_wakeup_fd`), which this thread reads.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from accmt.addons.machines import Machine, SignsOfLife, find_machines
from accmt.errors import AccmtError, ModuleContractError, Preempted, ProcessFailedError, fail
from accmt.failures import Interruption, Reason, Watch, is_consequence, kind_of, record_for_launcher
from accmt.failures.board import LEFT, Board
from accmt.failures.kinds import COLLECTIVES, WRAPPER
from accmt.libraries.private_names import count_collectives
from accmt.messages import warn
from accmt.options.failures import Handler
from accmt.processes import describe_call, fail_apart, is_running, names_of_threads
from accmt.state import TrainingState

# ---- Detecting deadlocks between processes, and long waits for a slow process.
#
# Collectives have no names, so neither of two processes in different ones learns what the other is doing. But each
# group counts its collectives. All processes start them in one order, so the collectives that one has started are
# a subset of another's or the other way round. If each of two waiting processes is ahead of the other in some group,
# they are deadlocked.
#
# The thread of each process checks once a second, and posts a message if its main thread has waited for some time.


_NOTED_S = 5.0
_WARNED_S = 30.0
_AGAIN = 10  # the interval grows by this factor with each warning
_WAITING, _BUSY = "waiting", "busy"


@dataclass(frozen=True)
class Stand:
    """What a process is currently doing.

    Attributes:
        waits: Whether its main thread waits for other processes.
        begun: The number of collectives that it has started in each group.
        function: The current collective, if known.
    """

    waits: bool
    begun: Mapping[str, int]
    function: str | None = None

    def can_never_meet(self, stand: Stand) -> bool:
        """Return whether two waiting processes are in different collectives that each need both."""
        if self.begun == stand.begun:
            # Both have begun the same number, so their current ones should be one and the same.
            return None not in (self.function, stand.function) and self.function != stand.function
        return self._is_ahead_of(stand) and stand._is_ahead_of(self)

    def _is_ahead_of(self, stand: Stand) -> bool:
        common = self.begun.keys() & stand.begun.keys()
        return any(self.begun[group] > stand.begun[group] for group in common)


class Waits:
    """Monitors how long one process waits and, on the main process, warns about all of them.

    Args:
        board: Where processes post messages.
        describe: Returns what this process is doing.
    """

    def __init__(self, board: Board, describe: Callable[[], str]) -> None:
        self._board = board
        self._describe = describe
        self._stand: Stand | None = None
        self._since = 0.0
        self._has_noted = False
        self._busy_noted_at: float | None = None
        self._apart: list[int] = []
        self._waiting_since: float | None = None
        self._warns_after = _WARNED_S

    def look(self, time_s: float, stand: Stand) -> ModuleContractError | None:
        """Record what this process is doing; return an error if it and another process are deadlocked."""
        if stand != self._stand or not stand.waits:
            self._stand, self._since = stand, time_s
        waits_long = stand.waits and time_s - self._since >= _NOTED_S
        if waits_long != self._has_noted:
            self._has_noted = waits_long
            note = {"stand": asdict(stand), "doing": self._describe()} if waits_long else None
            self._board.post(_WAITING, note)
        notes = self._board.read(_WAITING) if self._board.count > 1 else {}
        waiting = {index: note for index, note in notes.items() if note is not None}
        if not waiting:
            self._busy_noted_at, self._apart, self._waiting_since, self._warns_after = None, [], None, _WARNED_S
            return None
        if not self._has_noted and (self._busy_noted_at is None or time_s - self._busy_noted_at >= _NOTED_S):
            self._busy_noted_at = time_s
            self._board.post(_BUSY, self._describe())  # what this process does while others wait
        doing = {index: note["doing"] for index, note in sorted(waiting.items())}
        if self._board.index == 0:
            self._warn_of_long_wait(time_s, doing)
        if not self._has_noted:
            self._apart = []
            return None
        apart_before, self._apart = self._apart, []
        for index, note in waiting.items():
            if index != self._board.index and stand.can_never_meet(Stand(**note["stand"])):
                self._apart.append(index)
        # Twice in a row, because a message may be a second older than what it is compared with.
        if not apart_before or not self._apart:
            return None
        return fail_apart(doing)

    def _warn_of_long_wait(self, time_s: float, doing: Mapping[int, str]) -> None:
        if self._waiting_since is None:
            self._waiting_since = time_s
        seconds = time_s - self._waiting_since + _NOTED_S
        if seconds < self._warns_after:
            return
        self._warns_after = seconds * _AGAIN
        busy = {index: what for index, what in self._board.read(_BUSY).items() if index not in doing}
        for_whom = f"for {_list(busy)}" if busy else "for one another, or for the network"
        warn(f"waiting for {seconds:.0f} s {for_whom}: {_list(doing)}; training continues when they meet")


def _list(doing: Mapping[int, str]) -> str:
    by_activity: dict[str, list[str]] = {}
    for index, what in sorted(doing.items()):
        by_activity.setdefault(what, []).append(str(index))
    return ", ".join(f"process {', '.join(indices)} in {what}" for what, indices in by_activity.items())


_POLL_S = 0.1
_BEAT_S = 0.5
_CENSUS_S = 1.0
_BUSY_S = 60.0  # a computing main thread reaches the end of its step, and writes its checkpoint there
_COMPUTING = 0.2  # share of one processor's time: a backward that uses more is not waiting for others
_LEAVE_S = 8.0
# A main thread that waits longer for a failed process will never return. It is later than that process exits, which
# ends the collective with an error: on a machine with load 20, a waiting process ended before, without a checkpoint.
_STUCK_S = _LEAVE_S + 4.0
_SAME_FAILURE_S = 2.0
_PROCESS = "process"
_BACKWARD = "torch/autograd/graph.py"
_OPERATORS = "torch/_ops.py"
_FUNCTIONS = "torch/distributed/distributed_c10d.py"
_NEWEST = 4
_WAITING_IN = (*COLLECTIVES, _BACKWARD)


class ProcessWatch(Watch):
    """The monitoring thread of one process.

    Args:
        board: Where processes post messages.
        interruption: Receives the signals.
        hang_timeout_s: Seconds without progress after which the run ends; None disables it.
        progress: Returns a value that changes as long as the run makes progress.
        machines: The machines of the run, if there are several.
        machine_timeout_s: Seconds without a sign of life of another machine after which the run ends; None disables it.

    Attributes:
        board: Where processes post messages.
        has_failed: Whether this process has reported its failure.
        is_apart: Whether it failed while others did not, so that no collective is possible any more.
    """

    def __init__(
        self,
        board: Board,
        interruption: Interruption,
        *,
        hang_timeout_s: float | None,
        progress: Callable[[], Any],
        machines: Sequence[Machine] = (),
        machine_timeout_s: float | None = None,
    ) -> None:
        super().__init__(interruption)
        self.board = board
        self._waits_of_all = Waits(board, lambda: describe_call(self._main_frame()))
        self._signs: SignsOfLife | None = None
        if machine_timeout_s is not None and len(machines) > 1:
            self._signs = SignsOfLife(board, machines, machine_timeout_s, self._end_lost)
        self._hang_timeout_s = hang_timeout_s
        self._progress = progress
        self._main_thread = 0
        self._is_ending = threading.Event()
        self.has_failed = False
        self.is_apart = False
        self._failure_seen_at: float | None = None
        self._waits_since: float | None = None
        self._cpu_used: tuple[float, float] = (time.monotonic(), time.process_time())
        self._last_beat = 0.0
        self._last_census = 0.0
        self._processes: dict[int, Any] = {}
        self._last_progress: tuple[Any, float] = (None, time.monotonic())
        self._receiver, self._sender = socket.socketpair()
        self._previous_fd: int | None = None
        self._thread = threading.Thread(target=self._watch, name="accmt-watch", daemon=True)

    def start(self) -> None:
        import psutil

        for end in (self._receiver, self._sender):
            end.setblocking(False)  # noqa: FBT003 - the socket's own signature
        self._main_thread = threading.get_ident()
        if threading.current_thread() is threading.main_thread():
            self._previous_fd = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        try:  # in a container, process ids repeat
            space = str(Path("/proc/self/ns/pid").readlink())
        except OSError:  # not on Linux
            space = ""
        process = psutil.Process()
        machine = f"{socket.gethostname()} {space}"
        self.board.post(_PROCESS, {"machine": machine, "pid": process.pid, "created": process.create_time()})
        self.board.beat()  # the thread may start only after this machine was cut off, and nobody would miss it
        self._thread.start()
        if self._signs is not None:
            self._signs.start()

    def stop(self) -> None:
        """Stop watching, and restore the signal handling."""
        if self._signs is not None:
            self._signs.leave()
        else:
            with contextlib.suppress(RuntimeError, OSError):  # the process with the store has exited
                self.board.post(LEFT, note=True)
        self._is_ending.set()
        with contextlib.suppress(OSError):
            self._sender.send(b"\0")  # wakes up the thread
        if self._previous_fd is not None:
            signal.set_wakeup_fd(self._previous_fd)
        self._thread.join(timeout=2.0)
        self._receiver.close()
        self._sender.close()
        if self.is_apart:
            self.exit_soon()

    def report_failure(self, error: BaseException) -> None:
        """Send the error that ends this process to the other processes."""
        # Reported already, or a stop on all processes together, which is no failure.
        if self.has_failed or self.interruption.is_left:
            return
        self.interruption.is_ending = True
        self.post_error(error)
        self.is_apart = not self.all_failed_alike(_SAME_FAILURE_S)
        # torchrun shows the first recorded error: that of the process that failed, not of one that waited for it.
        if not self.is_apart or self.find_cause(error) is None:
            record_for_launcher(error)

    def post_error(self, error: BaseException) -> None:
        """Post the error that ends this process."""
        self.has_failed = True
        kind = kind_of(error)
        text = "".join(traceback.format_exception(error))
        kind_name = None if kind is None else kind.name
        was_asked = isinstance(error, KeyboardInterrupt | Preempted)
        self._post_failure(text, is_consequence=is_consequence(error), kind=kind_name, was_asked=was_asked)

    def explain(self, error: BaseException) -> BaseException:
        """Return an error that names the process whose failure caused this one; the error itself if there is none."""
        cause = self.find_cause(error) if self.is_apart else None
        if cause is None:
            return error
        index, report = cause
        if report:
            do = "fix that error; the other processes were waiting for it"
            return fail(ProcessFailedError, f"process {index}", got=f"it failed:\n{report}", expected="no error", do=do)
        got = "it exited without an error message: killed, perhaps because memory ran out"
        return fail(
            ProcessFailedError, f"process {index}", got=got, expected="all processes alive", do="check the system log"
        )

    def kinds_of(self, error: BaseException) -> set[Handler | None]:
        kinds = super().kinds_of(error)
        if is_consequence(error) is not False:
            for note in self.failures().values():
                if note["kind"] is not None:
                    kinds.add(Handler[note["kind"]])
        return kinds

    def all_failed_alike(self, within_s: float) -> bool:
        """Return whether all processes failed independently at one point: collectives are then still possible.

        Args:
            within_s: How long to wait for the others.
        """
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            notes = self.failures()
            if len(notes) == self.board.count:
                # At the same point, and none only because another one has failed.
                kinds = {(note["progress"], note["is_consequence"]) for note in notes.values()}
                return len(kinds) == 1 and not any(note["is_consequence"] for note in notes.values())
            if self.find_lost():
                return False
            time.sleep(_POLL_S)
        return False

    def failures(self) -> dict[int, Any]:
        """Return the failure reports by process, in order."""
        try:
            notes = self.board.read("failed")
        except (RuntimeError, OSError):  # the process with the store has exited
            return {}
        order = (False, None, True)
        return dict(sorted(notes.items(), key=lambda item: (order.index(item[1]["is_consequence"]), item[1]["ticket"])))

    def find_cause(self, error: BaseException) -> tuple[int, str] | None:
        """Return the process whose failure caused an error here, and its report ("" if it was killed).

        None if nothing shows that another process failed before.
        """
        reports = self.failures()
        report = reports.pop(self.board.index, None)
        if isinstance(error, KeyboardInterrupt | Preempted):  # sent by a launcher to the remaining processes
            reports = {index: note for index, note in reports.items() if not note["was_asked"]}
        elif is_consequence(error) is False:
            return None
        for index, note in reports.items():
            came_first = report is None or note["ticket"] < report["ticket"]
            # Of two errors of unknown origin, the earlier one may have caused the later one.
            if note["is_consequence"] is False or (note["is_consequence"] is None and came_first):
                return index, note["text"]
        lost = self.find_lost()
        return (lost[0], "") if lost else None

    def find_lost(self) -> list[int]:
        """Return the processes of this machine that have exited without a report, for example because they were killed.

        The system knows this immediately; for other machines, only signs of life show it.
        """
        try:
            if len(self._processes) < self.board.count:  # otherwise the store need not be asked once a second
                self._processes = self.board.read(_PROCESS)
            machine = self._processes.get(self.board.index, {"machine": None})["machine"]
            exited = []
            for index, process in self._processes.items():
                is_neighbour = index != self.board.index and process["machine"] == machine
                if is_neighbour and not is_running(process["pid"], process["created"]):
                    exited.append(index)
            if not exited:  # the usual case, which should not ask the store
                return []
            reported = {*self.board.read("failed"), *self.board.read(LEFT)}
            return [index for index in exited if index not in reported]
        except (RuntimeError, OSError):  # the process with the store has exited
            return []

    @staticmethod
    def exit_soon() -> None:
        """End this process soon, even if its exit would wait for one that has died.

        Until then it can print its error: a launcher that has seen another process die would kill it earlier.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stderr = sys.__stderr__
        if stderr is not None:
            faulthandler.dump_traceback_later(_LEAVE_S, exit=True, file=stderr)

    def _watch(self) -> None:
        while not self._is_ending.is_set():
            ready, _, _ = select.select([self._receiver], [], [], _POLL_S)
            if ready and not self._is_ending.is_set():
                numbers = self._receiver.recv(64)
                if self._previous_fd is not None and self._previous_fd >= 0:
                    os.write(self._previous_fd, numbers)
                for number in numbers:
                    if number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) and self.interruption.is_listening:
                        self.interruption.request(Reason.of_signal(number))
            try:
                self._look()
            except (RuntimeError, OSError):  # the process with the store has exited: collectives will fail
                return

    def _look(self) -> None:
        time_s = time.monotonic()
        if time_s - self._last_beat > _BEAT_S:
            self._last_beat = time_s
            self.board.beat()
        if self._signs is not None:
            self._signs.look(time_s)
        if time_s - self._last_census > _CENSUS_S:
            self._last_census = time_s
            self._look_for_failures(time_s)
            self._end_if_apart(time_s)
        if self.interruption.is_asked or self.board.has_news():
            self.interruption.agree()
            self._look_for_failures(time_s)
        self._end_if_stuck(time_s)
        self._end_if_hung(time_s)

    def _look_for_failures(self, time_s: float) -> None:
        if self._failure_seen_at is None and (set(self.failures()) - {self.board.index} or self.find_lost()):
            self._failure_seen_at = time_s

    def _end_if_stuck(self, time_s: float) -> None:
        if self.has_failed or self._failure_seen_at is None:
            return
        if not self._waits(time_s):
            self._waits_since = None
        elif self._waits_since is None:
            self._waits_since = time_s
        waits_long = self._waits_since is not None and time_s - self._waits_since >= _STUCK_S
        # A main thread that computes may still end in order, with a checkpoint.
        if not waits_long and time_s - self._failure_seen_at < _BUSY_S:
            return
        for index, note in self.failures().items():
            self._end(f"process {index} failed while this one was waiting for it:\n{note['text']}")
        for index in self.find_lost():
            self._end(f"process {index} was killed while this one was waiting for it")

    def _end_if_apart(self, time_s: float) -> None:
        if self.has_failed or self._failure_seen_at is not None or self.board.count == 1:
            return
        frame, function = self._main_frame(), None
        if frame is not None and frame.f_code.co_filename.endswith(_FUNCTIONS):
            function = frame.f_code.co_name
        stand = Stand(self._waits(time_s), count_collectives(leaving_out=names_of_threads), function)
        error = self._waits_of_all.look(time_s, stand)
        if error is not None:
            try:
                raise error  # with a traceback for the launcher's summary
            except AccmtError as raised:
                record_for_launcher(raised)
            self._post_failure(str(error), is_consequence=False)
            self._end(str(error))

    def _main_frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main_thread)

    def _waits(self, time_s: float) -> bool:
        """Return whether the main thread waits for other processes; in a backward, only its processor time shows it."""
        (at, used), self._cpu_used = self._cpu_used, (time_s, time.process_time())
        files: list[str] = []
        frame = self._main_frame()
        while frame is not None and len(files) < _NEWEST:
            files.append(frame.f_code.co_filename)
            frame = frame.f_back
        # Only the last frame counts: communication is also above a forward that computes, or an action.
        if files and any(path in files[0] for path in (*COLLECTIVES, WRAPPER)):
            return True
        if len(files) > 1 and _OPERATORS in files[0] and COLLECTIVES[0] in files[1]:
            return True
        is_in_backward = any(_BACKWARD in file for file in files)
        return is_in_backward and self._cpu_used[1] - used < _COMPUTING * (time_s - at)

    def _end_if_hung(self, time_s: float) -> None:
        if self._hang_timeout_s is None or self.has_failed:
            return
        progress = self._progress()
        if progress != self._last_progress[0]:
            self._last_progress = progress, time_s
        elif time_s - self._last_progress[1] > self._hang_timeout_s:
            stack = traceback.format_stack(self._main_frame())
            waits = any(path in line for line in stack[-4:] for path in _WAITING_IN)
            what = f"no progress for {self._hang_timeout_s:g} s; the main thread is here:\n{''.join(stack)}"
            self._post_failure(what, is_consequence=waits)
            time.sleep(1.0)  # until all have reported where they are
            index, note = next(iter(self.failures().items()), (self.board.index, {"text": what}))
            self._end(f"process {index}: {note['text']}")

    def _end_lost(self, why: str) -> None:
        try:
            raise ProcessFailedError(why)  # for the launcher's summary
        except ProcessFailedError as error:
            record_for_launcher(error)
        self._end(why)

    def _post_failure(
        self, text: str, *, is_consequence: bool | None, kind: str | None = None, was_asked: bool = False
    ) -> None:
        try:
            ticket = self.board.draw_ticket()
            note = {"ticket": ticket, "text": text, "is_consequence": is_consequence, "kind": kind}
            note["was_asked"] = was_asked
            self.board.post("failed", {**note, "progress": repr(self._progress())})
        except (RuntimeError, OSError):  # the process with the store has exited
            return

    @staticmethod
    def _end(why: str) -> None:
        # A main thread that waits in a collective reacts neither to an exception nor to an exit.
        os.write(2, f"[accmt] {why}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)


def build_watch(
    board: Board,
    interruption: Interruption,
    state: TrainingState,
    *,
    hang_timeout_s: float | None,
    machine_timeout_s: float | None,
) -> ProcessWatch:
    """Create the watch of a run; what counts as progress are its counters.

    Processes: collective.
    """

    def progress() -> tuple[int, ...]:
        return state.batch_iteration, state.eval_global_step, state.global_step, state.epoch, state.evaluations_done

    machines = find_machines()
    return ProcessWatch(
        board,
        interruption,
        hang_timeout_s=hang_timeout_s,
        progress=progress,
        machines=machines,
        machine_timeout_s=machine_timeout_s,
    )
