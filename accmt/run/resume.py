"""Where a run starts: at step 0 or at a checkpoint; and what has changed since the checkpoint was written."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accmt.checkpoint.contents import read_others, rejecting_other_forms
from accmt.checkpoint.manifest import MANIFEST_NAME, Checkpoint, Manifest, read_manifest
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import NoCheckpointError, fail
from accmt.messages import say, warn
from accmt.options import Settings
from accmt.options.changes import Change, compare, require_allowed
from accmt.processes import is_on_any_process, num_processes
from accmt.secrets import hide


@dataclass(frozen=True)
class Resumed:
    """A verified checkpoint that a run continues from.

    Attributes:
        folder: Its folder.
        states: The states besides model and optimizer; only the data position includes its tensors.
        manifest: Its manifest; None if a custom checkpointer keeps none.
        changes: Hyper-parameters that have changed since.
    """

    folder: Path
    states: Mapping[str, Any]
    manifest: Manifest | None
    changes: tuple[Change, ...]

    @property
    def counters(self) -> dict[str, Any]:
        """The counters of the run at the checkpoint."""
        counters: dict[str, Any] = self.states["parts"]["state"]
        return counters


def find_resumed(settings: Settings, override: Path | None = None) -> Resumed | None:
    """Return what a run resumes from; None if it starts from the beginning.

    Processes: collective.
    """
    folder = override or _find_folder(settings)
    if folder is None:
        return None
    resets_optimizer = settings.checkpoints.checkpoint_options.reset_optimizer_on_resume
    hps = settings.hps.to_dict()["hps"]
    with rejecting_other_forms(folder):
        # The data position includes the state that a stream returned.
        states = read_others(folder, whole=["data"])
        _require_form(states)
        changes = compare(hide(states["hps"]), hide(hps), resets_optimizer=resets_optimizer)
    require_allowed(changes, f"continuing from {folder}")
    entries, manifest = read_manifest(folder), None
    if isinstance(entries, Manifest):
        manifest = entries
    resumed = Resumed(folder, states, manifest, tuple(changes))
    _log_resume(resumed, settings)
    return resumed


def _require_form(states: Mapping[str, Any]) -> None:
    """Check the types of what a run is built from: a checkpoint of another version may have other types."""
    kinds = {"seed": int, "run_name": str, "run_id": str}
    kinds |= dict.fromkeys(("hps", "data", "lessons", "parts"), dict)
    for name, kind in kinds.items():
        if not isinstance(states[name], kind):
            raise TypeError(f"{name} is a {type(states[name]).__name__}, not a {kind.__name__}")
    counters = states["parts"]["state"]
    for name in ("epoch", "train_step", "global_step", "samples_seen"):
        if type(counters[name]) is not int:
            raise TypeError(f"{name} is {counters[name]!r}, not a whole number")


def _find_folder(settings: Settings) -> Path | None:
    options = settings.checkpoints
    if options.resume is False:
        return None
    if options.resume is not None and options.resume not in (True, "auto"):
        return find_checkpoint(settings.from_home(str(options.resume))).folder
    folder = find_newest(settings)
    if folder is not None or options.resume is not True:
        return folder
    got = f"no checkpoint in {settings.checkpoint_folder}"
    if options.checkpointer is not None:
        got = f"no checkpoint in {type(options.checkpointer).__name__}"
    do = 'check the path; resume="auto" starts from the beginning if there is no checkpoint'
    # A new run that was killed before it wrote a checkpoint may have moved the previous run's checkpoints.
    folder = settings.checkpoint_folder.resolve()
    moved = list(folder.parent.glob(f"{glob.escape(folder.name)}.previous*"))
    if moved:
        previous = max(moved, key=lambda path: path.stat().st_mtime)
        do = f'resume="{previous}" continues the earlier run whose checkpoints were moved there; {do}'
    raise fail(NoCheckpointError, "Trainer(resume=True)", got=got, expected="a checkpoint to continue from", do=do)


def find_newest(settings: Settings) -> Path | None:
    """Return the run's newest checkpoint: from custom storage, or in its folder with every file verified; or None.

    Processes: collective.
    """
    if settings.checkpoints.checkpointer is not None:
        return settings.checkpoints.checkpointer.load()
    newest = CheckpointStore(settings.checkpoint_folder).newest()
    if newest is None:
        return None
    return newest.folder


def find_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in `path`, or the newest in a folder of checkpoints, with every file verified.

    Processes: collective.
    """
    if path.name == MANIFEST_NAME:
        path = path.parent
    is_one = is_on_any_process((path / MANIFEST_NAME).exists())  # the manifest is on one of the disks
    newest = None
    if not is_one:
        newest = CheckpointStore(path).newest()
    return newest or CheckpointStore(path.parent).find(path)


def _log_resume(resumed: Resumed, settings: Settings) -> None:
    """Log where the run resumes and what has changed."""
    counters, manifest = resumed.counters, resumed.manifest
    epoch = f"{counters['epoch']} epochs finished"
    if counters["train_step"]:
        epoch = f"in epoch {counters['epoch'] + 1}"
    place = f"step {counters['global_step']}, {epoch}, {counters['samples_seen']} samples"
    say(f"continuing from {resumed.folder}: {place}")
    for change in resumed.changes:
        say(f"changed since that checkpoint: {change}")
    seed, saved_seed = settings.running.seed, resumed.states["seed"]
    if seed is not None and seed != saved_seed:
        warn(
            f"seed={seed} is ignored: the run keeps its seed {saved_seed}, otherwise its order of samples would change"
        )
    if settings.checkpoints.checkpoint_options.reset_optimizer_on_resume:
        say("optimizer and scheduler start over (reset_optimizer_on_resume=True)")
    if manifest is None:
        return
    saved = {
        "process(es)": manifest.processes,
        "CPU thread(s)": manifest.threads,
        "torch": manifest.versions.get("torch"),
    }
    current = {"process(es)": num_processes(), "CPU thread(s)": torch.get_num_threads(), "torch": torch.__version__}
    changed = []
    for name in saved:
        if saved[name] != current[name]:
            changed.append(f"{name} {saved[name]} -> {current[name]}")
    # Bit-identical results need the same processes, threads and torch; the run goes on without them.
    if changed:
        said = "the order of samples is kept, but results will not be bit-for-bit identical to an uninterrupted run"
        say(f"changed since that checkpoint: {', '.join(changed)}; {said}")
