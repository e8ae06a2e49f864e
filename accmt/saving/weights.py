"""Writing the weights of a model into its folder, so that a loader finds the old ones or the new, never a mixture."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import safetensors.torch
import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor

from accmt.errors import SavingError, explain
from accmt.files import follow_umask, fsync_file, fsync_folder, staging_folder
from accmt.saving.layout import (
    ADAPTER_CONFIG,
    ADAPTER_NAMES,
    ENTRY_NAMES,
    PICKLE,
    SAFETENSORS,
    WeightsFormat,
    remove_unnamed_shards,
)
from accmt.saving.state_dict import find_tied, give_own_memory, plain_names, require_dense_tensors

SHARED_KEY = "accmt.shared"
DIGEST_KEY = "accmt.digest"

WriteOthers = Callable[[Path], object]


@dataclass(frozen=True)
class SavedWeights:
    """What `save_weights` wrote.

    Attributes:
        digest: Fingerprint of the names, values and split of the weights (xxh3, 16 hexadecimal digits).
        files: Names of the files in the folder, the one that a loader starts from last.
    """

    digest: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """The files of one save: `shards` (one of them being `entry` if it is the only one) and the index, if any."""

    digest: str
    entry: str
    shards: dict[str, dict[str, Tensor]]
    metadata: dict[str, str]
    index: dict[str, Any] | None = None


def save_weights(
    state_dict: Mapping[str, Tensor],
    folder: Path,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    write_others: WriteOthers | None = None,
) -> SavedWeights:
    """Replace the weights in `folder` by `state_dict`.

    At every moment, a kill or a full disk included, a loader that looks into the folder finds the old weights or the
    new. Names lose what `torch.compile` and data parallelism put in front. Tensors that are one and the same view are
    written once and tied again by `load_weights`. Files other than weights are not touched.

    Args:
        max_shard_size: Largest size of one file, in bytes or as "10GB"; a larger tensor has a file of its own.
        safe_serialization: `model*.safetensors` if True, `pytorch_model*.bin` if False.
        write_others: Writes the files that go with the weights into the folder it is given; they become visible
            together with them, or not at all.

    Raises:
        WeightsError: `state_dict` is empty, or holds what a file cannot hold.
        OSError: The files could not be written (`SavingError` where the library names no cause). The old weights stand.

    Processes: main only.
    """
    named = _name_plainly(state_dict)
    tied = find_tied(named)
    tensors = give_own_memory({name: tensor for name, tensor in named.items() if name not in tied})
    plan = _plan_files(tensors, tied, SAFETENSORS if safe_serialization else PICKLE, max_shard_size)
    return _save(plan, folder, write_others)


def save_adapter(
    state_dict: Mapping[str, Tensor],
    folder: Path,
    *,
    safe_serialization: bool = True,
    write_others: WriteOthers,
) -> SavedWeights:
    """Replace the weights in `folder` by those of an adapter, in the one file that PEFT looks for.

    Processes: main only.
    """
    tensors = give_own_memory(_name_plainly(state_dict))
    name = ADAPTER_NAMES[0 if safe_serialization else 1]
    digest = _fingerprint(tensors, {name: list(tensors)}, {})
    plan = _Plan(digest, ADAPTER_CONFIG, {name: tensors}, {"format": "pt", DIGEST_KEY: digest})
    return _save(plan, folder, write_others)


def _name_plainly(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    require_dense_tensors(state_dict)
    names = plain_names(state_dict)
    return {names[name]: tensor for name, tensor in state_dict.items()}


def _save(plan: _Plan, folder: Path, write_others: WriteOthers | None) -> SavedWeights:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with staging_folder(folder, "weights") as staged:
            _write_files(plan, staged)
            if write_others is not None:
                write_others(staged)
            others = [name for name in list_files(staged) if name not in plan.shards]
            publish(staged, folder, plan.entry)
    finally:
        remove_unnamed_shards(folder)
    return SavedWeights(plan.digest, tuple(dict.fromkeys([*plan.shards, *others, plan.entry])))


def _plan_files(
    tensors: dict[str, Tensor], tied: dict[str, str], form: WeightsFormat, max_shard_size: int | str
) -> _Plan:
    if form is PICKLE:  # torch.save itself keeps what is tied
        tensors = tensors | {name: tensors[kept] for name, kept in tied.items()}
        tied = {}
    split = split_torch_state_dict_into_shards(tensors, filename_pattern="{suffix}", max_shard_size=max_shard_size)
    digest = _fingerprint(tensors, split.filename_to_tensors, tied)
    file_of = {
        suffix: form.shard(digest, suffix) if split.is_sharded else form.single for suffix in split.filename_to_tensors
    }
    metadata = {"format": "pt", DIGEST_KEY: digest} | ({SHARED_KEY: json.dumps(tied)} if tied else {})
    index = {
        "metadata": {**split.metadata, DIGEST_KEY: digest},
        "weight_map": {name: file_of[suffix] for name, suffix in sorted(split.tensor_to_filename.items())},
    }
    return _Plan(
        digest=digest,
        entry=form.index if split.is_sharded else form.single,
        shards={
            file_of[suffix]: {name: tensors[name] for name in names}
            for suffix, names in split.filename_to_tensors.items()
        },
        metadata=metadata,
        index=index if split.is_sharded else None,
    )


def _fingerprint(tensors: Mapping[str, Tensor], split: Mapping[str, list[str]], tied: Mapping[str, str]) -> str:
    # The split belongs to it: two splits of the same weights must not share a file name.
    digest = xxhash.xxh3_64(json.dumps([split, tied]).encode())
    for names in split.values():
        for name in names:
            tensor = tensors[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_files(plan: _Plan, staged: Path) -> None:
    for name, tensors in plan.shards.items():
        write_tensors(tensors, staged / name, plan.metadata)
    if plan.index is not None:
        (staged / plan.entry).write_text(json.dumps(plan.index, indent=2) + "\n", encoding="utf-8")


def write_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    """Write tensors into one file of a folder in which a save is put together, in the format that its name says."""
    try:
        if path.suffix == SAFETENSORS.extension:
            safetensors.torch.save_file(tensors, path, metadata=metadata)
        else:
            torch.save(tensors, path)
    except (SafetensorError, RuntimeError) as error:  # what both libraries make of a full disk
        message = explain(
            str(path.parent.parent),
            f"{path.name} could not be written: {error}",
            f"room for {sum(tensor.nbytes for tensor in tensors.values()):,} bytes more",
            "free space on that disk; the weights saved before are untouched",
        )
        raise SavingError(message) from error


def publish(staged: Path, folder: Path, entry: str) -> None:
    """Move the files of a complete save from `staged` into `folder`, and remove what another loader would start from.

    The file that a loader starts from, `entry`, is moved last, so that one rename changes what is read.
    """
    files = list_files(staged)
    for name in files:
        follow_umask(staged / name)
        fsync_file(staged / name)
    for name in files:
        if name != entry:
            _move(staged / name, folder / name)
    for parent in {(folder / name).parent for name in files}:
        fsync_folder(parent)  # the entry must not be durable before the files that it names
    _move(staged / entry, folder / entry)
    fsync_folder(folder)
    _remove_other_entries(folder, keep={entry, *files})


def _remove_other_entries(folder: Path, keep: Collection[str]) -> None:
    # From the last that a loader looks for to the first: so the one it reads changes once, from the old to the new.
    for name in (*reversed(ENTRY_NAMES), *reversed(ADAPTER_NAMES)):
        if name not in keep:
            (folder / name).unlink(missing_ok=True)
    fsync_folder(folder)


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files in `folder` and its folders, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def remove_leftovers(folder: Path, before: Collection[str], written: Collection[str]) -> None:
    """Delete what the save before wrote and this one did not, such as the `config.json` of another kind of model."""
    for name in set(before) - set(written):
        path = PurePath(name)  # of a file that anybody may have written: it must not lead out of the folder
        if not path.is_absolute() and ".." not in path.parts:
            (folder / path).unlink(missing_ok=True)


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
