"""List what `accmt launch --strat` takes."""

from __future__ import annotations

import argparse

STRATEGIES = {
    "single": "one process, started without a launcher",
    "ddp": "DistributedDataParallel: each process has the whole model, and gradients are averaged",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add none."""


def run(options: argparse.Namespace) -> int:
    width = max(map(len, STRATEGIES))
    print("\n".join(f"{name:<{width}}  {purpose}" for name, purpose in STRATEGIES.items()))
    print("\nFSDP, DeepSpeed, Megatron-LM and XLA are not supported yet: a run launched with them ends with an error.")
    return 0
