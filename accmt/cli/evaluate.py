"""Evaluate the checkpoints and models of a run beside its training, in another process, on another GPU or machine.

The program of the run is started again as it was launched, and evaluates each checkpoint and each saved model once, as
the run itself would have done at that step. Its rows are added to the history and the trackers of the run. With
--watch, it waits for further ones until the run has ended. It can be killed and started again at any moment. If you
name a model folder, only that model is evaluated. Exit code: that of the program, 2 if nothing can be evaluated.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from accmt.cli.arguments import read_number, require_run
from accmt.errors import ArgumentError, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder of a run, logs/<track>/<run>, or of a saved model")
    parser.add_argument("--watch", action="store_true", help="wait for what is saved later, until the run has ended")
    parser.add_argument(
        "--run",
        dest="run_folder",
        type=Path,
        metavar="RUN_FOLDER",
        help="with a model folder: the run whose program evaluates it; default: the run that saved it",
    )
    parser.add_argument("--save-best", metavar="RULE", help="save the best model: best_valid_loss, best_accuracy ...")
    parser.add_argument(
        "--model-path", type=Path, metavar="FOLDER", help="its folder; default: `evaluated` in the run's model folder"
    )
    processes = "default: as many as the run has"
    parser.add_argument("--processes", type=read_number(at_least=1), metavar="NUMBER", help=processes)
    parser.add_argument(
        "--wait",
        default="10 minutes",
        metavar="TIME",
        help="with --watch, how long to wait for a run that has stopped to be resumed; default: 10 minutes",
    )


def run(options: argparse.Namespace) -> int:
    from accmt.addons.evaluate_beside.program import find_run_of, prepare_evaluation
    from accmt.addons.fork.program import run_program
    from accmt.options.units import read_max_time

    where = f"accmt evaluate {options.folder}"
    if ":/" in str(options.folder):
        got, do = "a URL", "run it where the run folder and the checkpoints are"
        raise fail(ArgumentError, where, got=got, expected="a run folder on this machine", do=do)
    if options.model_path is not None and options.save_best is None:
        raise fail(
            ArgumentError,
            where,
            got="--model-path without --save-best",
            expected="both",
            do="--save-best best_valid_loss",
        )
    run_folder, model = find_run_of(options.folder, options.run_folder, where)
    if model is not None and (options.watch or options.save_best):
        got = f"{'--watch' if options.watch else '--save-best'} with a model folder, which is one model"
        raise fail(ArgumentError, where, got=got, expected="a run folder", do=f"accmt evaluate {run_folder} --watch")
    require_run(run_folder, "evaluate")
    try:
        wait_s = read_max_time(options.wait)
    except ArgumentError:
        got, do = f"--wait {options.wait}", '--wait "10 minutes"'
        raise fail(ArgumentError, where, got=got, expected="a time above 0", do=do) from None
    prepared = prepare_evaluation(
        run_folder,
        watches=options.watch,
        save_best=options.save_best,
        model_path=options.model_path,
        processes=options.processes,
        wait_s=wait_s or 0.0,
        model=model,
    )
    run_program(*prepared, called=["accmt", *sys.argv[1:]])
    raise AssertionError
