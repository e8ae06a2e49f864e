"""Saving weights for which there is no model at hand, but the configuration of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from accmt.errors import WeightsError, explain
from accmt.huggingface.folder import save_model
from accmt.saving import SavedWeights
from accmt.saving.load_weights import require_fit

CONFIG = "config.json"


def save_by_config(
    state_dict: Mapping[str, Tensor], config_folder: Path, folder: Path, *, max_shard_size: int | str
) -> SavedWeights:
    """Write weights and configuration so that `from_pretrained` loads them; no memory is taken for a second model.

    Args:
        state_dict: The full weights, by the names that they have in the model.
        config_folder: A folder with the `config.json` of the model.
        folder: As in `save_model`.
        max_shard_size: As in `save_model`.

    Raises:
        WeightsError: The configuration is not that of the weights, or of a class that transformers does not have.
        OSError: As in `save_model`.

    Processes:
        Main only.
    """
    import transformers

    if not (config_folder / CONFIG).is_file():  # else transformers would look for it on its hub
        do = "name the folder of a saved model, or write the weights alone: --bare"
        raise WeightsError(explain(str(config_folder), f"no {CONFIG}", "the configuration of the model", do))
    config = transformers.AutoConfig.from_pretrained(config_folder, local_files_only=True)
    name = next(iter(config.architectures or ()), "no class")
    model_class = getattr(transformers, name, None)
    if model_class is None:
        expected, do = "a class of transformers", "write the weights alone, and load them into a model of your own"
        raise WeightsError(explain(str(config_folder / CONFIG), f"the model class {name}", expected, do))
    with torch.device("meta"):
        model = model_class(config)
    model.to(next(value.dtype for value in state_dict.values() if value.is_floating_point()))
    require_fit(state_dict, model.state_dict(), config_folder, what=name)
    return save_model(model, state_dict, folder, max_shard_size=max_shard_size)
