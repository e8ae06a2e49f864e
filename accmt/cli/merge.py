"""Merge an adapter into its base model, and write the full model, which transformers can load without PEFT.

The base model is loaded without quantization, and the adapter is added to its full weights. A tokenizer next to the
adapter is copied. The adapter is not changed. Exit code: 0 written, 2 not.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from accmt.errors import ArgumentError, fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("adapter", type=Path, help="an adapter folder saved by PEFT or a Trainer")
    parser.add_argument("output", type=Path, help="the folder to write; created if missing")
    kind = "the transformers class of the model; default: the one for the adapter's task"
    parser.add_argument("--type", metavar="CLASS", help=kind)
    parser.add_argument("--dtype", metavar="DTYPE", help="such as bfloat16; default: that of the base model")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights in a folder that is not empty")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.merging import merge_adapter

    where = f"accmt merge ... {options.output}"
    if options.output.resolve() == options.adapter.resolve():
        raise fail(ArgumentError, where, got="the folder of the adapter", expected="another folder", do="out/merged")
    if not options.overwrite and options.output.is_dir() and any(options.output.iterdir()):
        do = "choose another folder, or add --overwrite: it replaces the weights and keeps other files"
        raise fail(ArgumentError, where, got="a folder with files in it", expected="a new or empty folder", do=do)
    arguments = {} if options.dtype is None else {"dtype": options.dtype}
    merge_adapter(options.adapter, options.output, options.type, **arguments)
    print(f"{options.output}: a full model, for transformers")
    return 0
