"""Find the first step at which two runs diverge, and the likely cause.

Compares the ledgers of two runs step by step. For a single run (the same folder twice), reports repeated steps that
differ. Exit code: 0 identical in all common steps, 1 different, 2 not possible.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accmt.errors import ArgumentError, fail

DIFFERENT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="RUN_A", help="a folder with ledger.jsonl: logs/<track>/<run>")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="another one")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.flight_recorder.compare import RELATIVE_TOLERANCE, compare_runs
    from accmt.addons.flight_recorder.ledger import require_ledger

    if options.first.resolve() == options.second.resolve():
        ledger = require_ledger(options.first, "accmt diff")
        print("RUN_A and RUN_B are the same folder: reporting the steps that were repeated after a resume")
        if not any("step" in line for line in ledger.lines):
            do = "choose a run that has made a step"
            raise fail(
                ArgumentError, f"accmt diff {options.first}", got="a ledger without steps", expected="a step", do=do
            )
        repeated = [line["differs"] for line in ledger.lines if "differs" in line]
        for one in repeated:
            because = f"; changed: {', '.join(one['because'])}" if one["because"] else ""
            print(f"step {one['step']}: {one['what']}{because}")
        if not repeated:
            print(f"no difference after {sum('rewind' in line for line in ledger.lines)} return(s) to a checkpoint")
        return DIFFERENT if repeated else 0
    found = compare_runs(options.first, options.second)
    if found.is_tolerant:
        print(f"numbers of processes differ, so losses are compared to a relative tolerance of {RELATIVE_TOLERANCE:g}")
    if found.difference is None:
        print(f"no difference in {found.num_steps} common steps")
    else:
        what = f"step {found.step}" if found.step else "their start"
        print(f"the runs diverge at {what}: {found.difference}")
        for detail in found.details:
            print(f"  {detail}")
    if found.causes:
        print("differences at the start, most likely cause first:")
        for cause in found.causes:
            print(f"  {cause}")
    if found.others:
        width = max(len(name) for name, _, _ in found.others)
        print("other differences:")
        for name, first, second in found.others:
            print(f"  {name:{width}}  {first}  |  {second}")
    return 0 if found.difference is None else DIFFERENT
