"""Models from a path or a name on the hub, and their weights loaded in place, by transformers' own loader."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accmt.engine.meta_device import accelerator_to_build_for
from accmt.errors import ArgumentError, ArgumentFileError, ModuleContractError, fail, nearest
from accmt.huggingface.model_kinds import advise_wrapping, reject_injected_adapters
from accmt.libraries.versions import checkpoint_activations, require
from accmt.registry import addon
from accmt.saving.load_weights import describe_shapes, misfit
from accmt.saving.weights import ADAPTER_CONFIG, plain_names
from accmt.sharded_tensors import class_of, shard_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MAIN_READS = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def load_pretrained(
    path: str | os.PathLike[str], type: type[PreTrainedModel] | str | None = None, **kwargs: Any
) -> Any:
    """Build a transformers model with the weights at `path`.

    Args:
        path: A folder written by `save_pretrained` or a Trainer, or a name on the hub. For an adapter's folder, its
            base model is built and wrapped by PEFT, ready for training.
        type: The model class, its name in transformers such as "AutoModelForSequenceClassification", or None for
            `AutoModel`.
        **kwargs: Passed to `from_pretrained`, for example `num_labels=5`.

    Returns:
        The model in evaluation mode, as from `from_pretrained`; or a `PeftModel`.

    Raises:
        ArgumentError: `type` is not a model class of transformers or its name.
        FileNotFoundError: `path` is neither a model folder nor a reachable name on the hub.
        WeightsError: The adapter in `path` does not match its base model.
        ModuleContractError: `path` is something else, such as a model; or it is the hub name of an adapter, which
            transformers would inject into the model.
    """
    _require_path(path)
    model_class = find_model_class(type)
    folder = Path(path)
    # transformers would load the base model and put the adapter inside, where no saved folder shows it.
    if (folder / ADAPTER_CONFIG).is_file():
        base = addon("read_base_name")(folder)
        require_model_folder(base, f"the base model of the adapter in {folder}, from its {ADAPTER_CONFIG}")
        return addon("build_with_adapter")(read_pretrained(model_class, base, **kwargs), folder)
    model = None
    if accelerator_to_build_for() is not None:
        model = addon("read_in_parts")(model_class, os.fspath(path), kwargs)
    if model is None:
        model = read_pretrained(model_class, os.fspath(path), **kwargs)
    reject_injected_adapters(model)
    return model


def read_pretrained(kind: Any, path: str, **kwargs: Any) -> Any:
    """Load a model folder or a model from the hub with a class of transformers."""
    require_model_folder(path)
    # Read on each process, even if `accelerate launch` would let only the main one read: the default of its option
    # `--fsdp_cpu_ram_efficient_loading` leaves the other processes' weights without values.
    main_reads = os.environ.pop(_MAIN_READS, None)
    try:
        return kind.from_pretrained(path, **kwargs)
    except OSError as error:
        raise fail(
            ArgumentFileError,
            f"from_hf(path={path!r})",
            got=str(error),
            expected="a folder with config.json and weights, or the name of a model on the hub",
            do="check the spelling; for a local folder use the full path, or start with `./`",
        ) from error
    finally:
        if main_reads is not None:
            os.environ[_MAIN_READS] = main_reads


def load_pretrained_weights(model: PreTrainedModel, folder: Path | str) -> None:
    """Load the weights in `folder` into `model`, without wrappers, in place, through `from_pretrained`.

    Only `from_pretrained` makes transformers' changes to names and tensors on loading. A second model is in memory
    during the call.
    """
    require_model_folder(str(Path(folder).absolute()))
    model_class: Any = class_of(model)
    from_pretrained = model_class.from_pretrained  # returns a pair if the report is requested
    loaded, report = from_pretrained(
        folder,
        config=copy.deepcopy(model.config),
        dtype=model.dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are in the report, with the other problems
    )
    shapes = sorted(describe_shapes(*entry) for entry in report.pop("mismatched_keys"))
    faults = []
    for kind, names in report.items():
        if names:
            faults.append(f"{kind}: {', '.join(sorted(map(str, names)))}")
    if shapes:
        faults.append(f"shapes: {', '.join(shapes)}")
    # `from_pretrained` only warns, and leaves what it did not find as it was initialized.
    if faults:
        expected = f"the weights of {class_of(model).__name__}, with the same names and shapes"
        raise misfit(Path(folder), "; ".join(faults), expected)
    weights, current = loaded.state_dict(), model.state_dict()
    by_key = {key: weights[name] for key, name in plain_names(current).items()}
    model.load_state_dict(shard_state(by_key, current))


def _require_path(path: object) -> None:
    # A model in place of its path is the usual mistake, and transformers would ask the hub for it.
    if not isinstance(path, str | os.PathLike):
        do = advise_wrapping(path) or 'AcceleratorModule.from_hf("path/of/a/model", "AutoModelForCausalLM")'
        got, expected = f"an object of {path.__class__.__name__}", "the path of a model folder, or a name on the hub"
        raise fail(ModuleContractError, "from_hf(path)", got=got, expected=expected, do=do)


def find_model_class(wanted: type[PreTrainedModel] | str | None, where: str | None = None) -> Any:
    """Return a model class of transformers from the class, its name or None.

    Args:
        wanted: The class, its name, or None for `AutoModel`.
        where: Its location, for error messages; None is the argument of `from_hf`.

    Raises:
        ArgumentError: It is not a model class.
    """
    require("transformers", "a model from a path")
    import transformers

    if wanted is None:
        return transformers.AutoModel
    if inspect.isclass(wanted) and hasattr(wanted, "from_pretrained"):
        return wanted
    if not isinstance(wanted, str):
        got, expected = f"an object of {wanted.__class__.__name__}", "a model class of transformers, or the name of one"
        do = 'from_hf(path, "AutoModelForCausalLM")'
        raise fail(ArgumentError, where or "from_hf(type=...)", got=got, expected=expected, do=do)
    model_class = getattr(transformers, wanted, None)
    if _is_model_class(model_class):
        return model_class
    similar = difflib.get_close_matches(wanted, dir(transformers), n=9)
    models = [name for name in similar if _is_model_class(getattr(transformers, name, None))][:3]
    do = "use the name of a model class"
    if models:  # in a YAML file, names need no quotes
        suggestions = models if where else map(repr, models)
        do = f"write {' or '.join(suggestions)}"
    raise fail(
        ArgumentError,
        where or f"from_hf(type={wanted!r})",
        got=f"{wanted!r}, which is not a model class of transformers {transformers.__version__}",
        expected="a class, or the name of one, such as 'AutoModelForSequenceClassification'",
        do=do,
    )


def _is_model_class(value: object) -> bool:
    from transformers import PreTrainedModel

    is_model = inspect.isclass(value) and issubclass(value, PreTrainedModel)
    return is_model or getattr(value, "__name__", "").startswith(("AutoModel", "AutoBackbone"))


def require_model_folder(path: str, where: str | None = None) -> None:
    """Reject what cannot be a model before transformers requests it from the hub.

    Args:
        path: A model folder, or a name on the hub.
        where: Its location, for error messages; None only names the folder.

    Raises:
        FileNotFoundError: It is neither.
    """
    # On the hub, a name is `model` or `owner/model`.
    is_hub_name = path.count("/") <= 1 and not path.startswith((".", "/", "~"))
    folder = Path(path)
    if (folder / "config.json").is_file() or (is_hub_name and not folder.exists()):
        return
    if folder.suffix in (".yaml", ".yml", ".json") and folder.is_file():
        do = f"AcceleratorModule.from_hps({str(folder)!r}), if these are hyper-parameters with a section `model`"
    else:
        siblings = []
        if folder.parent.is_dir():
            siblings = [sibling.name for sibling in folder.parent.iterdir() if sibling.is_dir()]
        near = nearest(folder.name, siblings)
        do = f"check the spelling, and the current working directory: {Path.cwd()}"
        # The nearest name is the same one if the folder is there, but is no model.
        if near and near != folder.name:
            do = f"did you mean {folder.parent / near}? If not, {do}"
    got = "no such folder"
    if folder.exists():
        got = "a folder without config.json" if folder.is_dir() else "a file"
    raise fail(
        ArgumentFileError,
        f"{where}: {path}" if where else f"model folder {path!r}",
        got=got,
        expected="a folder with config.json and weights, as written by save_pretrained or a Trainer",
        do=do,
    )


# ---- Recomputing activations in the backward pass instead of storing them.


def enable_gradient_checkpointing(model: Any, kwargs: Mapping[str, Any] | None = None) -> None:
    """Store only the inputs of a model's layers, and recompute the rest in the backward pass.

    Non-reentrant unless `kwargs` override it: this works with DistributedDataParallel, with `no_sync`, and with frozen
    inputs.

    Args:
        model: A transformers or PEFT model, without the wrapper of the launch.
        kwargs: For `torch.utils.checkpoint.checkpoint`, such as `preserve_rng_state=False`.

    Source: `PreTrainedModel.activation_checkpointing_enable` of transformers 5.23.
    """
    if not hasattr(model, "activation_checkpointing_enable") and not hasattr(model, "gradient_checkpointing_enable"):
        raise _unable(model, "no method `activation_checkpointing_enable`")
    try:
        # It also lets gradients flow through frozen embeddings.
        checkpoint_activations(model, {"use_reentrant": False, **(kwargs or {})})
    except ValueError as error:
        raise _unable(model, str(error)) from error


def _unable(model: Any, got: str) -> ArgumentError:
    where = f"Trainer(gradient_checkpointing=...) with {type(model).__name__}"
    do = "leave it out, and call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in the model's forward"
    return fail(ArgumentError, where, got=got, expected="a transformers or PEFT model that supports it", do=do)
