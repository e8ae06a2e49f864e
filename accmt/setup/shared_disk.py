"""Checks that all machines of a run see the same folders: each writes its part of a checkpoint there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from accmt.errors import SavingError, explain
from accmt.failures import find_machines
from accmt.options import Settings
from accmt.processes import gather_objects, is_main_process, num_processes, process_index, run_on_main_process

_WAIT_S = 10.0  # network disks show what another machine has written after a while
_POLL_S = 0.2


def require_shared_disk(settings: Settings) -> None:
    """Check that what the main process writes beside model and checkpoints can be seen on every machine.

    Processes: collective.

    Raises:
        SavingError: A machine does not see it.
    """
    if num_processes() == 1 or settings.running.fast_dev_run:
        return
    machines = find_machines()
    for folder in _folders(settings) if len(machines) > 1 else ():
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
            do = "model_path, and checkpoint where it is given, on such a disk (NFS, Lustre, a mounted volume)"
            raise SavingError(explain(f"folder {folder}", got, "a folder on a disk that all machines share", do))


def _folders(settings: Settings) -> Iterator[Path]:
    yield settings.model_folder.absolute()
    if settings.checkpoints.every is not None and settings.checkpoints.checkpointer is None:
        yield settings.checkpoint_folder.absolute()


def _write_probe(folder: Path) -> Path | None:
    """Write an empty file of a new name into a folder, or where it will be made; None where nothing can be written."""
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    probe = place / f".accmt-{token_hex(8)}"
    with suppress(OSError):  # whoever writes there in earnest says why it fails
        probe.touch()
        return probe
    return None


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
