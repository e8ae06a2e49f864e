"""The checks before the first step: one ordered table.

The core does not import this package: a run asks for its stages by name, through `accmt/registry.py`. A stage calls its
checks in order, on each process, without communication, and ends with one exchange. All mistakes of all processes are
reported in one error.

A check is a function of `Facts`. It raises an `AccmtError` for a mistake, and may add facts for the checks and the run
after it. The checks of one subject rely on each other: the first mistake ends them, and those of other subjects go on.

The comment on a row names the failure that it exists for. A row without a failure is deleted.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accmt.checks.table import STAGES, EqualValue, Stage, Subject
from accmt.checks.table import Facts as Facts
from accmt.errors import AccmtError, ProcessFailedError, fail, join_errors
from accmt.failures import Board, is_consequence, record_for_launcher
from accmt.processes import num_processes, run_on_every_process

if TYPE_CHECKING:
    from accmt.options import Settings


def check_stage(stage: Stage, settings: Settings, **known: Any) -> Facts:
    """Run the checks of a stage, and return the facts that they used and found.

    Args:
        stage: The stage.
        settings: The settings of the Trainer.
        known: Further arguments of `Facts`.

    Processes: collective; the stage "arguments" is local, because no process group exists while a Trainer is created.

    Raises:
        AccmtError: The mistake, if there is one.
        CombinedError: Several mistakes of different kinds.
    """
    facts = Facts(settings=settings, **known)
    errors: dict[Subject, AccmtError] = {}

    def run_checks() -> tuple[list[AccmtError], dict[str, EqualValue]]:
        for row in STAGES[stage]:
            if errors.keys().isdisjoint((row.subject, *row.uses)):
                try:
                    row.check(facts)
                except AccmtError as error:
                    errors[row.subject] = error
                except Exception:
                    # A method of the user may have failed because of a mistake that is known, such as no `self.model`.
                    if not errors:
                        raise
                    break
        return list(errors.values()), facts.equal

    # Other errors, such as one in a method of the user that makes the data, are raised on all processes at once. One
    # process sends nothing: an error of a class that cannot be pickled is reported, too.
    is_local = stage == "arguments" or num_processes() == 1
    reports = [run_checks()] if is_local else run_on_every_process(run_checks)
    errors_of_processes, equal_of_processes = zip(*reports, strict=True)
    mistakes = _collect_errors(errors_of_processes, list(errors.values()))
    if not mistakes:
        mistakes = _find_differences(equal_of_processes)
    if mistakes:
        raise join_errors(mistakes)
    return facts


def _collect_errors(of_processes: Sequence[list[AccmtError]], local: list[AccmtError]) -> list[AccmtError]:
    """Return each error once, those of this process first; a note names the processes if not all have it."""
    errors = {str(error): error for error in local}
    ranks: dict[str, list[int]] = {}
    for rank, reported in enumerate(of_processes):
        for error in reported:
            errors.setdefault(str(error), error)
            ranks.setdefault(str(error), []).append(rank)
    for message, error in errors.items():
        if len(ranks[message]) < len(of_processes):
            error.add_note(f"Only on process {', '.join(map(str, ranks[message]))} of {len(of_processes)}.")
    return list(errors.values())


def _find_differences(of_processes: Sequence[dict[str, EqualValue]]) -> list[AccmtError]:
    expected: dict[str, EqualValue] = {}
    for equal in of_processes:
        expected |= equal
    errors: list[AccmtError] = []
    for where, value in expected.items():
        values = [equal[where].text if where in equal else "none" for equal in of_processes]
        if len(set(values)) > 1:
            got = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(values))
            errors.append(fail(value.kind, where, got=got, expected=value.expected, do=value.do))
    return errors


# ---- Reports errors outside the table, while a run is built, to the other processes. Later, the watch does this.


_ANSWER_S = 2.0
_POLL_S = 0.1
_numbers = itertools.count()


@contextmanager
def reporting_failed_setup() -> Iterator[None]:
    """If setting up a run fails on a process, raise an error on all that names it."""
    number = next(_numbers)
    try:
        yield
    except Exception as error:
        try:
            note = _exchange(error, number)
        except (RuntimeError, OSError):  # the process that hosts the store has exited
            raise error from None
        if note is None:
            raise
        index, text = note
        do = "fix that error; the other processes were waiting for it"
        raise fail(
            ProcessFailedError,
            f"process {index}",
            got=f"failed while setting up the run:\n{text}",
            expected="no error",
            do=do,
        ) from None


def _exchange(error: Exception, number: int) -> tuple[int, str] | None:
    """Post a note about an error; if it is the consequence of another one, return the note of that."""
    board = Board.of_setup(number)
    if is_consequence(error) is not True:
        record_for_launcher(error)
        if board is not None:
            board.post("failed", "".join(traceback.format_exception(error)))
        return None
    if board is None:
        return None
    deadline = time.monotonic() + _ANSWER_S
    notes: dict[int, Any] = board.read("failed")
    while not notes and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        notes = board.read("failed")
    return next(iter(notes.items()), None)
