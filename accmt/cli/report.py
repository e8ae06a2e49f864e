"""Write an HTML page about one run, or one that compares several runs.

The page is self-contained: curves with zoom and log scale, evaluations, time per phase, machine utilization, the
configuration with differences, checkpoints and failures. Any browser can open it, without a network connection.
The page about a single run includes its forks and the runs that it is a fork of; each fork is drawn from its step on.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="a run folder")
    parser.add_argument("--alone", action="store_true", help="without the forks and the parents of a run")
    parser.add_argument("-o", "--output", type=Path, help="the HTML file; default: report.html in the first run folder")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.fork.lineage import family_of
    from accmt.addons.report import name_apart, read_run, write_report
    from accmt.cli.arguments import require_run

    for folder in options.folders:
        require_run(folder, "report")
    path = options.output or options.folders[0] / "report.html"
    is_alone = options.alone or len(options.folders) > 1
    folders = options.folders if is_alone else family_of(options.folders[0])
    write_report(name_apart([read_run(folder) for folder in folders]), path)
    print(path)
    return 0
