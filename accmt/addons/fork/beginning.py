"""Begins a fork, or resumes it, and ends the part of it that is its parent.

A fork starts from a copy of the newest checkpoint of its parent at or before its step. If that checkpoint is older than
the step, a first run makes the steps up to it with the parent's hyper-parameters, and a second run continues from there
with those of the fork. A checkpoint of the fork says by its step which of the two a killed fork continues with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from accmt.addons.flight_recorder.compare import RELATIVE_TOLERANCE
from accmt.addons.flight_recorder.ledger import LEDGER_FILE, compare_steps, read_ledger
from accmt.addons.fork.checkpoints import fork_checkpoint
from accmt.addons.fork.lineage import FORK_FILE, Origin, ancestors_of, note_fork, read_origin
from accmt.addons.goodput.records import read_goodput
from accmt.addons.launches import DECIDE_STEPS, arguments_of, read_launches
from accmt.addons.run_folders import taking_turns
from accmt.addons.trackers.delivery_state import DeliveryFile
from accmt.addons.trackers.spec import find_specs
from accmt.checkpoint.manifest import Manifest, read_manifest
from accmt.checkpoint.retention import delete, list_published
from accmt.checkpoint.store import CheckpointStore
from accmt.errors import ArgumentError, CheckpointCorruptError, StepDiffersError, fail
from accmt.files import current_folder, dumps, loads
from accmt.messages import say, warn
from accmt.options import HyperParameters, Settings
from accmt.options.changes import Change, compare, require_allowed
from accmt.processes import num_processes, run_on_main_process
from accmt.registry import HPS_SECTIONS, names
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.secrets import hide, hide_text
from accmt.tracking.history import HISTORY_FILE, RunPlace, folder_name, read_history

if TYPE_CHECKING:
    from accmt import Trainer
    from accmt.data import Window
    from accmt.run.restart import Recovery

_BUILT_ONCE = ("accelerator", "mixed_precision", "parallelism")
"""Arguments that are for all runs of a program."""

_COPIES = 3


class ChangedFork(str):
    """The argument `fork` of a Trainer whose arguments a command has changed.

    Attributes:
        unchanged: Its settings before, without keywords for trackers.
    """

    unchanged: Settings


@dataclass(frozen=True)
class Parent:
    """The run that a fork comes from.

    Attributes:
        folder: Its run folder.
        where: What is to be done with it, for messages.
        launches: Its starts.
    """

    folder: Path
    where: str
    launches: list[dict[str, Any]]

    @classmethod
    def find(cls, folder: Path, step: int) -> Parent:
        """Read a run folder.

        Raises:
            ArgumentError: It is none, or how the run was started is not recorded.
        """
        where = f"fork of {folder} at step {step}"
        if not (folder / HISTORY_FILE).is_file():
            got = f"no {HISTORY_FILE} in it" if folder.is_dir() else f"no such folder; you are in {Path.cwd()}"
            raise fail(ArgumentError, where, got=got, expected="the folder of a run", do="pass logs/<track>/<run>")
        launches = read_launches(folder)
        if not launches:
            got = "a run whose start is not recorded: there is no launches.jsonl in it"
            do = "resume it once with this version of accmt, which writes that file"
            raise fail(ArgumentError, where, got=got, expected="a run that this version of accmt has started", do=do)
        return cls(folder, where, launches)

    def fail(self, got: str, expected: str, do: str) -> NoReturn:
        raise fail(ArgumentError, self.where, got=got, expected=expected, do=do)

    def start_before(self, step: int) -> dict[str, Any]:
        """Return the start of the process that made a step: a later one made the steps after its checkpoint again."""
        return next((line for line in reversed(self.launches) if line["step"] < step), self.launches[0])

    def hps_at(self, manifest: Manifest, step: int) -> dict[str, Any]:
        """Return the hyper-parameters with which the run made the steps from a checkpoint to a step."""
        return dict(manifest.info["hps"] if manifest.step == step else self.start_before(manifest.step + 1)["hps"])

    def find_checkpoints(self) -> list[tuple[Path, Manifest]]:
        """Return the run's checkpoints, oldest step first, without those that it has left behind by going back."""
        place = Path(self.launches[-1]["checkpoints"])
        # A later run in the same folder has moved them.
        folders = [place, *sorted(place.parent.glob(f"{place.name}.previous*"))]
        found = [(path, read_manifest(path)) for folder in folders for path in list_published(folder)]
        of_run = [
            (path, manifest)
            for path, manifest in found
            if isinstance(manifest, Manifest) and manifest.info.get("run_name") == self.launches[-1]["run_name"]
        ]
        kept: list[tuple[Path, Manifest]] = []
        for path, manifest in sorted(of_run, key=lambda pair: (pair[1].time, pair[1].sequence), reverse=True):
            if not kept or manifest.step < kept[-1][1].step:
                kept.append((path, manifest))
        return kept[::-1]

    def choose_checkpoint(self, step: int) -> tuple[Path, Manifest]:
        """Return the newest checkpoint at or before a step.

        Raises:
            ArgumentError: There is none, or the run has not come that far.
        """
        checkpoints = self.find_checkpoints()
        known = [row["step"] for row in read_history(self.folder) if "step" in row]
        with suppress(OSError):
            known.append(read_goodput(self.folder).step)
        last = max([*known, *(manifest.step for _, manifest in checkpoints)], default=0)
        if step > last:
            self.fail(f"a run that has made {last} steps", f"a step up to {last}", f"--at {last}, or wait for the step")
        before = [pair for pair in checkpoints if pair[1].step <= step]
        steps = ", ".join(str(manifest.step) for _, manifest in checkpoints) or "none"
        got = f"no checkpoint at or before this step; checkpoints of the run are at: {steps}"
        do = 'choose a later step; keep more in a next run: Trainer(checkpoint_options={"keep_every": "1 epoch"})'
        if not before:
            self.fail(got, "a checkpoint to begin from", do)
        return before[-1]

    def describe(self) -> dict[str, Any]:
        """Return what a fork has to know of it, also when it no longer exists."""
        delivered = DeliveryFile.read(self.folder)
        accounts = {} if delivered is None else delivered.accounts
        ids = {name: [account.run_id, account.server] for name, account in accounts.items() if account.run_id}
        return {
            "run_name": self.launches[-1]["run_name"],
            "run_folder": str(self.folder),
            "run_ids": ids,
            "taken": [
                place
                for launches in map(read_launches, ancestors_of(self.folder))
                for start in launches[-1:]
                for place in (start["model_path"], start["checkpoints"], *start["urls"])
            ],
        }


# ---- Where a fork stands


@dataclass(frozen=True)
class Fork:
    """A fork that exists, or is to be made.

    Attributes:
        folder: Its run folder.
        origin: Where it comes from.
        checkpoint: The parent's checkpoint to copy; None if the fork exists.
    """

    folder: Path
    origin: Origin
    checkpoint: Path | None = None


def find_fork(settings: Settings) -> Fork:
    """Return the fork that settings ask for: the one that exists, or what to make, after all checks.

    Reads only. Without a name of its own, a fork has the first free one; the same fork again has the same name.

    Processes: main only.

    Raises:
        ArgumentError: It cannot be made.
        HyperParameterError: A change is rejected.
    """
    run, step = settings.checkpoints.fork_origin
    parent_folder = settings.from_home(run).absolute()
    wanted = settings.tracking.run_name
    definition = loads(dumps({"hps": hide(settings.hps.to_dict()["hps"]), "arguments": arguments_of(settings)}))
    if wanted is not None and folder_name(wanted) not in (place.name for place in ancestors_of(parent_folder)):
        candidates: Iterator[str] = iter([wanted])
    else:
        base = f"{parent_folder.name}-at-{step}"
        candidates = (base if number == 1 else f"{base}-{number}" for number in range(1, 10**6))
    for name in candidates:
        folder = _place_of(settings, parent_folder, name).run_folder.absolute()
        origin = read_origin(folder)
        if origin is None and not (folder / HISTORY_FILE).exists():
            return _plan(settings, Parent.find(parent_folder, step), name, folder, definition)
        if origin is None or (origin.parent_folder.name, origin.step) != (parent_folder.name, step):
            what = "a run that is no fork" if origin is None else f"a fork of {origin.parent_folder} at {origin.step}"
        elif name == wanted or definition == {"hps": origin.hps, "arguments": origin.arguments}:
            return Fork(folder, origin)
        else:
            continue
        if name == wanted:
            got, do = f"{folder} is {what}", "choose another run name, or delete that run"
            raise fail(
                ArgumentError, f"fork of {run} at step {step}", got=got, expected="a run name that is free", do=do
            )
    raise AssertionError


def _place_of(settings: Settings, parent: Path, name: str) -> RunPlace:
    track = settings.tracking.track_name or parent.parent.name
    return RunPlace(str(settings.tracking.logging_dir), track, name, home=settings.home)


def _plan(settings: Settings, parent: Parent, name: str, folder: Path, definition: Mapping[str, Any]) -> Fork:
    """Check everything that can be checked before anything is written."""
    step = settings.checkpoints.fork_origin[1]
    checkpoint, manifest = parent.choose_checkpoint(step)
    parent_hps = parent.hps_at(manifest, step)
    resets = settings.checkpoints.checkpoint_options.reset_optimizer_on_resume
    changes = compare(parent_hps, definition["hps"], resets_optimizer=resets)
    require_allowed(changes, parent.where)
    if manifest.step < step:
        _require_repeatable(settings, parent, manifest.step, step, changes)
    fork = Fork(
        folder,
        Origin(
            run_name=name,
            run_folder=str(folder),
            parent=parent.describe(),
            step=step,
            checkpoint_step=manifest.step,
            **definition,
            parent_hps=parent_hps,
            changes=[f"{change.key}: {change.old} -> {change.new}" for change in changes],
            model_path=str(current_folder() / settings.model_folder),
        ),
        checkpoint,
    )
    placed = place_fork(settings, fork)
    if list_published(placed.checkpoint_folder):
        got = f"checkpoints of another run in {placed.checkpoint_folder}"
        parent.fail(got, "an empty checkpoint folder", "pass another `model_path` or `checkpoint`, or move them away")
    return fork


def _require_repeatable(settings: Settings, parent: Parent, first: int, step: int, changes: Sequence[Change]) -> None:
    """Check that this program can make the steps after the checkpoint as the parent did."""
    starts = [parent.start_before(first + 1)]
    starts += [line for line in parent.launches if first < line["step"] < step]
    start = starts[0]
    steps = [manifest.step for _, manifest in parent.find_checkpoints()]
    do = f"fork at a step with a checkpoint: {', '.join(map(str, steps))}"
    differing = [line["step"] for line in starts[1:] if _decide_steps(line) != _decide_steps(start)]
    if differing:
        got = f"a run whose settings changed at step {differing[0]}, after the checkpoint of step {first}"
        parent.fail(got, "the same settings from the checkpoint to this step", do)
    if start["processes"] != num_processes() and settings.optimization.same_bits is None:
        got = f"{num_processes()} processes; steps {first + 1} to {step} were made by {start['processes']}"
        parent.fail(got, "as many, so that these steps are the same", f"launch as many, or {do}")
    unchanged = getattr(settings.checkpoints.fork, "unchanged", settings)
    was, now = start["settings"], arguments_of(unchanged)
    others = [name for name in DECIDE_STEPS if was.get(name) != now.get(name)]
    if others:
        got = f"other arguments of the Trainer than steps {first + 1} to {step} were made with: {', '.join(others)}"
        parent.fail(got, "the parent's, so that these steps are the same", f"restore them in the program, or {do}")
    final = arguments_of(settings)
    once = [name for name in _BUILT_ONCE if final.get(name) != was.get(name)]
    once += [change.key for change in changes if change.key.split(".")[0] in names(HPS_SECTIONS)]
    if once:
        got = f"a change of {', '.join(once)}, and the newest checkpoint before is that of step {first}"
        parent.fail(got, "a checkpoint of this very step: the program is built with the new value", do)


def _decide_steps(start: Mapping[str, Any]) -> list[Any]:
    settings = start["settings"]
    processes = None if settings.get("same_bits") else start["processes"]  # with which they decide nothing
    return [start["hps"], processes, *(settings.get(name) for name in DECIDE_STEPS)]


# ---- The settings of a fork


def place_fork(settings: Settings, fork: Fork) -> Settings:
    """Return settings with the fork's name and folders: to those of its parent or ancestors, its name is appended."""
    origin, parent = fork.origin, fork.origin.parent
    suffix = f"-{folder_name(origin.run_name)}"
    saving, checkpoints, tracking = settings.saving, settings.checkpoints, settings.tracking
    if _is_taken(saving.model_url or settings.model_folder, parent["taken"]):
        saving = replace(saving, model_path=_append(saving.model_path, suffix))
    placed = replace(settings, saving=saving)
    if checkpoints.checkpoint is not None and _is_taken(checkpoints.url or placed.checkpoint_folder, parent["taken"]):
        checkpoints = replace(checkpoints, checkpoint=_append(checkpoints.checkpoint, suffix))
    options = tracking.tracker_options
    config = {**(options.config or {}), "fork": {"parent": parent["run_name"], "step": origin.step}}
    return replace(
        placed,
        checkpoints=replace(checkpoints, resume=True),
        tracking=replace(
            tracking,
            run_name=origin.run_name,
            track_name=tracking.track_name or Path(parent["run_folder"]).parent.name,
            tracker_options=replace(options, config=config),
            tracker_kwargs=_with_parent_run(settings, parent, origin.run_name),
        ),
    )


def _append(path: Any, suffix: str) -> str:
    return f"{str(path).rstrip('/')}{suffix}"


def _is_taken(place: Path | str, taken: Sequence[str]) -> bool:
    if isinstance(place, str):
        return hide_text(place) in taken
    return (current_folder() / place).resolve() in [Path(other).resolve() for other in taken]


def _with_parent_run(settings: Settings, parent: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the keywords of trackers with what MLflow calls the parent of a run, if that is in the same store."""
    kwargs = dict(settings.tracking.tracker_kwargs)
    spec = next((one for one in find_specs(settings.tracking.log_with) if one.name == "mlflow"), None)
    if spec is None or "mlflow" not in parent["run_ids"]:
        return kwargs
    run_id, store = parent["run_ids"]["mlflow"]
    folder = Path(parent["run_folder"])
    place = _place_of(settings, folder, name)
    server = spec.server(place)
    is_same_folder = place.base_folder.resolve() == folder.resolve().parents[1]
    if store != (server and hide_text(server)) or (server is None and not is_same_folder):
        return kwargs
    own = kwargs.get("mlflow")
    own = dict(own) if isinstance(own, Mapping) else {}
    tags = own.get("tags", spec.init_kwargs.get("tags", kwargs.get("tags"))) or {}
    return {**kwargs, "mlflow": {**own, "tags": {**tags, "mlflow.parentRunId": run_id}}}


def settings_at(settings: Settings, fork: Fork, step: int) -> Settings:
    """Return the settings with which a fork continues from a step: up to that of the fork, the parent's."""
    checkpoints = settings.checkpoints
    if step != fork.origin.step:  # the optimizer is reset once
        options = replace(checkpoints.checkpoint_options, reset_optimizer_on_resume=False)
        settings = replace(settings, checkpoints=replace(checkpoints, checkpoint_options=options))
    if step >= fork.origin.step:
        return place_fork(settings, fork)
    unchanged = getattr(checkpoints.fork, "unchanged", settings)
    placed = place_fork(replace(unchanged, checkpoints=settings.checkpoints, tracking=settings.tracking), fork)
    hps, own = fork.origin.parent_hps, placed.hps.to_dict()["hps"]
    if not compare(hps, hide(own)):
        return placed
    sections = {name: own[name] for name in names(HPS_SECTIONS) if name in own}  # which may have secrets
    return replace(placed, hps=HyperParameters.from_config({"hps": {**hps, **sections}}))


# ---- The two runs of a fork


def begin_fork(trainer: Trainer, recovery: Recovery) -> None:
    """Set the Trainer's settings to those with which the fork continues, and choose its checkpoint.

    Processes: collective.
    """
    settings = trainer.settings
    fork = run_on_main_process(lambda: _find_or_make(settings))
    placed = place_fork(settings, fork)
    store = CheckpointStore(placed.checkpoint_folder)
    newest = store.newest()
    if newest is None:  # killed before it had one
        newest = store.find(run_on_main_process(lambda: _make(settings, fork, placed.checkpoint_folder)))
    trainer.settings, trainer.chosen_checkpoint = settings_at(settings, fork, newest.step), newest.folder
    origin = fork.origin
    if newest.step < origin.step:
        recovery.next_settings = placed
        say(f"making steps {newest.step + 1} to {origin.step} of {origin.parent['run_name']} again")


def _find_or_make(settings: Settings) -> Fork:
    """Return the fork that settings ask for; forks of one run that begin together get different names."""
    parent = settings.from_home(settings.checkpoints.fork_origin[0]).absolute()
    with taking_turns(parent.parent):
        fork = find_fork(settings)
        if fork.checkpoint is not None:
            _make(settings, fork, place_fork(settings, fork).checkpoint_folder)
    return fork


def _make(settings: Settings, fork: Fork, checkpoints: Path) -> Path:
    """Make the folders of a fork, and return its first checkpoint."""
    origin, folder, checkpoint = fork.origin, fork.folder, fork.checkpoint
    where = f"fork of {origin.parent_folder} at step {origin.step}"
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(_COPIES):
        if checkpoint is not None:
            origin.write(folder)  # first: whoever finds a checkpoint knows what it is for
            try:
                copied = fork_checkpoint(checkpoint, checkpoints, run_name=origin.run_name)
                break
            except (FileNotFoundError, CheckpointCorruptError) as error:  # its run, which goes on, has deleted it
                warn(f"{where}: {checkpoint.name} cannot be copied: {error}")
        parent = Parent.find(origin.parent_folder, origin.step)
        others = [pair for pair in parent.find_checkpoints() if pair[1].step <= origin.step and pair[0] != checkpoint]
        if not others:
            got, do = "no complete checkpoint at or before this step", "choose a later step"
            parent.fail(got, "a checkpoint to begin from", do)
        checkpoint, manifest = others[-1]
        origin = replace(origin, checkpoint_step=manifest.step, parent_hps=parent.hps_at(manifest, origin.step))
        if manifest.step < origin.step:
            changes = compare(origin.parent_hps, origin.hps)
            _require_repeatable(settings, parent, manifest.step, origin.step, changes)
    else:
        got, do = f"checkpoints that vanish while they are copied ({_COPIES} times)", "try again"
        raise fail(ArgumentError, where, got=got, expected="a checkpoint that stays", do=do)
    about = {"run_name": origin.run_name, "step": origin.step, "changes": origin.changes}
    try:
        note_fork(origin.parent_folder, folder, about)
    except OSError as error:
        warn(f"{where}: {origin.parent_folder} cannot be written ({error}); {FORK_FILE} of the fork names its parent")
    changed = ", ".join(origin.changes) or "no hyper-parameters"
    say(f"{folder} is a fork of {origin.parent_folder} at step {origin.step}; changed: {changed}")
    return copied


class ForkPoint(Feature):
    """Ends the run that makes the parent's steps again, at the step of the fork, and starts the one that follows."""

    name = "fork_point"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = run.settings.checkpoints.fork_origin[1]

    @classmethod
    def for_run(cls, run: EvaluationRun) -> ForkPoint | None:
        is_wanted = isinstance(run, Run) and run.settings.checkpoints.fork and run.recovery.next_settings is not None
        return cls(run) if is_wanted and isinstance(run, Run) else None

    def after_window(self, *, made_step: bool) -> None:
        """Request a checkpoint after the last common step, and after all that the parent did there."""
        if made_step and self._run.state.global_step >= self._step:
            self._run.checkpoints.request(None)

    def reading(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Pass the windows up to the step of the fork."""
        for window in windows:
            yield window
            if self._run.state.global_step >= self._step:  # the window and its stages are done
                self._run.recovery.restart(self._hand_over())

    def on_end(self, error: BaseException | None) -> None:
        """Continue, too, where the parent ended at the step of the fork."""
        if error is not None:
            return
        if (last := self._run.state.global_step) < self._step:
            got, expected = f"training ended at step {last}", f"step {self._step}, as in the parent"
            do = "restore what has changed in the program or its data"
            raise fail(StepDiffersError, f"fork at step {self._step}", got=got, expected=expected, do=do)
        self._run.recovery.checkpoint = self._hand_over()

    def _hand_over(self) -> Path:
        """Let the next run have the fork's settings, and return the checkpoint that it continues from."""
        run = self._run
        checkpoint = run.checkpoints.newest()
        run_on_main_process(lambda: self._require_same(checkpoint))
        run.module.trainer.settings = run.recovery.next_settings or run.settings
        run.recovery.next_settings = None
        return checkpoint

    def _require_same(self, checkpoint: Path) -> None:
        """Compare the steps that were made again with the parent's ledger, if both have one."""
        origin = read_origin(current_folder() / self._run.tracking.run_folder)
        if origin is None:
            return
        try:
            recorded = read_ledger(origin.parent_folder / LEDGER_FILE)
            own = read_ledger(current_folder() / self._run.tracking.run_folder / LEDGER_FILE)
        except OSError:
            return
        starts = recorded.starts()
        if recorded.fault is not None or not starts:
            return
        start = starts[-1]
        number, difference = compare_steps(recorded, own, start["tensors"], self._step)
        if difference is not None and not start["is_deterministic"]:
            number, difference = compare_steps(recorded, own, start["tensors"], self._step, RELATIVE_TOLERANCE)
        if difference is None:
            say(f"up to step {self._step}, the fork is its parent: {number} lines of the ledgers are identical")
            return
        delete(checkpoint, step=self._step)  # so that nothing continues from it
        expected = "steps that are identical to the parent's"
        do = "restore what has changed in the program or its data, or fork at a step with a checkpoint"
        raise fail(
            StepDiffersError,
            f"fork of {origin.parent_folder} at step {origin.step}",
            got=difference,
            expected=expected,
            do=do,
        )
