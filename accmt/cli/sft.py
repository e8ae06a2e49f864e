"""Fine-tune a causal model on conversations, prompts with answers, or text: all of it described by one YAML.

Its section `model` says which model, with which adapter and quantization; its section `sft` which rows. The folder that
is written is loaded by transformers or, with an adapter, by PEFT; --merge adds OUTPUT/merged, the whole model.
On several processes: accmt launch -N 2 sft hps.yaml OUTPUT. Exit code: 0, or 2 for what cannot be trained.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.cli.arguments import add_when_parsed

if TYPE_CHECKING:
    from accmt.options import HyperParameters

_OWN = ("hps_config", "model_path")
_FLAGS = ("data", "validation", "max_length", "merge")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    files = "a file (.jsonl, .json, .parquet, .csv) or a folder that `Dataset.save_to_disk` wrote"
    parser.add_argument("hps", help="the file of hyper-parameters")
    parser.add_argument("output", type=Path, help="the folder of the trained model")
    parser.add_argument("--data", nargs="+", metavar="PATH", help=f"rows to train on: {files}; else their `sft`")
    parser.add_argument("--validation", nargs="+", metavar="PATH", help="rows to evaluate on, likewise")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="how many tokens of a row are kept")
    parser.add_argument("--merge", action="store_true", default=None, help="merge the adapter into its model, too")
    add_when_parsed(parser, _add_flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from accmt.options.command_line import add_flags

    add_flags(parser, without=_OWN)


def run(options: argparse.Namespace) -> int:
    from accmt.addons.merging import merge_adapter, require_mergeable
    from accmt.addons.sft.module import SFTModule
    from accmt.addons.sft.rows import read_rows
    from accmt.options.command_line import HPS_FLAGS
    from accmt.trainer import Trainer

    typed = {f"sft.{name}": value for name in _FLAGS if (value := getattr(options, name)) is not None}
    setattr(options, HPS_FLAGS, {**getattr(options, HPS_FLAGS, {}), **typed})
    trainer = Trainer.from_argparse_args(options, hps_config=options.hps, model_path=options.output)
    hps = trainer.hps
    section = _require_data(hps)
    if section.merge:
        require_mergeable(hps)
    module = SFTModule.from_hps(hps, in_fit=True)
    rows = read_rows(hps.where("sft", "data"), section.data, "train")
    held_out = section.validation and read_rows(hps.where("sft", "validation"), section.validation, "validation")
    trainer.fit(module, rows, held_out or None)
    if trainer.is_main:
        print(f"{options.output}: {_describe(options.output)}")
        if section.merge and hps.model_section is not None:
            model = hps.model_section
            merge_adapter(options.output, options.output / "merged", model.type, **model.arguments)
            if (settings := getattr(module.unwrapped_model, "generation_config", None)) is not None:
                settings.save_pretrained(options.output / "merged")  # where answers end
            print(f"{options.output / 'merged'}: {_describe(options.output / 'merged')}")
    return 0


def _require_data(hps: HyperParameters) -> Any:
    from accmt.errors import HyperParameterError, explain

    if hps.sft_section is None or not hps.sft_section.data:
        do = "add `sft: {data: train.jsonl}` to it, or --data train.jsonl"
        raise HyperParameterError(explain(hps.where("sft"), "nothing", "the rows to train on", do))
    return hps.sft_section


def _describe(folder: Path) -> str:
    from accmt.saving.weights import ADAPTER_CONFIG

    if (folder / ADAPTER_CONFIG).is_file():
        return "an adapter, for PEFT (or `accmt merge`)"
    return "a model with its tokenizer, for transformers" if (folder / "config.json").is_file() else "no model saved"
