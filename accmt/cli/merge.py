"""Merge the adapter in a folder into its model, and write the whole model, which transformers loads alone.

The model is read as it lies on disk, not quantized, and the adapter is added to its full weights. A tokenizer beside
the adapter is written, too. The adapter stays as it is. Exit code: 0 written, 2 not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accmt.errors import ArgumentError, explain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, help="the folder of an adapter, as PEFT or a Trainer wrote it")
    parser.add_argument("output", type=Path, help="the folder to write; made if it is missing")
    kind = "class of the model in transformers; left out: the one for the adapter's task"
    parser.add_argument("--type", metavar="CLASS", help=kind)
    parser.add_argument("--dtype", metavar="DTYPE", help="such as bfloat16; left out: that of the model on disk")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights in a folder that is not empty")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.merging import merge_adapter

    where = f"accmt merge ... {options.output}"
    if options.output.resolve() == options.adapter.resolve():
        raise ArgumentError(explain(where, "the folder of the adapter", "another folder", "out/merged"))
    if not options.overwrite and options.output.is_dir() and any(options.output.iterdir()):
        do = "choose another, or add --overwrite: its weights are replaced, other files stay"
        raise ArgumentError(explain(where, "a folder with files in it", "a new or empty folder", do))
    arguments = {} if options.dtype is None else {"dtype": options.dtype}
    merge_adapter(options.adapter, options.output, options.type, **arguments)
    print(f"{options.output}: a whole model, for transformers")
    return 0
