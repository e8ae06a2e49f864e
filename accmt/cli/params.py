"""Print the parameter groups that hyper-parameters create for a model, with their sizes, learning rates and decays.

A model from `--model` is built without its weights, so this takes no memory. A model from the section `model` is built
with them, because its adapter and quantization need them. Every hyper-parameter is a flag:
--hps.optim.layer_decay=0.9. Nothing is written. Exit code: 0, or 2 if the groups do not match the model.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.cli.arguments import add_when_parsed

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_HEAD = ("group", "optimizer", "lr", "weight_decay", "tensors", "numbers", "trained", "such as")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hps", help="the hyper-parameter file")
    model = "a model folder or a name on the Hub; default: the section `model` of the file"
    parser.add_argument("--model", metavar="PATH", help=model)
    parser.add_argument("--type", help="its transformers class; default: the one in its configuration")
    parser.add_argument("--names", action="store_true", help="list the parameter names of each group")
    add_when_parsed(parser, _add_flags)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    from accmt.addons.command_line import read_hps_flags

    read_hps_flags(parser)


def run(options: argparse.Namespace) -> int:
    from accmt.addons.command_line import HPS_FLAGS
    from accmt.addons.model_from_hps import build_from_hps
    from accmt.addons.text_tables import align
    from accmt.errors import ArgumentError, fail
    from accmt.optimization import build_optimizer
    from accmt.options import HyperParameters

    hps = HyperParameters.from_config(options.hps, getattr(options, HPS_FLAGS, None))
    section = hps.section("model")
    if options.model is None and section is None:
        do = "add --model out/base"
        raise fail(
            ArgumentError, "accmt params", got=f"no `model` in {options.hps}", expected="the model to show", do=do
        )
    model = _build_empty(options.model, options.type) if section is None or options.model else build_from_hps(hps)
    optimizer = build_optimizer(hps, model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rows = [_row(group, number, optimizer, names) for number, group in enumerate(optimizer.param_groups)]
    for number, line in enumerate(align([_HEAD, *rows])):
        print(line)
        for parameter in optimizer.param_groups[number - 1]["params"] if options.names and number else ():
            print(f"    {names[parameter]}")
    return 0


def _build_empty(path: str, type_name: str | None) -> Any:
    """Build a transformers model without its weights: its tensors only have shapes.

    An adapter is built with the weights of its base model, because PEFT reads them.

    Args:
        path: A model folder, or a name on the hub.
        type_name: The name of the class; None for the class in the configuration, or `AutoModel`.
    """
    import torch

    from accmt.addons.pretrained import find_model_class, load_pretrained, read_pretrained
    from accmt.libraries.versions import require
    from accmt.saving.weights import ADAPTER_CONFIG

    require("transformers", "a model from a path")
    import transformers

    if (Path(path) / ADAPTER_CONFIG).is_file():
        return load_pretrained(path, type_name)
    config = read_pretrained(transformers.AutoConfig, path)
    named = next(iter(config.architectures or ()), None)
    model_class = find_model_class(type_name or (named if hasattr(transformers, named or "") else None))
    with torch.device("meta"):
        return model_class.from_config(config) if hasattr(model_class, "from_config") else model_class(config)


def _row(
    group: Mapping[str, Any], number: int, optimizer: Optimizer, names: Mapping[nn.Parameter, str]
) -> tuple[str, ...]:
    parameters = group["params"]
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return (
        group.get("name", "all"),
        optimizer.class_name_of(number) if hasattr(optimizer, "class_name_of") else type(optimizer).__name__,
        f"{group['lr']:g}" if group["lr"] is not None else "its own",
        f"{group['weight_decay']:g}" if "weight_decay" in group else "",
        f"{len(parameters):,}",
        f"{sum(parameter.numel() for parameter in parameters):,}",
        f"{trained:,}",
        names[parameters[0]],
    )
