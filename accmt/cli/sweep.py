"""Search hyper-parameters with a training script, which runs as it is.

    accmt sweep sweep.yaml -- python train.py
    accmt sweep sweep.yaml --parallel 2 -- accmt launch -N 2 train.py

Whatever is killed, the same command continues the sweep: finished trials stay, and interrupted ones resume from their
checkpoints. Exit code: 0 the budget is spent, 1 the sweep ended because trials failed, 2 wrong usage, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
from pathlib import Path

FAILED = 1
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "accmt sweep SWEEP.yaml [--parallel NUMBER] -- COMMAND ..."
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="search space, objective and budget")
    parser.add_argument("--parallel", type=int, metavar="NUMBER", help="trials at a time; default: that of the file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="starts the training script")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.sweep.table import write_table
    from accmt.addons.sweep.worker import Sweep
    from accmt.errors import ArgumentError, explain

    sweep = Sweep.from_yaml(options.sweep, **({} if options.parallel is None else {"parallel": options.parallel}))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        do = f"accmt sweep {options.sweep} -- python train.py"
        raise ArgumentError(explain("accmt sweep", "no command", "the command that starts the training script", do))
    try:
        result = sweep.run(command)
    except KeyboardInterrupt as stopped:
        print(stopped)
        return INTERRUPTED
    print(write_table(result))
    if result.why is not None:
        print(result.why)
        return FAILED
    return 0
