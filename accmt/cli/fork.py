"""Start a new run that continues another one from a step, with changed settings.

The program of the run is started again as it was launched. The fork has its own name, model folder, checkpoints and
logs; nothing of the run changes, which may still be running. The same command again resumes the fork. Hyper-parameters
are changed with --hps.<key>, arguments of the Trainer with their flags; paths are relative to the program's folder.
Exit code: that of the program, 2 if the fork is not possible.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from accmt.cli.arguments import add_when_parsed, require_run
from accmt.errors import ArgumentError, fail

_WITHOUT = ("hps_config", "fork", "resume", "run_name", "seed", "fast_dev_run", "overfit_batches")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, help="the folder of the run: logs/<track>/<run>")
    parser.add_argument("--at", type=int, required=True, metavar="STEP", help="the step up to which both are the same")
    parser.add_argument("--run-name", "--run_name", metavar="NAME", help="its name; default: <run>-at-<step>")
    add_when_parsed(parser, _add_flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from accmt.addons.command_line import add_flags

    add_flags(parser, without=_WITHOUT)


def run(options: argparse.Namespace) -> int:
    from accmt.addons.command_line import HPS_FLAGS, list_flags
    from accmt.addons.fork.program import prepare_fork, run_program

    if ":/" in str(options.run_folder):
        got, do = "a URL", "copy the run folder and its checkpoints to this machine"
        raise fail(
            ArgumentError, f"accmt fork {options.run_folder}", got=got, expected="a run folder on this machine", do=do
        )
    require_run(options.run_folder, "fork")
    names = {flag.name for flag in list_flags()} - set(_WITHOUT)
    prepared = prepare_fork(
        options.run_folder,
        options.at,
        run_name=options.run_name,
        hps=getattr(options, HPS_FLAGS, None),
        arguments={name: value for name, value in vars(options).items() if name in names},
    )
    run_program(*prepared, called=["accmt", *sys.argv[1:]])
    raise AssertionError
