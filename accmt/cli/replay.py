"""Replay steps of a run in a temporary folder, and compare them with its ledger.

The program starts as it was launched, from the newest checkpoint before the step, or from the beginning if there is
none. The run's folders do not change. Exit code: 0 bit-for-bit identical, 1 different, 2 not possible.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, help="the folder with ledger.jsonl: logs/<track>/<run>")
    parser.add_argument("--step", type=int, required=True, metavar="NUMBER", help="the optimizer step, from 1")
    parser.add_argument("--to", type=int, metavar="NUMBER", help="the last step to replay; default: --step")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.flight_recorder.replay import replay

    found = replay(options.run_folder, options.step, options.step if options.to is None else options.to)
    for change in found.changes:
        print(f"changed since: {change}")
    print(f"replayed from {found.begin}; {found.num_compared} lines of the ledger compared")
    print("bit-for-bit identical" if found.difference is None else f"different: {found.difference}")
    return 0 if found.difference is None else DIFFERENT
