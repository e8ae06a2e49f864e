"""Writing the weights of a model into its folder, so that a loader finds the old ones or the new, never a mixture."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import safetensors.torch
import torch
import xxhash
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
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
from accmt.saving.streaming import StreamedFile

SHARED_KEY = "accmt.shared"
DIGEST_KEY = "accmt.digest"
_DIGITS = 16

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
    """The files of one save: `shards` (one of them being `entry` if it is the only one) and the index, if any.

    Files that are `written` elsewhere on the disk are moved into their place.
    """

    digest: str
    entry: str
    shards: dict[str, dict[str, Tensor]]
    metadata: dict[str, str]
    index: dict[str, Any] | None = None
    file_of: dict[str, str] = field(default_factory=dict)
    written: dict[str, Path] = field(default_factory=dict)


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


def stream_weights(
    outlines: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor],
    folder: Path,
    *,
    max_shard_size: int | str = "10GB",
    write_others: WriteOthers | None = None,
) -> SavedWeights:
    """Do what `save_weights` does, in safetensors files, with one tensor in memory at a time.

    Args:
        outlines: Tensors without memory, by name; weights that are tied have one.
        fetch: Returns the tensor of a name.

    Processes: main only.
    """
    names = {plain: name for name, plain in plain_names(outlines).items()}
    named = {plain: outlines[name] for plain, name in names.items()}
    tied = find_tied(named)
    split = _split({name: outline for name, outline in named.items() if name not in tied}, max_shard_size)
    digest = xxhash.xxh3_64(_describe_split(split, tied))
    folder.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder, "parts") as parts:
        files = {}
        for number, (suffix, members) in enumerate(split.filename_to_tensors.items()):
            own = {name: named[name] for name in members}
            files[suffix] = StreamedFile(parts / str(number), own, _metadata("0" * _DIGITS, tied))
            files[suffix].write(lambda plain: fetch(names[plain]), digest)
        plan = _name_files(split, digest.hexdigest(), tied, SAFETENSORS)
        for suffix, file in files.items():
            file.seal(plan.metadata)
            plan.written[plan.file_of[suffix]] = file.path
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
    split = StateDictSplit(metadata={}, filename_to_tensors={name: list(tensors)}, tensor_to_filename={})
    digest = _fingerprint(tensors, split, {})
    plan = _Plan(digest, ADAPTER_CONFIG, {name: tensors}, _metadata(digest, {}))
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
    split = _split(tensors, max_shard_size)
    plan = _name_files(split, _fingerprint(tensors, split, tied), tied, form)
    for suffix, names in split.filename_to_tensors.items():
        plan.shards[plan.file_of[suffix]] = {name: tensors[name] for name in names}
    return plan


def _split(tensors: dict[str, Tensor], max_shard_size: int | str) -> StateDictSplit:
    return split_torch_state_dict_into_shards(tensors, filename_pattern="{suffix}", max_shard_size=max_shard_size)


def _name_files(split: StateDictSplit, digest: str, tied: Mapping[str, str], form: WeightsFormat) -> _Plan:
    file_of = {
        suffix: form.shard(digest, suffix) if split.is_sharded else form.single for suffix in split.filename_to_tensors
    }
    index = {
        "metadata": {**split.metadata, DIGEST_KEY: digest},
        "weight_map": {name: file_of[suffix] for name, suffix in sorted(split.tensor_to_filename.items())},
    }
    return _Plan(
        digest=digest,
        entry=form.index if split.is_sharded else form.single,
        shards={name: {} for name in file_of.values()},
        metadata=_metadata(digest, tied),
        index=index if split.is_sharded else None,
        file_of=file_of,
    )


def _metadata(digest: str, tied: Mapping[str, str]) -> dict[str, str]:
    return {"format": "pt", DIGEST_KEY: digest} | ({SHARED_KEY: json.dumps(tied)} if tied else {})


def _describe_split(split: StateDictSplit, tied: Mapping[str, str]) -> bytes:
    return json.dumps([split.filename_to_tensors, tied]).encode()


def _fingerprint(tensors: Mapping[str, Tensor], split: StateDictSplit, tied: Mapping[str, str]) -> str:
    # The split belongs to it: two splits of the same weights must not share a file name.
    digest = xxhash.xxh3_64(_describe_split(split, tied))
    for names in split.filename_to_tensors.values():
        for name in names:
            tensor = tensors[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_files(plan: _Plan, staged: Path) -> None:
    for name, tensors in plan.shards.items():
        if name in plan.written:
            plan.written[name].rename(staged / name)
        else:
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
