"""Write one HTML page about a run, or about several over one another.

The page holds everything: curves with zoom and log scale, evaluations, what the time was spent on, use of the machine,
the configuration with its differences, checkpoints and failures. It is opened in any browser, without a network.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_FOLDER", help="the folder of a run")
    parser.add_argument("-o", "--output", type=Path, help="the page; report.html in the first run folder by default")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.report import name_apart, read_run, write_report
    from accmt.cli.arguments import require_run

    for folder in options.folders:
        require_run(folder, "report")
    path = options.output or options.folders[0] / "report.html"
    write_report(name_apart([read_run(folder) for folder in options.folders]), path)
    print(path)
    return 0
