"""Show the data of supervised fine-tuning before anything is trained: `accmt data inspect hps.yaml`.

It prints the rows and lengths of each source, how many of them the first epoch trains on, and the first batches as the
model will get them, with the trained text marked. Lengths are those of up to 512 evenly spaced rows. The model is not
loaded, only its tokenizer. Exit code: 0, or 2 for invalid options or data.
"""

from __future__ import annotations

import argparse

from accmt.cli.arguments import add_when_parsed

_OWN = ("hps_config", "model_path", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["inspect"], help="what to do")
    parser.add_argument("hps", help="the hyper-parameter file, with the section `sft`")
    parser.add_argument("--batches", type=int, default=1, help="how many batches to show (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the run (default: 0)")
    add_when_parsed(parser, _add_flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from accmt.addons.command_line import add_flags

    add_flags(parser, without=_OWN, listed_by="accmt sft --help")


def run(options: argparse.Namespace) -> int:
    from accmt.addons.sft.module import SFTModule, describe_data
    from accmt.addons.sft.rows import read_rows
    from accmt.errors import HyperParameterError, fail
    from accmt.trainer import Trainer

    trainer = Trainer.from_argparse_args(options, hps_config=options.hps, model_path="unused")
    hps = trainer.hps
    section = hps.section("sft")
    if section is None or not section.data:
        do = "add `sft: {data: train.jsonl}` to the file"
        raise fail(HyperParameterError, hps.where("sft"), got="no training data", expected="training data", do=do)
    module = SFTModule.from_hps(hps, in_fit=True)
    rows = read_rows(hps.where("sft", "data"), section.data, "train")
    for line in describe_data(module, rows, trainer.settings, num_batches=options.batches, seed=options.seed):
        print(line)
    return 0
