"""Starts a run's program again, as it was launched, so that its Trainer makes a fork.

`accmt fork` puts its request into the environment. The Trainer whose model folder is the run's takes the changed
settings when it is created, so that what the program builds from them is built with the new values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accmt.addons.command_line import read_config
from accmt.addons.fork.beginning import ChangedFork, Parent
from accmt.addons.fork.lineage import read_origin
from accmt.addons.launches import FORK_VARIABLE, build_command
from accmt.errors import ArgumentError, HyperParameterError, fail
from accmt.files import current_folder, dumps, loads
from accmt.options import HyperParameters, Settings
from accmt.options.changes import compare, require_allowed
from accmt.options.settings import apply_trials
from accmt.registry import ARGUMENTS_VARIABLE, FIT_VARIABLE, PROGRAM_VARIABLE
from accmt.secrets import hide, write_command

_PLACES = ("model_path", "checkpoint", "logging_dir", "track_name")


def prepare_fork(
    folder: Path,
    step: int,
    *,
    run_name: str | None = None,
    hps: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> tuple[list[str], Path, dict[str, str]]:
    """Check a request for a fork, and return the command that makes it, its working folder and its environment.

    Args:
        folder: The run folder of the parent.
        step: The step at which the fork begins.
        run_name: The name of the fork; None derives one from the parent's.
        hps: Changed hyper-parameters by dotted key.
        arguments: Changed arguments of the Trainer.

    Raises:
        ArgumentError: There is no such run or step, or its program cannot be started again.
        HyperParameterError: A change is invalid, or rejected.
    """
    folder, hps, arguments = folder.absolute(), dict(hps or {}), dict(arguments or {})
    parent = Parent.find(folder, step)
    _, manifest = parent.choose_checkpoint(step)
    recorded = parent.hps_at(manifest, step)
    try:  # to check the changes before the program starts
        old = HyperParameters.from_config({"hps": recorded})
    except HyperParameterError:  # they name classes that only the program knows
        pass
    else:
        new = HyperParameters.from_config(old, hps)
        resets = bool((arguments.get("checkpoint_options") or {}).get("reset_optimizer_on_resume"))
        changes = compare(recorded, hide(new.to_dict()["hps"]), resets_optimizer=resets)
        require_allowed(changes, parent.where)
    start = parent.start_before(step)
    if start["machines"] > 1:
        got = f"a run on {start['machines']} machines"
        do = f'pass Trainer(fork="{folder}@{step}") in the program, and launch it on the machines'
        parent.fail(got, "a run on one machine, which this command can start again", do)
    command, where, environment = build_command(start, parent.where)
    origin, before = read_origin(folder), start["environment"].get(FORK_VARIABLE)
    if before is not None:  # the parent is a fork itself: its changes stay
        earlier = loads(before)
        hps, arguments = {**earlier["hps"], **hps}, {**_without_places(earlier["arguments"]), **arguments}
    request = {
        "model_path": start["model_path"] if origin is None else origin.model_path,
        "fork": f"{folder}@{step}",
        "run_name": run_name,
        "hps": hps,
        "arguments": arguments,
    }
    own = {FORK_VARIABLE: dumps(request), ARGUMENTS_VARIABLE: "fork_arguments", FIT_VARIABLE: "fork"}
    return command, where, {**environment, **own}


def run_program(command: list[str], folder: Path, environment: Mapping[str, str], called: Sequence[str]) -> None:
    """Become the program.

    Args:
        called: The command line that asked for it.
    """
    os.chdir(folder)
    os.execvpe(command[0], command, {**environment, PROGRAM_VARIABLE: f"`{write_command(called)}`"})  # noqa: S606


def _without_places(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in _PLACES}


# ---- In the program


def change_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the fork for the Trainer of the run, and those of other Trainers unchanged."""
    request, own = loads(os.environ[FORK_VARIABLE]), dict(arguments)
    if str(current_folder() / _read(own).model_folder) != request["model_path"]:
        return own
    changes = read_config(request["arguments"])
    own.update({name: value for name, value in changes.items() if name in _PLACES})
    own.update(run_name=request["run_name"], resume=False, fork=request["fork"])
    fork = ChangedFork(request["fork"])
    fork.unchanged = _read(own)
    own.update(_without_places(changes), fork=fork)
    if request["hps"]:
        own["hps_config"] = HyperParameters.from_config(own["hps_config"], request["hps"])
    return own


def _read(arguments: Mapping[str, Any]) -> Settings:
    return apply_trials(Settings.from_arguments({**arguments, "tracker_kwargs": {}}))


def fork_fit(trainer: Any, module: Any, *data: Any, **others: Any) -> Any:
    """Train the fork in place of the program's first `trainer.fit`."""
    if trainer.settings.checkpoints.fork is None:
        request = loads(os.environ[FORK_VARIABLE])
        got = f"a training of {current_folder() / trainer.settings.model_folder}"
        expected = f"that of {request['model_path']}: only the first fit of a program can be forked"
        do = "put the other training into another program, or restore the arguments"
        raise fail(ArgumentError, "the first trainer.fit of the program", got=got, expected=expected, do=do)
    del os.environ[FIT_VARIABLE]
    return trainer.fit(module, *data, **others)
