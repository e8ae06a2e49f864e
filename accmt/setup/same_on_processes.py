"""Checks what must be equal on all processes, because each plans its part without communication."""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from accmt.data.base import length_of
from accmt.errors import ArgumentError, DataError, ProcessFailedError, SavingError, explain
from accmt.failures import Board, find_machines, is_consequence, record_for_launcher
from accmt.options import DataSettings, Settings
from accmt.processes import (
    gather_objects,
    is_main_process,
    num_processes,
    process_index,
    run_on_every_process,
    run_on_main_process,
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
        raise DataError(explain(what.strip(), got, expected, do))


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
            raise ArgumentError(explain(name, got, "one value on all processes", do))


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
        message = explain(f"process {index}", f"failed while setting up the run:\n{text}", "no error", do)
        raise ProcessFailedError(message) from None


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


# ---- Checks that all machines share the folders to which each writes its part of a checkpoint.


_WAIT_S = 10.0  # network disks show changes with a delay
_POLL_DISK_S = 0.2


def require_shared_disk(settings: Settings) -> None:
    """Check that files written by the main process next to models and checkpoints are visible on all machines.

    Processes: collective.

    Raises:
        SavingError: A machine does not see them.
    """
    if num_processes() == 1 or settings.running.fast_dev_run:
        return
    machines = find_machines()
    folders = [settings.model_folder.absolute()]
    if settings.checkpoints.writes_to_folder:
        folders.append(settings.checkpoint_folder.absolute())
    for folder in folders if len(machines) > 1 else ():
        probe = run_on_main_process(lambda folder=folder: _write_probe(folder))  # type: ignore[misc]
        if probe is None:
            continue
        looks = any(machine.first == process_index() for machine in machines)
        seen = gather_objects(_appears(probe) if looks else True)
        if is_main_process():
            probe.unlink(missing_ok=True)
        if not all(seen):
            blind = ", ".join(machine.name for machine in machines if not seen[machine.first])
            got = f"{blind} (process {seen.index(False)}) does not see what {machines[0].name} (process 0) writes there"
            do = "put model_path and checkpoint on shared storage (NFS, Lustre, a mounted volume)"
            raise SavingError(explain(f"folder {folder}", got, "a folder on storage that all machines share", do))


def _write_probe(folder: Path) -> Path | None:
    """Write an empty file with a new name into a folder or its nearest existing parent; None if that fails."""
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    probe = place / f".accmt-{token_hex(8)}"
    with suppress(OSError):  # the actual write reports the reason
        probe.touch()
        return probe
    return None


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_DISK_S)
    return True
