"""Makes steps of a finished run again, in a temporary folder, and compares them with its ledger.

`accmt replay` starts the user's program as it was launched. `Trainer.fit` then calls `replay_fit` in place of training.
"""

from __future__ import annotations

import copy
import json
import os
import runpy
import subprocess
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from accmt.addons.flight_recorder.compare import RELATIVE_TOLERANCE
from accmt.addons.flight_recorder.examiner import EXAMINED_FILE, Examination, StepReport
from accmt.addons.flight_recorder.ledger import LEDGER_FILE, Ledger, compare_steps, read_ledger, require_ledger, step_of
from accmt.addons.launches import build_command, relocate
from accmt.addons.text_tables import align
from accmt.callbacks import Callback, StatelessCallback, build_callbacks
from accmt.checkpoint.contents import read_others
from accmt.checkpoint.manifest import Checkpoint, examine
from accmt.checkpoint.retention import list_published
from accmt.errors import ArgumentError, fail
from accmt.files import current_folder, dumps
from accmt.registry import FIT_VARIABLE
from accmt.run.restart import Restart

_REQUEST = "ACCMT_REPLAY"
_ERROR_FILE = "error.txt"
_FLAG_FILE = "flag.txt"  # the error of a flag of `accmt replay`, which the program finds
_LAST_LINES = 20
_TEXT = 80


@dataclass(frozen=True)
class Replay:
    """What came of a replay.

    Attributes:
        begin: Where it began.
        changes: What has changed since: files of the program, and the number of machines.
        num_compared: Lines of the ledger that were compared.
        difference: The first difference, with its step; None if all is bit-for-bit identical.
        steps: What was measured in the steps that were asked for.
        without: The samples that the first step was made without.
        curve: For each step from there on, its number, the recorded loss, and the loss without these samples.
        output: What the program printed.
        tolerance: The relative tolerance to which losses are equal, if the device does not compute deterministically
            and they are not identical; 0.0 otherwise.
        operations: Operations that have no deterministic implementation on the device.
    """

    begin: str
    changes: list[str]
    num_compared: int
    difference: str | None
    steps: list[StepReport] = field(default_factory=list)
    without: tuple[int, ...] = ()
    curve: list[tuple[int, float | None, float | None]] = field(default_factory=list)
    output: str = ""
    tolerance: float = 0.0
    operations: list[str] = field(default_factory=list)

    @property
    def is_identical(self) -> bool:
        """Whether everything that was compared is identical: bit for bit, or to the tolerance."""
        return self.difference is None

    def __str__(self) -> str:
        return self.describe()

    def describe(self, top: int = 5) -> str:
        """Return the result as text, with the first `top` samples and layers of each step."""
        lines = [f"changed since: {change}" for change in self.changes]
        lines.append(f"replayed from {self.begin}; {self.num_compared} lines of the ledger compared")
        same = f"losses equal within a relative {self.tolerance:g}" if self.tolerance else "bit-for-bit identical"
        lines.append(same if self.difference is None else f"different: {self.difference}")
        if self.operations:
            lines.append(f"no deterministic implementation on this device: {', '.join(self.operations)}")
        for step in self.steps:
            norm = "" if step.gradient_norm is None else f": gradient norm {step.gradient_norm:.4g} before clipping"
            lines += ["", f"step {step.step}{norm}"]
            rows = [
                (str(one.number), f"{one.loss:.4g}", f"{one.gradient_norm:.4g}", str(one.tokens or "-"), _cut(one.text))
                for one in step.samples[:top]
            ]
            if rows:
                lines += _indent([("sample", "loss", "gradient", "tokens", f"of {len(step.samples)} samples"), *rows])
            if step.why_not_split:
                lines.append(f"  samples cannot be separated: {step.why_not_split}")
            layers = [(name, f"{norm:.4g}") for name, norm in step.layers[:top]]
            lines += _indent([("layer", "gradient"), *layers]) if layers else []
        if self.curve:
            without = ", ".join(map(str, self.without))
            lines += ["", *_indent([("step", "recorded loss", f"without {without}"), *map(_format, self.curve)])]
        return "\n".join(lines)


def _format(row: tuple[int, float | None, float | None]) -> tuple[str, str, str]:
    step, *losses = row
    before, now = ("-" if loss is None else f"{loss:.6g}" for loss in losses)
    return str(step), before, now


def _cut(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 3]}..."


def _indent(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in align(rows)]


def replay(
    folder: Path,
    step: int,
    to: int | None = None,
    *,
    without: Collection[int] = (),
    probe: str | None = None,
    export: Path | None = None,
    examines: bool = True,
    processes: int | None = None,
) -> Replay:
    """Make the steps from a checkpoint to `to` again, and compare them with the ledger.

    Args:
        folder: The run folder.
        step: The first requested step.
        to: The last one; None is the same.
        without: Numbers of samples that the first step is made without. Only the steps before it are compared then.
        probe: "file.py:name" of a `Callback` class, or of a function that is called with the Trainer before each
            requested optimizer step.
        export: A file for batch, weights and gradients of the first step.
        examines: Whether the samples and layers of the steps are measured.
        processes: How many processes make them again, if the run had `same_bits`; None: as many as made them.

    Raises:
        ArgumentError: They cannot be made again.
    """
    folder, last = Path(folder).absolute(), step if to is None else to
    ledger = require_ledger(folder, "replay of")
    windows = [(number, line) for number, line in ledger.effective() if "batches" in line]
    steps = [line["step"] for _, line in windows]
    if step not in steps or last not in steps or last < step:
        got = f"--step {step} --to {last}" if last != step else f"--step {step}"
        recorded = f"{min(steps)} to {max(steps)}" if steps else "none"
        _fail(folder, got, f"steps in the ledger: {recorded}", "choose one of these steps")
    probe = None if probe is None else _find_probe(folder, probe)
    if export is not None and not export.absolute().parent.is_dir():
        _fail(folder, f"--export {export}", "a file in a folder that exists", f"mkdir -p {export.parent}")
    start = ledger.start_of(next(number for number, line in windows if line["step"] == step))
    start = relocate(start, folder)
    if processes not in (None, start["processes"]):
        if not start["settings"].get("same_bits"):
            got = f"--processes {processes}, of a run on {start['processes']}"
            _fail(folder, got, "a run with same_bits, or as many processes", "leave --processes out")
        start = {**start, "processes": processes, "is_launched": True}
    checkpoint = _find_begin(folder, ledger, start, step)
    with tempfile.TemporaryDirectory(prefix="accmt-replay-") as place:
        request = {
            "checkpoint": str(checkpoint) if checkpoint else None,
            "first": step,
            "to": last,
            "seed": start["seed"],
            "folder": place,
            "model_path": start["model_path"],
            "began": start["step"],
            "examines": examines and not without,
            "without": sorted(without),
            "places": [[line["epoch"], *line["batches"]] for _, line in windows if line["step"] == step],
            "probe": probe,
            "export": None if export is None else str(export.absolute()),
        }
        path = Path(place) / "request.json"
        path.write_text(dumps(request))
        output = _run_program(folder, start, path)
        found = list(Path(place).rglob(LEDGER_FILE))
        wrong_flag = Path(place, _FLAG_FILE)
        if wrong_flag.exists():
            raise ArgumentError(wrong_flag.read_text())
        if not found or not Path(place, "done").exists():
            error = Path(place, _ERROR_FILE)
            shown = error.read_text() if error.exists() else "\n".join(output.splitlines()[-_LAST_LINES:])
            _fail(folder, f"the program did not reach step {last}:\n{shown}", "a program that repeats the run", _DO)
        again = read_ledger(found[0])
        if (started := again.starts()[0]["processes"]) != start["processes"]:
            _fail(folder, f"{started} processes", f"{start['processes']}, as recorded", "launch as many")
        examined = Path(place, EXAMINED_FILE)
        reports = [StepReport.read(line) for line in examined.read_text().splitlines()] if examined.exists() else []
    begin = f"the checkpoint of {checkpoint.name}" if checkpoint else "the beginning"
    last_compared, tolerance = step - 1 if without else last, 0.0
    num_compared, difference = compare_steps(ledger, again, start["tensors"], last_compared)
    if difference is not None and not start["is_deterministic"]:
        tolerance = RELATIVE_TOLERANCE
        num_compared, difference = compare_steps(ledger, again, start["tensors"], last_compared, tolerance)
    starts_elsewhere = difference is not None and difference.startswith("step 0: ")
    made = {line["step"] for _, line in again.effective() if "batches" in line}
    missing = [number for number in steps if step <= number <= last and number not in made]
    if difference is None and missing and not without:  # a step without any samples is skipped
        difference = f"step {missing[0]}: this step no longer exists"
    changes = _find_changed_files(start["program"])
    machines = {one["host"] for one in start["hardware"]}
    if len(machines) > 1:
        changes.append(f"{len(machines)} machines -> 1")
    curve = _list_losses(ledger, again, step, last) if without else []
    if starts_elsewhere:  # so its steps are those of another model
        difference = f"{difference}\n{_SEED}"
        reports, curve = [], []
    operations = [name for line in again.lines for name in line.get("operations", ())]
    removed = tuple(sorted(without))
    return Replay(begin, changes, num_compared, difference, reports, removed, curve, output, tolerance, operations)


_SEED = (
    "the run starts with other weights, so its steps are not shown. If the program builds the model at random, seed it "
    "before that: accmt.set_seed(0), or torch.manual_seed(0). Of this run, only steps after a checkpoint that still "
    "exists can be replayed"
)
_DO = "restore what has changed since, such as rows that were added to the data; the message above is the program's"


def _find_probe(folder: Path, probe: str) -> str:
    file, _, name = probe.rpartition(":")
    if not file or not Path(file).is_file():
        got = f"--probe {probe}" + (f": there is no file {file}" if file else "")
        _fail(folder, got, "a file and a name in it", "--probe my_probe.py:hook")
    return f"{Path(file).absolute()}:{name}"


def _find_begin(folder: Path, ledger: Ledger, start: Mapping[str, Any], first: int) -> Path | None:
    """Return the newest checkpoint of the run before a step; None if the run can be made again from its beginning."""
    place = Path(start["checkpoints"])
    effective = {number for number, _ in ledger.effective()}
    for path in reversed(list_published(place)):
        found = examine(path)
        if isinstance(found, Checkpoint):
            info = found.manifest.info
            if info.get("run_name") != start["run_name"] or info["global_step"] >= first:
                continue
            written = read_others(path)["parts"].get("features", {}).get("flight_recorder")
            if written is None:  # the ledger was off
                return path
            line = written["line"] - 1
            if line in effective and ledger.chains[line] == written["chain"]:  # not of steps that were made again
                return path
    if any(one["is_resumed"] for one in ledger.starts()[:1]):
        do = 'keep more: Trainer(checkpoint_options={"keep_every": "1 epoch"}), or a file PINNED in a checkpoint'
        _fail(folder, f"no checkpoint before step {first} in {place}", "a checkpoint before this step", do)
    return None


def _run_program(folder: Path, start: Mapping[str, Any], request: Path) -> str:
    """Run the user's program as it was launched, and return what it printed."""
    command, where, environment = build_command(start, f"replay of {folder}")
    environment |= {FIT_VARIABLE: "replay", _REQUEST: str(request)}
    ended = subprocess.run(
        command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return ended.stdout


def _list_losses(ledger: Ledger, again: Ledger, first: int, last: int) -> list[tuple[int, float | None, float | None]]:
    """Return the losses of the windows that both ledgers have, with their steps."""

    def read(line: Mapping[str, Any]) -> float | None:
        return None if line["loss"] is None else float.fromhex(line["loss"])

    now = {step_of(line): line for _, line in again.effective() if "batches" in line}
    recorded = [line for _, line in ledger.effective() if "batches" in line and first <= line["step"] <= last]
    return [(line["step"], read(line), read(now[step_of(line)])) for line in recorded if step_of(line) in now]


def _find_changed_files(program: Mapping[str, str]) -> list[str]:
    changed = []
    for name, digest in program.items():
        try:
            now = xxhash.xxh3_64_hexdigest(Path(name).read_bytes())
        except OSError:
            now = ""
        changed += [name] if now != digest else []
    return changed


def _fail(folder: Path, got: str, expected: str, do: str) -> NoReturn:
    raise fail(ArgumentError, f"replay of {folder}", got=got, expected=expected, do=do)


# ---- In the user's program


class _EndAfter(StatelessCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_update_end(self) -> None:
        if self.state.global_step >= self._step:
            raise Restart  # with no checkpoint to continue from


class _Probe(StatelessCallback):
    def __init__(self, function: Callable[[Any], Any], steps: range) -> None:
        self._function = function
        self._steps = steps

    def on_before_optimizer_step(self) -> None:
        if self.state.global_step + 1 in self._steps:
            self._function(self.trainer)


def _load_probe(probe: str, steps: range) -> Callback:
    file, _, name = probe.rpartition(":")
    found = runpy.run_path(file).get(name)
    if isinstance(found, type) and issubclass(found, Callback):
        return found()
    if not callable(found):
        got = "no such name" if found is None else type(found).__name__
        do = f"def {name}(trainer): ... is called before each requested optimizer step"
        raise fail(ArgumentError, f"--probe {probe}", got=got, expected="a Callback class or a function", do=do)
    return _Probe(found, steps)


def replay_fit(trainer: Any, module: Any, *data: Any, **others: Any) -> NoReturn:
    """Make the requested steps again in a temporary folder, in place of `trainer.fit`, and end the program.

    Processes: collective.
    """
    request = json.loads(Path(os.environ[_REQUEST]).read_text())
    place = Path(request["folder"])
    try:
        again = _build_trainer(trainer, request, place)
        del os.environ[FIT_VARIABLE]
        again.fit(module, *data, **others)
        last, first = again.state.global_step, request["first"]
        if last < first - bool(request["without"]):  # without its samples, the step is skipped
            got = f"nothing left to train after step {last}"
            expected = f"step {first}: only the first fit of a program can be replayed"
            do = "put the other training into another program, or restore epochs and max_steps"
            raise fail(ArgumentError, "the first trainer.fit of the program", got=got, expected=expected, do=do)
    except BaseException as error:
        if isinstance(error, ArgumentError) and str(error).startswith("--"):
            Path(place, _FLAG_FILE).write_text(str(error))
        notes = getattr(error, "__notes__", ())
        with Path(place, _ERROR_FILE).open("a") as file:
            file.write("\n".join([f"{type(error).__name__}: {error}", *notes, ""]))
        raise
    if again.is_main:
        Path(place, "done").touch()
    again.close()
    raise SystemExit(0)


def _build_trainer(trainer: Any, request: Mapping[str, Any], place: Path) -> Any:
    settings = trainer.settings
    if settings.checkpoints.fork is not None:
        from accmt.addons.fork.beginning import find_fork, settings_at

        settings = settings_at(settings, find_fork(settings), request["began"])
    model_path = str(current_folder() / settings.model_folder)
    if model_path != request["model_path"]:
        raise fail(
            ArgumentError,
            "the first trainer.fit of the program",
            got=f"a training of {model_path}",
            expected=f"that of {request['model_path']}: only the first fit of a program can be replayed",
            do="put the other training into another program, or restore the arguments",
        )
    callbacks = [*build_callbacks(settings.running.callbacks), _EndAfter(request["to"])]
    if request["probe"] is not None:
        callbacks.append(_load_probe(request["probe"], range(request["first"], request["to"] + 1)))
    again: Any = copy.copy(trainer)  # a subclass may have another constructor
    again.settings = replace(
        settings,
        saving=replace(settings.saving, model_path=place / "model", model_saving=None, patience=None),
        checkpoints=replace(
            settings.checkpoints,
            checkpoint=place / "checkpoints",
            resume=False,
            checkpoint_every=None,
            checkpointer=None,
            fork=None,
        ),
        tracking=replace(
            settings.tracking,
            logging_dir=str(place / "logs"),
            log_with=None,
            tracker_kwargs={},
            ledger=Examination(
                every=1,
                on_difference="warn",
                folder=str(place),
                first=request["first"],
                last=request["to"],
                examines=request["examines"],
                without=tuple(request["without"]),
                places=tuple(map(tuple, request["places"])) if request["without"] else (),
                export=request["export"],
            ),
        ),
        running=replace(settings.running, seed=request["seed"], callbacks=callbacks, max_time=None),
        handling=replace(settings.handling, handlers=None),
    )
    again.registered_savings = []
    again.chosen_checkpoint = None if request["checkpoint"] is None else Path(request["checkpoint"])
    return again
