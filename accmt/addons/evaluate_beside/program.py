"""Starts a run's program again, as it was launched, so that its Trainer evaluates instead of training."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from accmt.addons.evaluate_beside.published import find_models
from accmt.addons.launches import build_command, read_launches
from accmt.addons.run_folders import find_run_folders
from accmt.errors import ArgumentError, fail
from accmt.files import dumps, loads
from accmt.registry import FIT_VARIABLE
from accmt.saving import RUN_KEY, read_status
from accmt.saving.weights import find_entry
from accmt.tracking.history import EVALUATIONS_FOLDER, HISTORY_FILE

REQUEST_VARIABLE = "ACCMT_EVALUATE"
"""What `accmt evaluate` asks for, for the program that it starts."""

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Request:
    """What to evaluate.

    Attributes:
        run_folder: The folder of the run.
        run_name: Its name, as its checkpoints have it.
        track_name: The name of its project in trackers.
        checkpoints: The folder of its checkpoints.
        run_model_path: The model folder in the program, by which its Trainer is found.
        model_path: The folder of the best model.
        save_best: The rule by which the best model is saved; None saves none.
        watches: Whether to wait for further checkpoints until the run has ended.
        wait_s: How long to wait for a run that has stopped before it was complete, which may be resumed.
        model: The only model to evaluate; None evaluates the checkpoints and models of the run.
        seed: The seed of the run, which a model folder does not have.
    """

    run_folder: str
    run_name: str
    track_name: str
    checkpoints: str
    run_model_path: str
    model_path: str
    save_best: str | None
    watches: bool
    wait_s: float
    model: str | None = None
    seed: int | None = None

    @classmethod
    def read(cls) -> Request:
        """Return the request for this program."""
        return cls(**loads(os.environ[REQUEST_VARIABLE]))


def find_run_of(folder: Path, run: Path | None, where: str) -> tuple[Path, Path | None]:
    """Return the run folder, and the model to evaluate if a folder is one.

    Args:
        folder: A run folder or a model folder.
        run: The run whose program evaluates the model; None is the run that saved it.
        where: The command, for messages.

    Raises:
        ArgumentError: The run of a model is not known, or a run is named for something else.
    """
    is_run = (folder / HISTORY_FILE).is_file()
    if is_run or find_entry(folder) is None:
        inside = [] if is_run or find_run_folders(folder) else find_models(folder, without=Path())
        if inside:
            got, do = (
                "a folder of models, without one of its own",
                f"accmt evaluate {min(one.folder for one in inside)}",
            )
            raise fail(ArgumentError, where, got=got, expected="the folder of a run or of one model", do=do)
        if run is not None:
            got, do = "--run with a folder that is no model", f"accmt evaluate {run}"
            raise fail(
                ArgumentError, where, got=got, expected="a model folder, and the run whose program evaluates it", do=do
            )
        return folder, None
    if run is not None:
        return run, folder
    try:
        saved_by = read_status(folder)["run_folder"]
    except (OSError, ValueError, KeyError, TypeError):
        saved_by = None
    own = None if saved_by is None else Path(os.path.normpath(folder.absolute() / saved_by))
    if own is not None and own.name == EVALUATIONS_FOLDER:  # the best model of earlier evaluations beside the run
        own = own.parent
    if own is None or not (own / HISTORY_FILE).is_file():
        got = "a model folder that names no run" if own is None else f"a model whose run folder is not there: {own}"
        expected = "a run, whose program has the data and metrics"
        raise fail(
            ArgumentError, where, got=got, expected=expected, do=f"accmt evaluate {folder} --run logs/<track>/<run>"
        )
    return own, folder


def prepare_evaluation(
    folder: Path,
    *,
    watches: bool = False,
    save_best: str | None = None,
    model_path: Path | None = None,
    processes: int | None = None,
    wait_s: float = 600.0,
    model: Path | None = None,
) -> tuple[list[str], Path, dict[str, str]]:
    """Return the command that evaluates the checkpoints and models of a run, its working folder and its environment.

    Args:
        folder: The run folder.
        watches: Whether to wait for further checkpoints until the run has ended.
        save_best: A rule as in `Trainer(model_saving=...)`; None saves no model.
        model_path: The folder of the best model; None is `evaluated` in the run's model folder.
        processes: The number of processes; None is that of the run.
        wait_s: How long to wait for a run that has stopped before it was complete.
        model: The only model to evaluate; None evaluates the checkpoints and models of the run.

    Raises:
        ArgumentError: The run has no checkpoints and models here, or its program cannot be started again.
    """
    folder, where = folder.absolute(), f"evaluation of {folder}"
    launches = read_launches(folder)
    if not launches:
        got = "a run whose start is not recorded: there is no launches.jsonl in it"
        do = "resume it once with this version of accmt, which writes that file"
        raise fail(ArgumentError, where, got=got, expected="a run that this version of accmt has started", do=do)
    start = launches[-1]
    if RUN_KEY not in start:
        got, do = "a run that an older version of accmt has started", "resume it once with this version of accmt"
        raise fail(ArgumentError, where, got=got, expected="a run that this version of accmt has started", do=do)
    place = Path(start["checkpoints"])
    if model is None and not (watches or find_models(Path(start["model_path"]), without=Path())):
        settings = start["settings"]
        if "checkpointer" in settings:
            got = f"checkpoints in a {settings['checkpointer']}"
            _fail(where, got, "without `checkpointer`, runs write to a folder")
        if settings.get("checkpoint_every", "epoch") is None:
            _fail(where, "a run without checkpoints, and no saved model", 'Trainer(checkpoint_every="500 steps")')
        if not place.parent.is_dir():
            _fail(where, f"no such folder: {place}", "run it on the machine of the run, or share the disk")
    if start["machines"] > 1 and processes is None:
        got = f"a run on {start['machines']} machines"
        raise fail(
            ArgumentError, where, got=got, expected="the number of processes on this machine", do="--processes 1"
        )
    number = start["processes"] if processes is None else processes
    is_launched = start["is_launched"] if number == start["processes"] else number > 1
    again = {**start, "processes": number, "is_launched": is_launched}
    command, cwd, environment = build_command(again, where)
    request = Request(
        run_folder=str(folder),
        run_name=start["run_name"],
        track_name=start["track_name"],
        checkpoints=str(place),
        run_model_path=start["model_path"],
        model_path=str(Path(start["model_path"], "evaluated") if model_path is None else model_path.absolute()),
        save_best=save_best,
        watches=watches,
        wait_s=wait_s,
        model=None if model is None else str(model.absolute()),
        seed=start.get("seed"),
    )
    environment = {name: value for name, value in environment.items() if name != _GPUS}
    if _GPUS in os.environ:  # another GPU than that of the run
        environment[_GPUS] = os.environ[_GPUS]
    return command, cwd, {**environment, FIT_VARIABLE: "evaluate", REQUEST_VARIABLE: dumps(asdict(request))}


def _fail(where: str, got: str, do: str) -> NoReturn:
    raise fail(ArgumentError, where, got=got, expected="checkpoints or models on this machine", do=do)
