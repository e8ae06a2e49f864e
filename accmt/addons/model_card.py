"""The model card: `README.md` in a model folder, with results, samples, hyper-parameters and the command."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from accmt.data.base import length_of
from accmt.huggingface.model_kinds import is_peft_model, is_transformers_model, without_adapter
from accmt.run import Run
from accmt.saving.model_folder import CARD_MARK, CARD_NAME, replace_own_file
from accmt.saving.selection import METRIC_NAMES
from accmt.secrets import hide, hide_text, write_command
from accmt.sharded_tensors import class_of
from accmt.version import __version__

_SAYS_NOTHING = re.compile(r"(best|checkpoint|final|last|model|out|output|pretrained|save|step|weights)([-_+.].*)?|\d+")
_OF_HUB = re.compile(r"hf://datasets/([^@]+)@")
_READERS = ("arrow", "audiofolder", "csv", "generator", "imagefolder", "json", "pandas", "parquet", "sql", "text")
"""Names of `datasets` for data loaded from files, which are no data sets on a hub."""


def write_card(run: Run, folder: Path) -> None:
    """Write `README.md` into a model folder, unless there is one by the user.

    Processes: main only.
    """
    state, model = run.state, run.unwrapped_model
    # Data sets and metrics have names on a hub.
    read = [loader.source.dataloader.dataset for loader in (run.train_loader, *run.val_loaders.values())]
    names = {name for data in read if (name := _find_dataset(data).get("dataset_type"))}
    metrics = sorted({name.split("__")[0] for name in state.metrics} & set(METRIC_NAMES))
    on_hub = {key: values for key, values in (("datasets", sorted(names)), ("metrics", metrics)) if values}
    loss = run.running_averages.epoch_loss
    losses = {} if loss is None else {run.settings.tracking.train_loss_metric_name: loss}
    base = base_model_of(model)
    known: dict[str, Any] = {}
    if base is not None:
        known["base model"] = _name_of_path(Path(base)) if Path(base).exists() else base
    write_model_card(
        folder,
        head={**describe_model(model), "tags": ["accmt"], **on_hub, **_find_results(run, folder)},
        sections={
            "Results": {**losses, **state.metrics, **state.best},
            "Model": {
                "model": class_of(model).__name__,
                **known,
                "parameters": sum(p.numel() for p in model.parameters()),
            },
            "Samples": _count_samples(run),
            "Hyper-parameters": run.settings.hps.get_config(run.replaced_hps()),
            "Training": _describe_training(run),
            "Command": write_command(["python", *sys.argv]),
        },
    )


def write_model_card(folder: Path, *, head: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any] | str]) -> bool:
    """Write `README.md`, unless there is one that accmt did not write.

    Args:
        head: Metadata for the hub, as YAML at the top, such as `library_name` and `base_model`.
        sections: By heading: a table of names and values, or a command. Empty sections are omitted.

    Processes: main only.
    """
    parts = [f"---\n{yaml.safe_dump(hide(dict(head)), sort_keys=False)}---", CARD_MARK, f"# {folder.resolve().name}"]
    parts += [f"## {heading}\n\n{_write_section(hide(content))}" for heading, content in sections.items() if content]
    return replace_own_file(folder / CARD_NAME, CARD_MARK, hide_text("\n\n".join(parts) + "\n"))


def _write_section(content: Mapping[str, Any] | str) -> str:
    if isinstance(content, str):
        return f"```bash\n{content}\n```"
    rows = [f"| {_write_cell(name)} | {_write_cell(value)} |" for name, value in content.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _write_cell(value: Any) -> str:
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.6g}"
    elif type(value) is int:
        text = f"{value:,}"
    return text.replace("|", "\\|").replace("\n", " ")


def _find_dataset(data: Any) -> dict[str, Any]:
    """Return the name, configuration and split of a data set of a hub, as a result names them; {} for any other."""
    data = getattr(data, "dataset", data)
    info: Any = getattr(data, "info", None)
    name = getattr(info, "dataset_name", None)
    if not name or name in _READERS:
        return {}
    for url in info.download_checksums or ():  # the name alone lacks its owner
        if repository := _OF_HUB.match(url):
            name = repository[1]
    named = {"dataset_type": name, "dataset_config": getattr(info, "config_name", None), "dataset_split": data.split}
    return {key: str(value) for key, value in named.items() if value is not None}


def _find_results(run: Run, folder: Path) -> dict[str, Any]:
    """Return the last results as `model-index`, named as by transformers' Trainer; {} without a task or a metric."""
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    task = describe_model(run.unwrapped_model).get("pipeline_tag")
    if task is None:  # which each result requires
        return {}
    from transformers.modelcard import TASK_TAG_TO_NAME_MAPPING

    results = []
    task_name = TASK_TAG_TO_NAME_MAPPING.get(task, task.replace("-", " ").title())
    for key, loader in run.val_loaders.items():
        # The Hub identifies a set by its type, configuration and split.
        dataset = _find_dataset(loader.source.dataloader.dataset)
        dataset = dataset or {"dataset_type": "unknown", "dataset_split": key or "validation"}
        dataset["dataset_name"] = key or dataset["dataset_type"].replace("unknown", "validation")
        suffix = f"__{key}" if key else ""
        for name, value in run.state.metrics.items():
            metric = name.removesuffix(suffix)
            if name.endswith(suffix) and metric != run.settings.tracking.val_loss_metric_name and math.isfinite(value):
                metric_name = " ".join(word.capitalize() for word in metric.split("_"))
                kinds = {"task_type": task, "task_name": task_name, "metric_type": metric, "metric_name": metric_name}
                results.append(EvalResult(**kinds, **dataset, metric_value=value))
    return {"model-index": eval_results_to_model_index(folder.resolve().name, results)} if results else {}


def _count_samples(run: Run) -> dict[str, Any]:
    loaders = {"training": run.train_loader}
    loaders |= {f"validation {name}".strip(): loader for name, loader in run.val_loaders.items()}
    counted = {name: length_of(loader.source.dataloader.dataset) for name, loader in loaders.items()}
    return {name: number for name, number in counted.items() if number is not None}


def _name_of_path(path: Path) -> str:
    """Return a folder's name, including its parents if the name alone is generic, such as "model"."""
    parts = path.resolve().parts
    in_cache = [part for part in parts if part.startswith("models--")]  # of the hub's cache: models--<owner>--<name>
    if in_cache:
        return in_cache[-1].removeprefix("models--").replace("--", "/")
    first = next((index for index in reversed(range(len(parts))) if not _SAYS_NOTHING.fullmatch(parts[index])), 0)
    return "/".join(parts[first:])


def _describe_training(run: Run) -> dict[str, Any]:
    state, settings = run.state, run.settings
    samples = run.samples_per_step(state.epoch)
    unknown = f"decided by {settings.optimization.window_maker or 'the DataLoader'}"
    return {
        "steps": state.global_step,
        # An evaluation at the end of an epoch happens before the epoch is counted.
        "epochs finished": state.epoch + int(state.train_step > 0 and state.is_last_training_batch),
        "training samples seen": state.samples_seen,
        "samples of a step": unknown if samples is None else samples,
        "processes": state.num_processes,
        "mixed precision": str(run.accelerator.mixed_precision),
        "seed": run.seed,
        "accmt": __version__,
        "torch": torch.__version__,
    }


def describe_model(model: Any) -> dict[str, Any]:
    """Return the library of a model, without wrappers, its task and its base model, for a model card's metadata.

    A model that was built from a local folder has no `base_model`, since nobody else could find it, but the license in
    its card.
    """
    if not is_peft_model(model) and not is_transformers_model(model):
        return {"library_name": "pytorch"}
    library = "peft" if is_peft_model(model) else "transformers"
    from transformers.modelcard import TASK_MAPPING

    description: dict[str, Any] = {"library_name": library}
    name = type(without_adapter(model)).__name__
    classes: Mapping[str, Any] = TASK_MAPPING
    for task, models in classes.items():
        if name in models.values():
            description["pipeline_tag"] = task
            break
    base = base_model_of(model)
    if base is None:
        return description
    card = Path(base) / CARD_NAME
    if card.is_file():
        from huggingface_hub.repocard import metadata_load

        with suppress(ValueError, yaml.YAMLError):  # no metadata that anybody could read
            known = metadata_load(card) or {}
            description |= {key: known[key] for key in ("license", "license_name", "license_link") if key in known}
    is_of_hub = not base.startswith((".", "/", "~")) and base.count("/") <= 1
    if is_of_hub and not Path(base).exists():
        description["base_model"] = base
    return description


def base_model_of(model: Any) -> str | None:
    """Return the name or path that a model was loaded from by `from_pretrained`, or None."""
    if is_peft_model(model):
        name: str | None = model.active_peft_config.base_model_name_or_path
        model = model.get_base_model()
        if name:
            return name
    if not is_transformers_model(model):
        return None
    return model.name_or_path or None  # "" for a model that was built from a configuration
