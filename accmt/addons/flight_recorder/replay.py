"""Makes steps of a finished run again, in a temporary folder, and compares them with its ledger.

`accmt replay` starts the user's program as it was launched. `Trainer.fit` then calls `replay_fit` in place of training.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import xxhash

from accmt.addons.flight_recorder.ledger import LEDGER_FILE, Ledger, find_difference, read_ledger, require_ledger
from accmt.callbacks import Callback, build_callbacks
from accmt.checkpoint.manifest import Checkpoint, examine
from accmt.checkpoint.retention import list_published
from accmt.errors import ArgumentError, explain
from accmt.files import current_folder, dumps
from accmt.options import Ledger as LedgerOptions
from accmt.recovery.restart import Restart
from accmt.trainer.trainer import FIT_VARIABLE

_REQUEST = "ACCMT_REPLAY"
_LAST_LINES = 20


@dataclass(frozen=True)
class Replayed:
    """What came of a replay.

    Attributes:
        begin: Where it began.
        changes: Files of the program that have changed since.
        num_compared: Lines of the ledger that were compared.
        difference: The first difference, with its step; None if all is bit-for-bit identical.
    """

    begin: str
    changes: list[str]
    num_compared: int
    difference: str | None


def replay(folder: Path, first: int, last: int) -> Replayed:
    """Make the steps from a checkpoint to `last` again, and compare them with the ledger.

    Raises:
        ArgumentError: They cannot be made again.
    """
    ledger = require_ledger(folder, "replay of")
    windows = [(number, line) for number, line in ledger.effective() if "batches" in line]
    steps = [line["step"] for _, line in windows]
    if first not in steps or last not in steps or last < first:
        got = f"--step {first} --to {last}" if last != first else f"--step {first}"
        recorded = f"{min(steps)} to {max(steps)}" if steps else "none"
        _fail(folder, got, f"steps in the ledger: {recorded}", "choose one of these steps")
    start = ledger.start_of(next(number for number, line in windows if line["step"] == first))
    checkpoint, seed = _find_begin(folder, ledger, start, first), start["seed"]
    with tempfile.TemporaryDirectory(prefix="accmt-replay-") as place:
        request = {"checkpoint": str(checkpoint) if checkpoint else None, "to": last, "seed": seed, "folder": place}
        path = Path(place) / "request.json"
        path.write_text(dumps({**request, "model_path": start["model_path"]}))
        output = _run_program(folder, start, path)
        found = list(Path(place).rglob(LEDGER_FILE))
        if not found or not Path(place, "done").exists():
            shown = "\n".join(output.splitlines()[-_LAST_LINES:])
            _fail(
                folder,
                f"the program did not reach step {last}:\n{shown}",
                "a program that repeats the run",
                "see its output above",
            )
        again = read_ledger(found[0])
    begin = f"the checkpoint of {checkpoint.name}" if checkpoint else "the beginning"
    num_compared, difference = _compare(ledger, again, start["tensors"], last)
    return Replayed(begin, _find_changed_files(start["program"]), num_compared, difference)


def _find_begin(folder: Path, ledger: Ledger, start: Mapping[str, Any], first: int) -> Path | None:
    """Return the newest checkpoint of the run before a step; None if the run can be made again from its beginning."""
    place = Path(start["checkpoints"])
    for path in reversed(list_published(place)):
        found = examine(path)
        if isinstance(found, Checkpoint):
            info = found.manifest.info
            if info.get("run_name") == start["run_name"] and info["global_step"] < first:
                return path
    if any(one["is_resumed"] for one in ledger.starts()[:1]):
        do = 'keep more checkpoints: Trainer(checkpoint_options={"max_checkpoints": 10}); or name one PINNED'
        _fail(folder, f"no checkpoint before step {first} in {place}", "a checkpoint before this step", do)
    return None


def _run_program(folder: Path, start: Mapping[str, Any], request: Path) -> str:
    """Run the user's program as it was launched, and return what it printed."""
    arguments, where = list(start["argv"][1:]), Path(start["cwd"])
    if not arguments or arguments[0] in ("-c", "-") or "ipykernel" in " ".join(arguments):
        got = "a run in a notebook or an interactive session"
        _fail(folder, got, "a script that can be started again", "move the training into a script")
    if not where.is_dir():
        _fail(folder, f"its working directory no longer exists: {where}", "the same working directory", "restore it")
    command = [sys.executable, *arguments]
    if start["is_launched"]:
        launch = ["--standalone", f"--nproc-per-node={start['processes']}", "--no-python"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *command]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    environment = {**own, **start["environment"], FIT_VARIABLE: "replay", _REQUEST: str(request)}
    ended = subprocess.run(
        command, cwd=where, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return ended.stdout


def _compare(ledger: Ledger, again: Ledger, names: Sequence[str], last: int) -> tuple[int, str | None]:
    """Compare the lines that both ledgers have, in order."""
    recorded = {key: line for _, line in ledger.effective() if (key := _key(line)) is not None}
    num_compared = 0
    for _, line in again.effective():
        before = recorded.get(_key(line) or ()) if line.get("step", last + 1) <= last else None
        if before is None:
            continue
        num_compared += 1
        found = find_difference(before, line, names, ("recorded", "now"))
        if found is not None:
            return num_compared, f"step {line['step']}: {found}"
    return num_compared, None


def _key(line: Mapping[str, Any]) -> tuple[Any, ...] | None:
    if "sums" in line:
        return "sums", line["step"]
    return ("window", line["epoch"], line["batches"][0]) if "batches" in line else None


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
    raise ArgumentError(explain(f"replay of {folder}", got, expected, do))


# ---- In the user's program


class _EndAfter(Callback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_update_end(self) -> None:
        if self.state.global_step >= self._step:
            raise Restart  # with no checkpoint to continue from


def replay_fit(trainer: Any, module: Any, *data: Any, **others: Any) -> NoReturn:
    """Make the requested steps again in a temporary folder, in place of `trainer.fit`, and end the program.

    Processes: collective.
    """
    request = json.loads(Path(os.environ[_REQUEST]).read_text())
    place, settings = Path(request["folder"]), trainer.settings
    model_path = str(current_folder() / settings.model_folder)
    if model_path != request["model_path"]:
        raise SystemExit(f"the program first trains another model, {model_path}: only its first fit can be replayed")
    callbacks = [*build_callbacks(settings.running.callbacks), _EndAfter(request["to"])]
    again: Any = copy.copy(trainer)  # a subclass may have another constructor
    again.settings = replace(
        settings,
        saving=replace(settings.saving, model_path=place / "model", model_saving=None, save_last=False, patience=None),
        checkpoints=replace(
            settings.checkpoints,
            checkpoint=place / "checkpoints",
            resume=False,
            checkpoint_every=None,
            checkpointer=None,
        ),
        tracking=replace(
            settings.tracking,
            logging_dir=str(place / "logs"),
            log_with=None,
            tracker_kwargs={},
            ledger=LedgerOptions(every=1, on_difference="warn"),
        ),
        running=replace(settings.running, seed=request["seed"], callbacks=callbacks, max_time=None),
        handling=replace(settings.handling, handlers=None),
    )
    again.registered_savings = []
    again.chosen_checkpoint = None if request["checkpoint"] is None else Path(request["checkpoint"])
    del os.environ[FIT_VARIABLE]
    again.fit(module, *data, **others)
    if again.is_main and again.state.global_step >= request["to"]:
        Path(place, "done").touch()
    again.close()
    raise SystemExit(0)
