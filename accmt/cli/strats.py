"""List what `accmt launch --strat` takes."""

from __future__ import annotations

import argparse

STRATEGIES = {
    "single": "one process, started without a launcher",
    "ddp": "DistributedDataParallel: each process has the whole model, and gradients are averaged",
    "fsdp2": "FSDP2: each process has a part of the model, which may be larger than one GPU",
    "hsdp": "FSDP2 within groups of processes (--replicate), and gradients averaged between them",
    "tp": "tensor parallelism: --tp processes split each layer, and FSDP2 shards over the others",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add none."""


def run(options: argparse.Namespace) -> int:
    width = max(map(len, STRATEGIES))
    print("\n".join(f"{name:<{width}}  {purpose}" for name, purpose in STRATEGIES.items()))
    print("\nDeepSpeed, Megatron-LM, XLA and the first version of FSDP are not supported: such a launch is an error.")
    return 0
