"""Search hyper-parameters with a training script, which runs as it is.

    accmt sweep sweep.yaml -- python train.py
    accmt sweep sweep.yaml --parallel 2 -- accmt launch -N 2 train.py

Whatever is killed, the same command continues the sweep: finished trials stay, and interrupted ones resume from their
checkpoints. Exit code: 0 the budget is spent, 1 the sweep ended because trials failed or none has a value, 2 wrong
usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

FAILED = 1
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "accmt sweep SWEEP.yaml [--parallel NUMBER] -- COMMAND ...\n       accmt sweep SWEEP.yaml --report"
    parser.add_argument("sweep", type=Path, metavar="SWEEP.yaml", help="search space, objective and budget")
    parser.add_argument("--parallel", type=int, metavar="NUMBER", help="trials at a time; default: that of the file")
    parser.add_argument("--report", action="store_true", help="write an HTML page about the trials, and run nothing")
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:  # argparse has no rest after other flags
        given = sys.argv[1:] if args is None else list(args)
        end = given.index("--") if "--" in given else len(given)
        parsed, unknown = parse(given[:end], namespace)
        parsed.command = given[end + 1 :]
        return parsed, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(options: argparse.Namespace) -> int:
    from accmt.addons.sweep.results import Lines, LiveTable, write_table
    from accmt.addons.sweep.worker import Sweep
    from accmt.errors import ArgumentError, fail

    sweep = Sweep.from_yaml(options.sweep, **({} if options.parallel is None else {"parallel": options.parallel}))
    if options.report:
        print(sweep.report())
        return 0
    if not options.command:
        do = f"accmt sweep {options.sweep} -- python train.py"
        raise fail(
            ArgumentError,
            "accmt sweep",
            got="no command",
            expected="the command that starts the training script",
            do=do,
        )
    try:
        result = sweep.run(options.command, view=LiveTable() if sys.stderr.isatty() else Lines())
    except KeyboardInterrupt as stopped:
        print(stopped)
        return INTERRUPTED
    print(write_table(result))
    if result.why is not None or result.best is None:
        print(result.why or "no trial ended with a value")
        return FAILED
    return 0
