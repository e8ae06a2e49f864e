"""Start a training script as `accmt launch` does, with parts of its Trainers turned off.

The script itself does not change. Level 1 logs to no tracker; 2 also compiles nothing; 3 also saves no model and no
checkpoint, and does not resume; 4 also skips the evaluation at the start; 5 also skips all others.
Exit code: as `accmt launch`.
"""

from __future__ import annotations

import argparse

from accmt.cli import launch
from accmt.registry import ARGUMENTS_VARIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    level = "how much is turned off; default: 3"
    parser.add_argument("--level", "-L", "-l", type=int, default=3, choices=range(1, 6), help=level)
    launch.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    from accmt.addons.launches import DEBUG_VARIABLE

    options.environment = {ARGUMENTS_VARIABLE: "debug_arguments", DEBUG_VARIABLE: str(options.level)}
    return launch.run(options)
