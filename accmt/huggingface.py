"""What a transformers model needs beyond plain PyTorch: building it from a path, and a folder that transformers reads.

Nothing here imports transformers before a function that needs it is called.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from accmt.errors import ArgumentError, WeightsError, explain
from accmt.files import fsync_file, fsync_folder, staging_folder
from accmt.saving.tensors import find_tied, plain_names

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def is_transformers_model(model: object) -> TypeGuard[PreTrainedModel]:
    """Say whether `model`, without wrappers, is a transformers model; does not import transformers to find out."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def load_pretrained(
    path: str | os.PathLike[str], type: type[PreTrainedModel] | str | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Build a transformers model with the weights at `path`.

    Args:
        path: A folder that `save_pretrained` or a Trainer wrote, or a name on the hub.
        type: The model class, its name in transformers such as "AutoModelForSequenceClassification", or None for
            `AutoModel`.
        **kwargs: Passed on to `from_pretrained`, for example `num_labels=5`.

    Returns:
        The model, in evaluation mode, as `from_pretrained` returns it.

    Raises:
        ArgumentError: `type` names no model class of transformers.
        FileNotFoundError: `path` is no model folder, and no name on the hub that can be reached.
    """
    model_class = _find_model_class(type)
    _require_model_folder(os.fspath(path))
    try:
        return model_class.from_pretrained(path, **kwargs)  # type: ignore[no-any-return]
    except OSError as error:
        message = explain(
            f"from_hf(path={os.fspath(path)!r})",
            str(error),
            "a folder with config.json and weights, or the name of a model on the hub",
            "check the spelling; a folder on this machine is written with its full path, or begins with `./`",
        )
        raise FileNotFoundError(message) from error


def to_saved_format(model: PreTrainedModel, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn the state dict of a transformers model into the one that `from_pretrained` expects in its folder.

    As `save_pretrained` does: without what the model says not to save, each tied weight under its main name only, and
    with the changes undone that loading makes to names and tensors. Weights that are tied, but not by the model's own
    declaration, are copied, because `from_pretrained` would not tie them again.

    Args:
        model: The model, without wrappers.
        state_dict: Its full state dict; names may carry wrappers.

    Source:
        `PreTrainedModel.save_pretrained` of transformers 5.23.
    """
    from transformers.core_model_loading import revert_weight_conversion

    names = plain_names(state_dict)
    ignored = set(model._keys_to_ignore_on_save or ())
    weights = {names[name]: tensor for name, tensor in state_dict.items() if names[name] not in ignored}
    for name, main in getattr(model, "all_tied_weights_keys", {}).items():
        if name in weights and main in weights and find_tied({main: weights[main], name: weights[name]}):
            del weights[name]
    for name in find_tied(weights):
        weights[name] = weights[name].clone()
    saved: dict[str, Tensor] = revert_weight_conversion(model, weights)
    return saved


def save_model_files(model: PreTrainedModel, folder: Path, processor: Any = None) -> None:
    """Write all that `from_pretrained` needs beside the weights, each file replaced as one step.

    These are `config.json`, `generation_config.json` for a model that generates, the code of a custom model, and the
    files of `processor`.

    Args:
        model: The model, without wrappers; its config is not changed.
        folder: The model folder; made if it is missing.
        processor: A tokenizer, image processor, feature extractor or processor (anything with `save_pretrained`).

    Raises:
        OSError: The disk is full or the folder cannot be written; each file is the old one or the new.

    Processes:
        Main only.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [model.__class__.__name__.removeprefix("FSDP")]  # fully_shard renames the class
    with staging_folder(folder, "model-files") as staged:
        if model.is_remote_code():
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(model, staged, config=config)  # type: ignore[arg-type]
        config.save_pretrained(staged)
        if model.can_generate():
            model.generation_config.save_pretrained(staged)
        if processor is not None:
            processor.save_pretrained(staged)
        _move_files(staged, folder)


def load_pretrained_weights(model: PreTrainedModel, folder: Path | str) -> None:
    """Load the weights in `folder` into `model`, in place, through `from_pretrained`.

    Only that way changes which transformers makes to names and tensors on loading are made. A second model is in memory
    meanwhile.

    Args:
        model: The model, without wrappers.
        folder: A folder with weights in the format of `to_saved_format`, and `config.json`.

    Raises:
        WeightsError: Weights are missing, left over, or of other shapes.
        FileNotFoundError: The folder holds no model.

    Processes:
        All, each for itself.
    """
    _require_model_folder(str(Path(folder).absolute()))
    from_pretrained: Any = model.__class__.from_pretrained  # returns a pair where the report is asked for
    loaded, report = from_pretrained(
        folder,
        config=copy.deepcopy(model.config),
        dtype=model.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they stand in the report, with the other faults
    )
    faults = [f"{kind}: {', '.join(sorted(map(str, names)))}" for kind, names in report.items() if names]
    if faults:
        raise _misfit(model, folder, "; ".join(faults))
    model.load_state_dict(loaded.state_dict())


def _find_model_class(wanted: type[PreTrainedModel] | str | None) -> Any:
    import transformers

    if wanted is None:
        return transformers.AutoModel
    if not isinstance(wanted, str):
        return wanted
    found = getattr(transformers, wanted, None)
    if _is_model_class(found):
        return found
    nearest = difflib.get_close_matches(wanted, dir(transformers), n=3)
    message = explain(
        f"from_hf(type={wanted!r})",
        f"{wanted!r}, which is no model class of transformers {transformers.__version__}",
        "a class, or the name of one, such as 'AutoModelForSequenceClassification'",
        f"write {' or '.join(map(repr, nearest))}" if nearest else "pass the class itself",
    )
    raise ArgumentError(message)


def _is_model_class(found: object) -> bool:
    from transformers import PreTrainedModel

    is_model = inspect.isclass(found) and issubclass(found, PreTrainedModel)
    return is_model or getattr(found, "__name__", "").startswith(("AutoModel", "AutoBackbone"))


def _require_model_folder(path: str) -> None:
    """Refuse what cannot be a model before transformers asks the hub for it."""
    is_hub_name = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    found = Path(path)
    if (found / "config.json").is_file() or (is_hub_name and not found.exists()):
        return
    message = explain(
        f"model folder {path!r}",
        "a folder without config.json" if found.is_dir() else ("a file" if found.exists() else "no such folder"),
        "a folder with config.json and weights, as save_pretrained or a Trainer writes it",
        "check the spelling and the folder that the path starts from",
    )
    raise FileNotFoundError(message)


def _move_files(staged: Path, folder: Path) -> None:
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    for path in paths:
        fsync_file(path)
    for path in paths:
        target = folder / path.relative_to(staged)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
        fsync_folder(target.parent)


def _misfit(model: PreTrainedModel, folder: Path | str, got: str) -> WeightsError:
    message = explain(
        f"weights in {folder}",
        got,
        f"the weights of {model.__class__.__name__}, with the same names and shapes",
        "build the model with the configuration it was saved with, or choose the folder that belongs to it",
    )
    return WeightsError(message)
