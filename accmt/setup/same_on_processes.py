"""Checks what must be equal on all processes, because each plans its part without communication."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from accmt.data.base import length_of
from accmt.errors import ArgumentError, DataError, ProcessFailedError, fail
from accmt.failures import Board, is_consequence, record_for_launcher
from accmt.options import DataSettings, Settings
from accmt.processes import (
    gather_objects,
    num_processes,
    run_on_every_process,
)

T = TypeVar("T")


def find_same_data(find: Callable[[], Mapping[str, Any]], settings: DataSettings) -> Mapping[str, Any]:
    """Return the data that `find` returns by name; types and lengths must be equal on all processes.

    Processes: collective.
    """
    if num_processes() == 1:
        return find()
    found: dict[str, Any] = {}

    def describe() -> dict[str, str]:
        found.update(find())
        return {name: _describe(data) for name, data in found.items()} if settings.data_options.shard else {}

    every = run_on_every_process(describe)
    for name in every[0] if set(every[0]) == set.union(*map(set, every)) else ():
        _require_equal(name, [facts.get(name, "none") for facts in every])
    names = [", ".join(filter(None, facts)) or "one" for facts in every]
    _require_equal("the names of the data sets", names)
    return found


def _require_equal(what: str, every: list[str]) -> None:
    if len(set(every)) > 1:
        got = "; ".join(f"process {index}: {facts}" for index, facts in enumerate(every))
        expected = "the same data on every process, which accmt shards"
        do = 'pass all data on every process, or data_options={"shard": False} if each process has its own data'
        raise fail(DataError, what.strip(), got=got, expected=expected, do=do)


def _describe(data: Any) -> str:
    if isinstance(data, DataLoader):
        sampler = getattr(data.batch_sampler, "sampler", data.sampler)
        if hasattr(sampler, "num_replicas"):  # the sampler shards the data
            return f"a {type(data).__name__} of {_length(data.dataset)}"
        return f"a {type(data).__name__} of {_length(data, 'batches')} from {_length(data.dataset)}"
    return _length(data)


def _length(data: Any, unit: str = "samples") -> str:
    length = length_of(data)
    return f"{type(data).__name__} without a length" if length is None else f"{length} {unit}"


def require_same_settings(settings: Settings) -> None:
    """Check that all processes have the same hyper-parameters and the same settings that determine steps.

    Processes: collective.
    """
    if num_processes() == 1:
        return
    optimization, evaluation, checkpoints = settings.optimization, settings.evaluation, settings.checkpoints
    own: dict[str, str] = {name: repr(value) for name, value in settings.hps.to_dict()["hps"].items()}
    own |= {name: repr(value) for name, value in vars(optimization).items()}
    own |= {
        "evaluate_every_n_steps": repr(evaluation.every),
        "checkpoint_every": repr(checkpoints.every),
        "log_every": repr(settings.tracking.log_steps),
    }
    every = gather_objects(own)
    for name in own:
        values = [facts.get(name, "none") for facts in every]
        if len(set(values)) > 1:
            got = "; ".join(f"process {index}: {value}" for index, value in enumerate(values))
            do = "set the same value on every process; accmt derives a different seed for each process"
            raise fail(ArgumentError, name, got=got, expected="one value on all processes", do=do)


# ---- Reports errors during setup to the other processes; later, the watch does this.


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
