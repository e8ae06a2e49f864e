"""Replay steps of a run in a temporary folder, and compare them with its ledger.

The program starts as it was launched, from the newest checkpoint before the step, or from the beginning if there is
none. For the requested steps, samples and layers are ranked by their gradients. The run's folders do not change. Exit
code: 0 bit-for-bit identical, 1 different, 2 not possible.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accmt.cli.arguments import read_number

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, help="the folder with ledger.jsonl: logs/<track>/<run>")
    from_1, last = read_number(at_least=1), "the last step to replay; default: --step"
    parser.add_argument("--step", type=from_1, required=True, metavar="NUMBER", help="the optimizer step, from 1")
    parser.add_argument("--to", type=from_1, metavar="NUMBER", help=last)
    shown = "samples and layers to show; 0: none"
    parser.add_argument("--top", type=read_number(at_least=0), default=5, metavar="NUMBER", help=shown)
    parser.add_argument(
        "--without", type=_read_numbers, default=(), metavar="17,23", help="samples to leave out of the step"
    )
    number = "with same_bits: replay on this many processes; default: as many as the run had"
    parser.add_argument("--processes", type=from_1, metavar="NUMBER", help=number)
    parser.add_argument("--probe", metavar="FILE.py:NAME", help="a Callback class, or a function of the Trainer")
    parser.add_argument(
        "--export", type=Path, metavar="STEP.pt", help="write batches, weights and gradients of the step"
    )


def run(options: argparse.Namespace) -> int:
    from accmt.addons.flight_recorder.replay import replay

    found = replay(
        options.run_folder,
        options.step,
        options.to,
        without=options.without,
        probe=options.probe,
        export=options.export,
        examines=options.top > 0,
        processes=options.processes,
    )
    if options.probe is not None and found.output.strip():
        print(found.output.rstrip(), end="\n\n")
    print(found.describe(top=options.top))
    return 0 if found.is_identical else DIFFERENT


def _read_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of samples, such as 17,23") from None
