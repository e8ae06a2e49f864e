"""Write the weights of a checkpoint as a model folder, for `load_weights`, `from_pretrained` and other programs.

Every file of the checkpoint is verified first. For a folder of checkpoints, the newest one is used. The configuration
of a transformers model comes from the model folder next to `checkpoint-<name>`, or from --config.
Exit code: 0 written, 2 not.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.cli.former import FormerFlag
from accmt.errors import ArgumentError, WeightsError, fail

if TYPE_CHECKING:
    from torch import Tensor

    from accmt.checkpoint.manifest import Checkpoint
    from accmt.saving import SavedWeights

_CONFIG = "config.json"
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_PREFIX = "checkpoint-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="a checkpoint folder, or a folder of checkpoints")
    parser.add_argument("output", type=Path, help="the folder to write; created if missing")
    parser.add_argument("--config", type=Path, metavar="FOLDER", help="a folder with the config.json of the model")
    parser.add_argument("--bare", action="store_true", help="write only the weights, with the names of the module")
    size = "maximum file size in bytes or like 500MB (default 10GB)"
    parser.add_argument("--max-shard-size", type=_read_size, default="10GB", metavar="SIZE", help=size)
    dtype = "convert weights of floats; default: as they were trained"
    parser.add_argument("--dtype", choices=_DTYPES, help=dtype)
    parser.add_argument("--out", "-O", "-o", action=FormerFlag, nargs="?", const="accmt get CHECKPOINT FOLDER")
    parser.add_argument("--overwrite", action="store_true", help="replace the weights in a folder that is not empty")


def run(options: argparse.Namespace) -> int:
    checkpoint = _find(options.checkpoint)
    where = f"accmt get ... {options.output}"
    if checkpoint.folder.resolve() in (options.output.resolve(), *options.output.resolve().parents):
        got = "a folder inside the checkpoint, which this would damage"
        raise fail(ArgumentError, where, got=got, expected="another folder", do="out/weights")
    if options.output.exists() and not options.output.is_dir():
        raise fail(ArgumentError, where, got="a file", expected="a folder", do="choose another name")
    if not options.overwrite and options.output.is_dir() and any(options.output.iterdir()):
        do = "choose another folder, or add --overwrite: it replaces the weights and keeps other files"
        raise fail(ArgumentError, where, got="a folder with files in it", expected="a new or empty folder", do=do)
    weights = _convert(_read(checkpoint), options.dtype)
    config = None if options.bare else options.config
    run_folder = checkpoint.folder.resolve().parent
    if not options.bare and not config and run_folder.name.startswith(_PREFIX):
        model = run_folder.with_name(run_folder.name.removeprefix(_PREFIX))  # belongs to the checkpoint by its name
        config = model if (model / _CONFIG).is_file() else None
    files = _write(weights, config, options.output, options.max_shard_size)
    of_config = f", with {_CONFIG} from {config}" if config else ""
    print(f"{options.output}: {', '.join(files)} from step {checkpoint.step:,}{of_config}")
    return 0


def _read_size(text: str) -> int:
    from accmt.options.units import read_size

    try:
        return read_size("max_shard_size", int(text) if text.isdecimal() else text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, or a number with KB, MB, GB or TB, got {text!r}"
        ) from error


def _find(path: Path) -> Checkpoint:
    from accmt.addons.inspection import inspect
    from accmt.checkpoint.manifest import read_checkpoint

    return read_checkpoint(inspect(path)[-1].folder)


def _read(checkpoint: Checkpoint) -> dict[str, Tensor]:
    from accmt.checkpoint.contents import read_model

    weights, num_left_out = read_model(checkpoint.folder)
    if num_left_out:
        got = f"an adapter: {num_left_out} frozen weights are not in the checkpoint"
        do = "load the model folder with PEFT, or use `Trainer.validate(module, data, ckpt_path=...)`"
        raise fail(WeightsError, f"checkpoint {checkpoint.folder}", got=got, expected="all weights of a model", do=do)
    return weights


def _convert(weights: dict[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    """Return weights in another type; tied ones stay one tensor."""
    import torch

    if dtype is None:
        return weights
    converted: dict[tuple[Any, ...], Tensor] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            converted.setdefault(_view_of(tensor), tensor.to(getattr(torch, dtype)))
    return {name: converted.get(_view_of(tensor), tensor) for name, tensor in weights.items()}


def _view_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _write(weights: Mapping[str, Tensor], config: Path | None, output: Path, max_shard_size: int) -> tuple[str, ...]:
    from accmt.saving import save_weights

    if config is None:
        return save_weights(weights, output, max_shard_size=max_shard_size).files
    return _save_by_config(weights, config, output, max_shard_size).files


def _save_by_config(
    state_dict: Mapping[str, Tensor], config_folder: Path, folder: Path, max_shard_size: int
) -> SavedWeights:
    """Save full weights with only the `config.json` of a model, like `save_model`.

    Needs no memory for a second model.
    """
    import torch

    from accmt.huggingface.folder import save_model
    from accmt.libraries.versions import require
    from accmt.saving.load_weights import require_fit

    require("transformers")
    import transformers

    if not (config_folder / _CONFIG).is_file():  # otherwise transformers would ask the hub
        do = "pass the folder of a saved model, or write only the weights: --bare"
        raise fail(
            WeightsError, str(config_folder), got=f"no {_CONFIG}", expected="the configuration of the model", do=do
        )
    config = transformers.AutoConfig.from_pretrained(config_folder, local_files_only=True)
    name = next(iter(config.architectures or ()), "no class")
    model_class = getattr(transformers, name, None)
    if model_class is None:
        expected, do = "a class of transformers", "write only the weights, and load them into your own model"
        raise fail(WeightsError, str(config_folder / _CONFIG), got=f"the model class {name}", expected=expected, do=do)
    with torch.device("meta"):
        model = model_class(config)
    model.to(next(value.dtype for value in state_dict.values() if value.is_floating_point()))
    require_fit(state_dict, model.state_dict(), config_folder, what=name)
    return save_model(model, state_dict, folder, max_shard_size=max_shard_size)
