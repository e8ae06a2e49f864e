"""Write an HTML page about one run, or one that compares several runs.

The page is self-contained: curves with zoom and log scale, evaluations, time per phase, machine utilization, the
configuration with differences, checkpoints and failures. Any browser can open it, without a network connection.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="a run folder")
    parser.add_argument("-o", "--output", type=Path, help="the HTML file; default: report.html in the first run folder")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.report import name_apart, read_run, write_report
    from accmt.cli.arguments import require_run

    for folder in options.folders:
        require_run(folder, "report")
    path = options.output or options.folders[0] / "report.html"
    write_report(name_apart([read_run(folder) for folder in options.folders]), path)
    print(path)
    return 0
