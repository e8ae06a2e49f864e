"""Which machines share the folders of models and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from accmt.addons.machines import Machine, find_machines
from accmt.errors import SavingError, fail
from accmt.options import Settings
from accmt.processes import gather_objects, process_index, separate_disks

_WAIT_S = 10.0  # network disks show changes with a delay
_WAIT_IF_SEPARATE_S = 2.0
_POLL_DISK_S = 0.2


def find_disks(settings: Settings) -> None:
    """Find out which machines share the checkpoint folder, and record it; require that all share what they have to.

    A folder need not be shared if everything in it is also copied to object storage.

    Processes: collective.

    Raises:
        SavingError: A machine does not see what the main process writes, and has to.
    """
    separate_disks([])
    if settings.running.fast_dev_run:
        return
    machines, checkpoints = find_machines(), settings.checkpoints
    if len(machines) == 1:
        return
    if settings.saving.model_url is None:
        _find_managers(settings.model_folder.absolute(), machines, may_differ=False)
    may_differ = checkpoints.url is not None or not checkpoints.writes_to_folder
    separate_disks(_find_managers(settings.checkpoint_folder.absolute(), machines, may_differ=may_differ))


def _find_managers(folder: Path, machines: Sequence[Machine], *, may_differ: bool) -> list[int]:
    """Return for each process the first one that sees the same disk at `folder`; an empty list if all share it."""
    is_first = any(machine.first == process_index() for machine in machines)
    own = _write_probe(folder) if is_first else None
    probes = gather_objects(own)
    if probes[0] is None:
        return []
    wait_s = _WAIT_IF_SEPARATE_S if may_differ else _WAIT_S
    seen = (index for index, probe in enumerate(probes) if probe and _appears(probe, 0 if index else wait_s))
    first_seen = gather_objects(next(seen, process_index()) if is_first else 0)
    if own is not None:
        own.unlink(missing_ok=True)
    managers: dict[int, int] = {}
    for machine in machines:
        manager = first_seen[machine.first]
        managers |= dict.fromkeys(machine.processes, managers.get(manager, manager))
    blind = [machine for machine in machines if managers[machine.first] != 0]
    if blind and not may_differ:
        names = ", ".join(machine.name for machine in blind)
        got = f"{names} (process {blind[0].first}) does not see what {machines[0].name} (process 0) writes there"
        do = "put model_path and checkpoint on shared storage (NFS, Lustre, a mounted volume), or pass URLs as both"
        raise fail(
            SavingError, f"folder {folder}", got=got, expected="a folder on storage that all machines share", do=do
        )
    return [managers[index] for index in sorted(managers)] if blind else []


def _write_probe(folder: Path) -> Path | None:
    """Write an empty file with a new name into a folder or its nearest existing parent; None if that fails."""
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    probe = place / f".accmt-{token_hex(8)}"
    with suppress(OSError):  # the actual write reports the reason
        probe.touch()
        return probe
    return None


def _appears(path: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_DISK_S)
    return True
