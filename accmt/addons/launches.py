"""`launches.jsonl` in each run folder: how a run was started, one JSON object per start; and how to start it again.

A line has the command, its working folder and environment, and what decides the steps that follow: the optimizer step
at which the run started or resumed, processes, hyper-parameters and arguments of the Trainer.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.errors import ArgumentError, explain, fail
from accmt.files import current_folder, dumps, loads, read_json_lines, write_text
from accmt.messages import warn
from accmt.processes import is_main_process, num_processes
from accmt.registry import ARGUMENTS_VARIABLE
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.secrets import HIDDEN, hide, hide_in_command, hide_text
from accmt.tracking import default_track_name

if TYPE_CHECKING:
    from accmt.options import Settings

LAUNCHES_FILE = "launches.jsonl"
FORK_VARIABLE = "ACCMT_FORK"
"""What `accmt fork` changes, for the program that it starts."""

TRIAL_VARIABLE = "ACCMT_TRIAL"
"""The trial of a sweep that a program is, for the program that `accmt sweep` starts."""

DEBUG_VARIABLE = "ACCMT_DEBUG_LEVEL"
"""What `accmt debug` turns off in the program that it starts."""

_ENVIRONMENT = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "OMP_", "MKL_", "CUBLAS_", "NCCL_", "TORCH_")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM")
_OF_COMMANDS = (ARGUMENTS_VARIABLE, DEBUG_VARIABLE, FORK_VARIABLE, TRIAL_VARIABLE)
_OF_LAUNCH = ("TORCHELASTIC_", "TORCH_NCCL_ASYNC")
_PLACES = {
    "model_path", "checkpoint", "resume", "fork", "logging_dir", "log_with", "run_name", "track_name", "verbose",
    "ledger", "checkpoint_options", "enable_progress_bar", "hps_config", "max_time", "tracker_options",
}  # fmt: skip
"""Arguments that change nothing of what a step computes."""

_NEEDED = {"step", "argv", "cwd", "environment", "processes", "machines", "is_launched", "settings", "hps", "run_name"}
"""What a line has, unless somebody has edited it."""

DECIDE_STEPS = (
    "accelerator", "callbacks", "clip_grad", "collate_fn", "compile", "data_options", "grad_accumulation_steps",
    "gradient_checkpointing", "limit_batches", "mixed_precision", "overfit_batches", "parallelism",
    "reload_dataloaders_every_n_epochs", "same_bits", "sampler", "shuffle_train", "sync_batchnorm", "torch_flags",
)  # fmt: skip
"""Arguments without which a step cannot be made again."""


class LaunchRecord(Feature):
    """Writes the line of this start."""

    name = "launches"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._step = 0

    @classmethod
    def for_run(cls, run: EvaluationRun) -> LaunchRecord | None:
        return cls(run) if isinstance(run, Run) and not run.settings.running.fast_dev_run else None

    def on_start(self) -> None:
        """Note the step at which the run starts."""
        self._step = self._run.state.global_step

    def after_row(self, row: Mapping[str, float]) -> None:
        """Write the line with the first row; before, there is nothing to make again."""
        self._write()

    def before_use(self) -> None:
        """Write the line before the first evaluation or checkpoint, if there was no row."""
        self._write()

    def _write(self) -> None:
        """Write the line, once; a disk that is full or read-only causes a warning."""
        run = self._run
        run.features.drop(self.after_row)
        run.features.drop(self.before_use)
        if not is_main_process():
            return
        path = current_folder() / run.tracking.run_folder / LAUNCHES_FILE
        own = {"time": time.time(), "run_id": run.saver.run_id, "attempt": run.tracking.attempt}
        try:
            lines = [dumps(line) for line in [*_read(path), {**own, **describe_launch(run), "step": self._step}]]
            write_text(path, "\n".join(lines) + "\n")
        except OSError as error:
            expected = "a writable file; training continues without it"
            do = "free disk space, or make the run folder writable; without it, the run cannot be forked"
            warn(explain(str(path), str(error), expected, do))


def describe_launch(run: Run) -> dict[str, Any]:
    """Return how a run was started."""
    settings = run.settings
    names: tuple[str, ...] = _VARIABLES
    if FORK_VARIABLE in os.environ or TRIAL_VARIABLE in os.environ:
        names = (*_VARIABLES, *_OF_COMMANDS)
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name.startswith(_ENVIRONMENT) or name in names) and not name.startswith(_OF_LAUNCH)
    }
    facts: dict[str, Any] = hide(
        {
            "step": run.state.global_step,
            "is_resumed": run.is_resumed,
            "argv": _hide_secrets(sys.orig_argv),
            "cwd": str(_find_start_folder()),
            "environment": environment,
            "processes": num_processes(),
            "machines": num_processes() // int(os.environ.get("LOCAL_WORLD_SIZE", num_processes())),
            "is_launched": "TORCHELASTIC_RUN_ID" in os.environ or "RANK" in os.environ,
            "settings": arguments_of(settings),
            "hps": settings.hps.to_dict()["hps"],
            "seed": run.seed,
            "run_name": run.tracking.run_name,
            "track_name": settings.tracking.track_name or default_track_name(settings.model_folder),
            "run_folder": str(current_folder() / run.tracking.run_folder),
            "model_path": str(current_folder() / settings.model_folder),
            "checkpoints": str(current_folder() / settings.checkpoint_folder),
            "urls": [url for url in (settings.saving.model_url, settings.checkpoints.url) if url is not None],
        }
    )
    return facts


def arguments_of(settings: Settings) -> dict[str, Any]:
    """Return the arguments of a Trainer that are not at their default and may change a result, as JSON values."""
    arguments = {name: value for name, value in settings.to_arguments().items() if name not in _PLACES}
    if settings.checkpoints.checkpoint_options.reset_optimizer_on_resume:
        arguments["checkpoint_options"] = {"reset_optimizer_on_resume": True}
    found: dict[str, Any] = hide(_to_plain(arguments))
    return found


def _to_plain(value: Any) -> Any:
    """Return JSON values; of other objects their class or name, since an address differs in each process."""
    if isinstance(value, Mapping):
        return {str(key): _to_plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def main_file() -> str | None:
    """Return the path of the script, if there is one."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else str(current_folder() / file)


def _hide_secrets(command: Sequence[str]) -> list[str]:
    """Return a Python command without secrets; the interpreter's flags, such as `-m`, are needed to start it again."""
    place = 1
    while place < len(command) and command[place][:2] not in ("-c", "-m") and command[place].startswith("-"):
        place += 2 if command[place] in ("-W", "-X") else 1
    place += 1 if command[place : place + 1] in (["-c"], ["-m"]) else 0
    return [*map(hide_text, command[:place]), *hide_in_command(command[place:])]


def _find_start_folder() -> Path:
    """Return the working folder in which the program was started, also if the program has changed it since."""
    here, main = current_folder(), Path(main_file() or "")
    for argument in sys.orig_argv[1:]:
        script = Path(argument)
        if script.name == main.name and not script.is_absolute() and here / script != main:
            parts = len(script.parts)
            return Path(*main.parts[:-parts]) if main.parts[-parts:] == script.parts else here
    return here


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [line for line in read_json_lines(path) if isinstance(line, dict) and line.keys() >= _NEEDED]
    except FileNotFoundError:
        return []


# ---- Starting a recorded program again


def read_launches(folder: Path) -> list[dict[str, Any]]:
    """Return the starts of a run, with paths where they are now; empty if none was recorded."""
    return [relocate(line, folder) for line in _read(folder / LAUNCHES_FILE)]


def relocate(start: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return how a run was started, with the paths where they are now if its project was moved or copied."""
    moved = find_moved(start.get("run_folder", str(folder)), folder)

    def find(path: str) -> str:
        return now if Path(now := moved(path)).exists() else path

    found = {name: find(start[name]) for name in ("cwd", "checkpoints")}
    is_moved = any(found[name] != start[name] for name in found)
    environment = dict(start["environment"])
    if FORK_VARIABLE in environment:
        request = loads(environment[FORK_VARIABLE])
        run, at, step = request["fork"].rpartition("@")
        request |= {"model_path": moved(request["model_path"]), "fork": f"{find(run)}{at}{step}"}
        environment[FORK_VARIABLE] = dumps(request)
    return {
        **start,
        **found,
        "run_folder": str(folder.absolute()),
        "model_path": moved(start["model_path"]) if is_moved else start["model_path"],
        "argv": [find(argument) if os.sep in argument else argument for argument in start["argv"]],
        "program": {find(name): digest for name, digest in start.get("program", {}).items()},
        "environment": environment,
    }


def build_command(start: Mapping[str, Any], where: str) -> tuple[list[str], Path, dict[str, str]]:
    """Return the command that starts a recorded program again, its working folder and its environment.

    Args:
        start: How it was started.
        where: What starts it again, for the message.

    Raises:
        ArgumentError: It cannot be started again.
    """
    arguments, folder = list(start["argv"][1:]), Path(start["cwd"])
    if not arguments or arguments[0] in ("-c", "-") or "ipykernel" in " ".join(arguments):
        got, expected = "a run in a notebook or an interactive session", "a script that can be started again"
        raise fail(ArgumentError, where, got=got, expected=expected, do="move the training into a script")
    if any(HIDDEN in argument for argument in arguments):
        got = f"a command with values that were not recorded because they may be secrets: {' '.join(arguments)}"
        do = "write a flag of one letter with its long name (--config, not -c), and read secrets from the environment "
        do += "or a file"
        raise fail(ArgumentError, where, got=got, expected="a command that can be started again", do=do)
    if not folder.is_dir():
        got = f"its working directory no longer exists: {folder}"
        raise fail(ArgumentError, where, got=got, expected="the same working directory", do="restore it")
    command = [sys.executable, *arguments]
    if start["is_launched"]:
        launch = ["--standalone", f"--nproc-per-node={start['processes']}", "--no-python"]
        command = [sys.executable, "-m", "torch.distributed.run", *launch, *command]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    return command, folder, {**own, **start["environment"]}


def find_moved(before: str, now: Path) -> Callable[[str], str]:
    """Return a function that maps paths to where they are now, from where one of them was and is.

    The last parts of both are the same; what precedes them has changed, for everything below it.
    """
    old, new = list(Path(before).parts), list(now.absolute().parts)
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    if not old or not new:
        return lambda path: path
    moved_from, moved_to = Path(*old), Path(*new)

    def find(path: str) -> str:
        is_below = Path(path).is_relative_to(moved_from)
        return str(moved_to / Path(path).relative_to(moved_from)) if is_below else path

    return find
