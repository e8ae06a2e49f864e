"""List the strategies for `accmt launch --strat`."""

from __future__ import annotations

import argparse

from accmt.cli.former import FormerFlag

STRATEGIES = {
    "single": "one process, without a launcher",
    "ddp": "DistributedDataParallel: each process has a full copy of the model, and gradients are averaged",
    "fsdp2": "FSDP2: each process has a shard of the model, which may be larger than one GPU",
    "hsdp": "FSDP2 within groups of processes (--replicate), and gradients averaged between them",
    "tp": "tensor parallelism: --tp processes split each layer, and FSDP2 shards over the others",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    line = "accmt strats, which lists all five"
    parser.add_argument("--ddp", "--fsdp", "--deepspeed", action=FormerFlag, nargs=0, const=line)


def run(options: argparse.Namespace) -> int:
    width = max(map(len, STRATEGIES))
    print("\n".join(f"{name:<{width}}  {purpose}" for name, purpose in STRATEGIES.items()))
    print("\nDeepSpeed, Megatron-LM, XLA and FSDP1 are not supported: launching with them raises an error.")
    return 0
