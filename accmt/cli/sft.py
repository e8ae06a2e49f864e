"""Fine-tune a causal model on conversations, prompts with completions, or text, as described by one YAML file.

Its section `model` defines the model, adapter and quantization, and its section `sft` the data. transformers can load
the output folder, or PEFT if there is an adapter; --merge also writes the full model to OUTPUT/merged.
On several processes: accmt launch -N 2 sft hps.yaml OUTPUT. Exit code: 0, or 2 for invalid options or data.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from accmt.cli.arguments import add_when_parsed

_OWN = ("hps_config", "model_path")
_FLAGS = ("data", "validation", "max_length", "merge")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_row_arguments(parser, "sft")


def add_row_arguments(parser: argparse.ArgumentParser, section: str) -> None:
    """Add the arguments of a command that trains on the rows of a section."""
    files = "files (.jsonl, .parquet, .arrow, .json, .csv), folders, globs or URLs"
    parser.add_argument("hps", help="the hyper-parameter file")
    parser.add_argument("output", type=Path, help="the folder for the trained model")
    data = f"training data: {files}; default: the section `{section}` of the file"
    parser.add_argument("--data", nargs="+", metavar="PATH", help=data)
    parser.add_argument("--validation", nargs="+", metavar="PATH", help="validation data, like --data")
    tokens = "maximum number of tokens per row"
    parser.add_argument("--max-length", "--max_length", type=int, metavar="TOKENS", help=tokens)
    parser.add_argument("--merge", action="store_true", default=None, help="also merge the adapter into its model")
    add_when_parsed(parser, partial(_add_flags, section))


def _add_flags(section: str, parser: argparse.ArgumentParser) -> None:
    from accmt.addons.command_line import add_flags
    from accmt.errors import nearest

    add_flags(parser, without=_OWN)
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        found, unknown = parse(args, namespace)
        name = next((one.partition("=")[0] for one in unknown if one.startswith("--")), None)
        if name is not None:
            meant = nearest(name, re.findall(r"--[\w.-]+", parser.format_help()))
            key = f"a key of `{section}` in the file is a flag such as --hps.{section}.{name[2:]}=..."
            parser.error(f"unrecognized arguments: {name}; {f'did you mean {meant}?' if meant else key}")
        return found, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def run(options: argparse.Namespace) -> int:
    from accmt.addons.sft.module import SFTModule

    return train_on_rows(options, "sft", lambda section: SFTModule)


def train_on_rows(options: argparse.Namespace, name: str, find_module: Callable[[Any], type[Any]]) -> int:
    """Train on the rows of a section, and write the model.

    Args:
        options: The parsed arguments.
        name: The section.
        find_module: Returns the class of the module for the section.
    """
    from accmt.addons.command_line import HPS_FLAGS
    from accmt.addons.merging import merge_adapter, require_mergeable
    from accmt.addons.sft.rows import read_rows
    from accmt.errors import HyperParameterError, fail
    from accmt.trainer import Trainer

    typed = {f"{name}.{key}": value for key in _FLAGS if (value := getattr(options, key)) is not None}
    setattr(options, HPS_FLAGS, {**getattr(options, HPS_FLAGS, {}), **typed})
    trainer = Trainer.from_argparse_args(options, hps_config=options.hps, model_path=options.output)
    hps = trainer.hps
    section = hps.section(name)
    if section is None or not section.data:
        do = f"add `{name}: {{data: train.jsonl}}` to the file, or pass --data train.jsonl"
        raise fail(HyperParameterError, hps.where(name), got="no training data", expected="training data", do=do)
    if section.merge:
        require_mergeable(hps, name)
    module = find_module(section).from_hps(hps, in_fit=True)
    rows = read_rows(hps.where(name, "data"), section.data, "train")
    held_out = section.validation and read_rows(hps.where(name, "validation"), section.validation, "validation")
    trainer.fit(module, rows, held_out or None)
    if trainer.is_main:
        print(f"{options.output}: {_describe(options.output)}")
        if section.merge and (model := hps.section("model")) is not None:
            merge_adapter(options.output, options.output / "merged", model.type, **model.arguments)
            if (settings := getattr(module.unwrapped_model, "generation_config", None)) is not None:
                settings.save_pretrained(options.output / "merged")  # has the end-of-sequence token
            print(f"{options.output / 'merged'}: {_describe(options.output / 'merged')}")
    return 0


def _describe(folder: Path) -> str:
    from accmt.saving.weights import ADAPTER_CONFIG

    if (folder / ADAPTER_CONFIG).is_file():
        return "an adapter, for PEFT (or `accmt merge`)"
    return "a model with its tokenizer, for transformers" if (folder / "config.json").is_file() else "no model saved"
