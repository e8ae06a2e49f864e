"""Print how a run spent its time, over all its starts: training, evaluating, waiting, saving, interruptions.

The run may still be running. Exit code: 0 success, 2 there are no records.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accmt.errors import ArgumentError


def _price(text: str) -> float:
    from accmt.options import Monitor

    try:
        price = float(text)
        Monitor(price_per_hour=price)
    except (ValueError, ArgumentError):
        raise argparse.ArgumentTypeError(f"expected a price, a number from 0 such as 2.5, got {text!r}") from None
    return price


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", type=Path, help="the folder of a run, logs/<track>/<run>")
    parser.add_argument(
        "--price-per-hour",
        type=_price,
        metavar="PRICE",
        help="price of one hour on all machines; default: the `price_per_hour` of the run",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.goodput.records import require_goodput
    from accmt.files import dumps

    totals = require_goodput(options.run_folder)
    price = totals.price_per_hour if options.price_per_hour is None else options.price_per_hour
    if options.json:
        print(dumps({**totals.to_dict(), "total": totals.total_s, "goodput": totals.goodput, "price_per_hour": price}))
    else:
        print(totals.describe(price))
    return 0
