"""Writing the weights of a model into its folder, so that a loader finds the old ones or the new, never a mixture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import xxhash
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor

from accmt.errors import SavingError, WeightsError, explain
from accmt.files import fsync_file, fsync_folder, staging_folder
from accmt.saving.layout import ENTRY_NAMES, PICKLE, SAFETENSORS, WeightsFormat, remove_unnamed_shards
from accmt.saving.tensors import find_tied, give_own_memory, plain_names, require_dense_tensors

SHARED_KEY = "accmt.shared"
DIGEST_KEY = "accmt.digest"


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
    index: dict[str, Any] | None


def save_weights(
    state_dict: Mapping[str, Tensor],
    folder: Path,
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    expected_bytes: int | None = None,
) -> SavedWeights:
    """Replace the weights in `folder` by `state_dict`.

    At every moment, a kill or a full disk included, a loader that looks into the folder finds the old weights or the
    new. Names lose what `torch.compile` and data parallelism put in front. Tensors that are one and the same view are
    written once and tied again by `load_weights`. Files other than weights are not touched.

    Args:
        state_dict: The full weights, by name.
        folder: The model folder; made if it is missing.
        max_shard_size: Largest size of one file, in bytes or as "10GB"; a larger tensor has a file of its own.
        safe_serialization: `model*.safetensors` if True, `pytorch_model*.bin` if False.
        expected_bytes: Smallest size of all tensors together that can be right; None does not check.

    Returns:
        The digest and the names of the files.

    Raises:
        WeightsError: `state_dict` is empty, smaller than `expected_bytes`, or holds what a file cannot hold.
        OSError: The files could not be written (`SavingError` where the library names no cause). The old weights stand.

    Processes:
        Main only.
    """
    require_dense_tensors(state_dict)
    names = plain_names(state_dict)
    named = {names[name]: tensor for name, tensor in state_dict.items()}
    tied = find_tied(named)
    tensors = give_own_memory({name: tensor for name, tensor in named.items() if name not in tied})
    _require_size(tensors, expected_bytes, folder)
    plan = _plan_files(tensors, tied, SAFETENSORS if safe_serialization else PICKLE, max_shard_size)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with staging_folder(folder, "weights") as staged:
            _write_files(plan, staged)
            _publish(plan, staged, folder)
    finally:
        remove_unnamed_shards(folder)
    return SavedWeights(plan.digest, tuple(dict.fromkeys([*plan.shards, plan.entry])))


def _require_size(tensors: Mapping[str, Tensor], expected_bytes: int | None, folder: Path) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    if expected_bytes is None or size >= expected_bytes:
        return
    message = explain(
        f"weights for {folder}",
        f"{size:,} bytes in {len(tensors)} tensors",
        f"at least {expected_bytes:,} bytes",
        "gather the shards of all processes before saving (ZeRO-3 and FSDP keep empty ones on each)",
    )
    raise WeightsError(message)


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
        _write_shard(tensors, staged / name, plan.metadata)
    if plan.index is not None:
        (staged / plan.entry).write_text(json.dumps(plan.index, indent=2) + "\n", encoding="utf-8")
    for path in staged.iterdir():
        fsync_file(path)


def _write_shard(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
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


def _publish(plan: _Plan, staged: Path, folder: Path) -> None:
    for name in plan.shards.keys() - {plan.entry}:
        (staged / name).replace(folder / name)
    fsync_folder(folder)
    (staged / plan.entry).replace(folder / plan.entry)
    fsync_folder(folder)
    # From the last that a loader looks for to the first: so the one it reads changes once, from the old to the new.
    for name in reversed(ENTRY_NAMES):
        if name != plan.entry:
            (folder / name).unlink(missing_ok=True)
    fsync_folder(folder)
