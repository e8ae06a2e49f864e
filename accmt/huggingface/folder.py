"""The folder of a model of any kind: written so that its own library can load it, and loaded again."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accmt.errors import SavingError, WeightsError, fail
from accmt.huggingface.model_kinds import is_peft_model, is_transformers_model, reject_injected_adapters
from accmt.libraries.private_names import names_not_saved
from accmt.messages import warn_once
from accmt.precisions import HALVES
from accmt.registry import addon
from accmt.saving import SavedWeights, load_weights, save_weights
from accmt.saving.load_weights import require_files
from accmt.saving.model_folder import read_status
from accmt.saving.weights import (
    ADAPTER_CONFIG,
    ShardedState,
    find_tied,
    plain_names,
    remove_leftovers,
    stream_weights,
)
from accmt.sharded_tensors import class_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_CONFIG = "config.json"


def save_model(
    model: nn.Module,
    state_dict: Mapping[str, Tensor] | ShardedState,
    folder: Path,
    *,
    processor: Any = None,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> SavedWeights:
    """Replace the model saved in `folder`: its weights, and the files that its library needs to load them.

    At any moment a loader finds the old model or the new one. Files of the previous save (listed in its `status.json`)
    that this one does not write are removed. The caller writes the new `status.json`, with the returned `files`.

    Processes: main only.

    Args:
        model: The model, without the wrapper of the launch. Of a PEFT model, only the adapters are saved.
        state_dict: Its full state dict, or that of a sharded model; names may contain those of wrappers.
        folder: The model folder; created if it is missing.
        processor: A tokenizer or similar (anything with `save_pretrained`), saved with transformers and PEFT models.
        max_shard_size: Maximum size of one file, in bytes or as "10GB"; an adapter is always one file.
        safe_serialization: Safetensors if True, `.bin` files of `torch.save` if False.

    Raises:
        WeightsError: `state_dict` lacks parameters of the model, or contains what a file cannot hold.
        ModuleContractError: transformers put an adapter into the model, see `reject_injected_adapters`.
        OSError: The disk is full or the folder is not writable. The previously saved model can still be loaded.
    """
    reject_injected_adapters(model)
    try:
        listed = read_status(folder).get("files")
    except (OSError, ValueError, AttributeError):  # no status, or not accmt's
        listed = None
    old_files = []
    if isinstance(listed, list):  # the file may be another program's
        old_files = [name for name in listed if isinstance(name, str)]
    saved = None
    if isinstance(state_dict, ShardedState):
        if safe_serialization:
            saved = _stream(model, state_dict, folder, processor, max_shard_size)
        # Only if they cannot be saved one by one: the full weights may not fit into memory.
        state_dict = state_dict.fetch_all() if saved is None else {}
    if saved is None:
        if is_peft_model(model):
            is_safe = safe_serialization
            saved = addon("save_adapters")(model, state_dict, folder, processor=processor, safe_serialization=is_safe)
        else:
            write_others = None
            if is_transformers_model(model):
                state_dict = to_saved_format(model, state_dict)
                write_others = partial(_write_model_files, model, processor)
            saved = save_weights(
                state_dict,
                folder,
                max_shard_size=max_shard_size,
                safe_serialization=safe_serialization,
                write_others=write_others,
            )
    remove_leftovers(folder, old_files, saved.files)
    if not is_peft_model(model) and _CONFIG not in saved.files and (folder / _CONFIG).is_file():
        warn_once(
            f"{folder} contains the config.json of another model, which this run did not write: "
            "`from_pretrained` would build that model. Use another model_path, or remove the file.",
            about=f"the config.json in {folder}",
        )
    return saved


def _stream(
    model: nn.Module, state: ShardedState, folder: Path, processor: Any, max_shard_size: int | str
) -> SavedWeights | None:
    """Save one tensor after the other; return None if the saved weights have to be computed from full tensors."""
    if is_peft_model(model):
        return None
    outlines, write_others = state.outlines, None
    if is_transformers_model(model):
        outlines = to_saved_format(model, outlines)
        write_others = partial(_write_model_files, model, processor)
    fetch = state.fetch_outlined(outlines)
    if fetch is None:  # the saved weights are computed from several tensors, as merged experts are
        return None
    return stream_weights(outlines, fetch, folder, max_shard_size=max_shard_size, write_others=write_others)


def load_model_weights(model: nn.Module, folder: Path, *, strict: bool = True) -> None:
    """Load weights written by `save_model` or `save_pretrained` into a model of any kind, in place.

    Processes: each loads on its own, also if the model is sharded.

    Args:
        model: The model, without the wrapper of the launch. A PEFT model gets its adapters.
        folder: The model folder.
        strict: Whether the model and the folder must have exactly the same weights. Shapes must always match.

    Raises:
        WeightsError: The folder has no weights or those of another model, or a file is missing or damaged.
    """
    require_files(folder)
    holds_adapter = (folder / ADAPTER_CONFIG).is_file()
    # Without this, all names would be missing, and the error would list thousands.
    if holds_adapter != is_peft_model(model):
        name = class_of(model).__name__
        if holds_adapter:
            got, expected = "an adapter", f"the weights of {name}"
            do = "PeftModel.from_pretrained(model, folder), or AcceleratorModule.from_hf(folder, type)"
        else:
            got, expected = "the weights of a whole model", f"an adapter ({ADAPTER_CONFIG} and its weights)"
            do = "load them into the model before get_peft_model(model, ...) wraps it"
        raise fail(WeightsError, f"weights in {folder}", got=got, expected=expected, do=do)
    if is_peft_model(model):
        addon("load_adapters")(model, folder, strict=strict)
    # Not with `strict=False`: `from_pretrained` would initialize again what the folder lacks.
    elif strict and is_transformers_model(model):
        addon("load_pretrained_weights")(model, folder)
    else:
        load_weights(model, folder, strict=strict)


def to_saved_format(model: PreTrainedModel, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the state dict of a transformers model to the one that `from_pretrained` expects in its folder.

    Like `save_pretrained`: leaves out what the model declares not to save, keeps only the main name of tied weights,
    and reverts the changes that loading makes to names and tensors. Weights that are tied without such a declaration
    are copied, because `from_pretrained` would not tie them again.

    Source: `PreTrainedModel.save_pretrained` of transformers 5.23.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = plain_names(state_dict)
    ignored = names_not_saved(model)
    weights = {names[name]: tensor for name, tensor in state_dict.items() if names[name] not in ignored}
    for name, main in getattr(model, "all_tied_weights_keys", {}).items():
        weight, main_weight = weights.get(name), weights.get(main)
        if weight is None or main_weight is None:
            continue
        # Gathered from shards, tied weights are separate copies.
        if weight is main_weight or (not weight.is_meta and torch.equal(main_weight, weight)):
            del weights[name]
    for name in find_tied(weights):  # safetensors rejects tensors that share memory
        weights[name] = weights[name].clone()
    saved: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return saved


def try_model_files(model: nn.Module, processor: Any) -> None:
    """Write the files beside the weights into a temporary folder: transformers checks a generation config only then.

    Raises:
        SavingError: One cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="accmt-") as folder:
            if is_transformers_model(model):
                _write_model_files(model, processor, Path(folder))
            elif is_peft_model(model) and processor is not None:
                processor.save_pretrained(folder)
    except OSError:
        return  # the disk of temporary folders may be full
    except Exception as error:
        expected = "configurations and a processor that `save_pretrained` writes"
        do = "correct what it names in the module (such as self.model.generation_config), or set model_saving=None"
        got = f"{type(error).__name__}: {error}"
        raise fail(SavingError, "the files beside the model's weights", got=got, expected=expected, do=do) from error


def _write_model_files(model: PreTrainedModel, processor: Any, folder: Path) -> None:
    """Write the other files that `from_pretrained` needs: configurations, a custom model's code, the processor."""
    config = copy.deepcopy(model.config)
    # The dtype in which `from_pretrained` loads all weights without rounding trained ones: with mixed precision those
    # are float32, even if frozen ones are in 16 bits.
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    dtype = model.dtype
    if trained == {torch.float32} and dtype in HALVES:
        dtype = torch.float32
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [class_of(model).__name__]
    if model.is_remote_code():  # `from_pretrained` would not find the class in transformers
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=config)  # type: ignore[arg-type]
    config.save_pretrained(folder)
    # The `generation_config` of other models is None.
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
