"""PEFT adapters: saved without their base model, loaded into one, and built from their folder."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accmt.errors import ModuleContractError, WeightsError, fail
from accmt.libraries.versions import require
from accmt.messages import say_once, warn_once
from accmt.saving.load_weights import read_weights, require_fit
from accmt.saving.weights import (
    ADAPTER_CONFIG,
    ADAPTER_NAMES,
    SavedWeights,
    give_own_memory,
    plain_names,
    save_adapter,
    write_tensors,
)
from accmt.sharded_tensors import class_of, shard_state

_SCORES = ("ipt", "exp_avg_ipt", "exp_avg_unc")

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn


def save_adapters(
    model: PeftModel,
    state_dict: Mapping[str, Tensor],
    folder: Path,
    *,
    processor: Any = None,
    safe_serialization: bool = True,
) -> SavedWeights:
    """Replace the content of `folder` with the adapters of a model, in PEFT's format.

    The main adapter, named "default" or the active one, is in the folder itself; others are in subfolders with their
    names. Arguments, errors and processes are the same as for `save_model`.
    """
    # PEFT selects what it saves by the names of the model's modules.
    own = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
    names = {plain: name for name, plain in plain_names(own).items()}
    state = {names.get(plain, plain): state_dict[name] for name, plain in plain_names(state_dict).items()}
    main, *others = _list_adapters(model)
    file_name = ADAPTER_NAMES[0 if safe_serialization else 1]

    def write_others(staged: Path) -> None:
        _write_config(model, main, staged)
        for name in others:
            (staged / name).mkdir()
            _write_config(model, name, staged / name)
            weights = give_own_memory(_by_plain_name(_read_adapter(model, state, name)))
            write_tensors(weights, staged / name / file_name, {"format": "pt"})
        if processor is not None:
            processor.save_pretrained(staged)

    weights = _read_adapter(model, state, main)
    return save_adapter(weights, folder, safe_serialization=safe_serialization, write_others=write_others)


def load_adapters(model: PeftModel, folder: Path, *, strict: bool = True) -> None:
    """Load all adapters of a model from a folder of `save_adapters`; arguments as in `load_model_weights`."""
    from peft import set_peft_model_state_dict

    main, *others = _list_adapters(model)
    parts = {main: folder} | {name: folder / name for name in others}
    patterns: dict[str, Any] = {}  # AdaLoRA's layers get the ranks of a saved adapter, which contains no others
    for name, part in parts.items():
        config: Any = model.peft_config[name]
        if config.peft_type == "ADALORA" and not config.rank_pattern and (part / ADAPTER_CONFIG).is_file():
            patterns[name] = cast("Any", read_config(part)).rank_pattern
            if patterns[name]:
                cast("Any", model.base_model).resize_modules_by_rank_pattern(patterns[name], name)
    state = model.state_dict()
    current = {name: _read_adapter(model, state, name) for name in parts}
    saved = {name: read_weights(part) for name, part in parts.items()}
    base = getattr(model.get_base_model(), "name_or_path", None)
    # An adapter of another model may fit, but its results would be meaningless.
    trained_with = read_config(folder).base_model_name_or_path if (folder / ADAPTER_CONFIG).is_file() else None
    if trained_with and base and Path(trained_with).resolve() != Path(base).resolve():
        got = f"the adapter in {folder} was trained with {trained_with}, but is loaded into {base}"
        warn_once(
            f"{got}; unless these are the same model, its weights are meaningless", about="the base of an adapter"
        )
    for name, part in parts.items():
        what = f"the adapter {name!r} of {class_of(model).__name__}{f' around {base}' if base else ''}"
        require_fit(saved[name], _by_plain_name(current[name]), part, what=what, strict=strict)
    for name, weights in current.items():
        names = plain_names(weights)
        loaded = {own: saved[name].get(names[own], tensor) for own, tensor in weights.items()}
        set_peft_model_state_dict(model, shard_state(loaded, weights), adapter_name=name)
        if patterns.get(name) is not None:
            cast("Any", model.peft_config[name]).rank_pattern = patterns[name]


def read_base_name(folder: Path) -> str:
    """Return the path or hub name of the model with which the adapter in `folder` was trained."""
    name: str | None = read_config(folder).base_model_name_or_path
    if name:
        return name
    do = "build the model, and PEFT around it: PeftModel.from_pretrained(model, folder, is_trainable=True)"
    raise fail(
        WeightsError,
        f"the adapter in {folder}",
        got="no `base_model_name_or_path`",
        expected="the path of its model",
        do=do,
    )


def read_config(folder: Path) -> PeftConfig:
    """Return the configuration of the adapter in `folder`."""
    require("peft", f"the adapter in {folder}")
    from peft import PeftConfig

    config: PeftConfig = PeftConfig.from_pretrained(str(folder))
    return config


def reject_unsaved_adapters(model: PeftModel) -> None:
    """Reject adapters that could not be restored from their folder.

    Raises:
        ModuleContractError: They have changed the base model's weights in a way that loading does not reproduce.
    """
    for name, config in model.peft_config.items():
        where, init = f"the adapter {name!r} of self.model", getattr(config, "init_lora_weights", None)
        if config.peft_type == "ADALORA":
            say_once(
                "AdaLoRA keeps all ranks unless a hook calls `update_and_allocate`: def on_before_zero_grad(self): "
                "self.unwrapped_model.base_model.update_and_allocate(self.state.global_step)"
            )
        if isinstance(init, str) and init.startswith(("pissa_niter", "corda", "lora_ga")):
            got = f"init_lora_weights={init!r}, which changes the model's weights depending on random numbers or data"
            expected = "initial weights that are the same when the saved adapter is loaded"
            do = "init_lora_weights='pissa', which is exact, 'olora' or True"
            raise fail(ModuleContractError, where, got=got, expected=expected, do=do)


class AdaLoraRanks:
    """AdaLoRA's importance scores of ranks, which are neither in the weights nor in the optimizer.

    Args:
        model: A model with AdaLoRA adapters of PEFT.
    """

    def __init__(self, model: PeftModel) -> None:
        self._model = cast("nn.Module", model.base_model.model)
        self._allocator: Any = cast("Any", model.base_model).rankallocator
        self._config: Any = self._allocator.peft_config

    def state_dict(self) -> dict[str, Any]:
        """Return the scores and the pattern; the allocator replaces their tensors and never writes to them."""
        scores = {name: dict(getattr(self._allocator, name)) for name in _SCORES}
        return {**scores, "rank_pattern": dict(self._config.rank_pattern or {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, on the devices of the weights."""
        devices = {name: weight.device for name, weight in self._model.named_parameters()}
        for kind in _SCORES:
            setattr(self._allocator, kind, {name: score.to(devices[name]) for name, score in state[kind].items()})
        self._config.rank_pattern = state["rank_pattern"] or None


def find_adalora_ranks(model: PeftModel) -> AdaLoraRanks | None:
    """Return the ranks of a model's AdaLoRA adapters, or None if it has none."""
    return AdaLoraRanks(model) if hasattr(model.base_model, "rankallocator") else None


def build_with_adapter(base: Any, folder: Path) -> PeftModel:
    """Wrap a model with PEFT and the adapter in `folder`, ready for training."""
    from peft import get_peft_model

    config = read_config(folder)
    config.inference_mode = False
    model: PeftModel = get_peft_model(base, config)
    load_adapters(model, folder)
    return model


def _list_adapters(model: PeftModel) -> list[str]:
    """Return the names of the adapters, the main one first."""
    main = "default" if "default" in model.peft_config else model.active_adapters[0]
    return [main, *(name for name in model.peft_config if name != main)]


def _by_plain_name(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    names = plain_names(weights)
    return {names[name]: tensor for name, tensor in weights.items()}


def _read_adapter(model: PeftModel, state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    # An adapter includes the embeddings if it adapts them, or if tokens were added to the model.
    # PEFT's default ("auto") would query the hub at each save. Source: `get_peft_model_state_dict` of peft 0.21.
    config = model.peft_config[name]
    saves_embeddings = False
    if getattr(config, "trainable_token_indices", None) is None and config.peft_type != "TRAINABLE_TOKENS":
        embeddings = getattr(model, "get_input_embeddings", lambda: None)()
        saves_embeddings = hasattr(embeddings, "base_layer")
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not saves_embeddings and size and config.base_model_name_or_path:
        from transformers import AutoConfig

        with suppress(OSError, ValueError):  # not on this machine: PEFT assumes too that it is unchanged
            base = AutoConfig.from_pretrained(config.base_model_name_or_path, local_files_only=True)
            saves_embeddings = getattr(base, "vocab_size", size) != size
    weights: dict[str, Tensor] = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=name, save_embedding_layers=saves_embeddings
    )
    return weights


def _write_config(model: PeftModel, name: str, folder: Path) -> None:
    """Write `adapter_config.json` with the additions of `PeftModel.save_pretrained` of peft 0.21."""
    config = copy.copy(model.peft_config[name])
    base = model.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    kind = type(base)
    mapping = {"base_model_class": kind.__name__.removeprefix("FSDP"), "parent_library": kind.__module__}
    config.save_pretrained(str(folder), auto_mapping_dict=mapping if config.task_type is None else None)
