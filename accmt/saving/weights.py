"""Writes the weights of a model into its folder, so that a loader finds the old or the new weights, never a mixture."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

import safetensors.torch
import torch
import xxhash
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor, nn

from accmt.errors import SavingError, WeightsError, fail
from accmt.files import follow_umask, fsync_file, fsync_folder, staging_folder
from accmt.libraries.private_names import is_traceable_wrapper_subclass
from accmt.processes import broadcast_object, is_main_process, run_on_main_process
from accmt.sharded_tensors import bytes_of, is_dtensor, make_whole

# ---- The names of weight files in a model folder, and which of them a loader would read.


@dataclass(frozen=True)
class WeightsFormat:
    """One of the two formats for weights."""

    stem: str
    extension: str

    @property
    def single(self) -> str:
        return f"{self.stem}{self.extension}"

    @property
    def index(self) -> str:
        """Name of the file that maps weights to shards."""
        return f"{self.single}.index.json"

    def shard(self, digest: str, suffix: str) -> str:
        """Name of one shard; the digest makes it unique among saves."""
        return f"{self.stem}-{digest}{suffix}{self.extension}"


SAFETENSORS = WeightsFormat("model", ".safetensors")
PICKLE = WeightsFormat("pytorch_model", ".bin")

ADAPTER_CONFIG = "adapter_config.json"
"""The file that PEFT and transformers read first in an adapter's folder."""

ADAPTER_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
"""The weight files of an adapter, in the order in which PEFT looks for them."""

ENTRY_NAMES = (ADAPTER_CONFIG, SAFETENSORS.single, SAFETENSORS.index, PICKLE.single, PICKLE.index)
"""The files that a loader starts from, in the order in which transformers looks for them; the first match is read."""

_OUR_SHARD = re.compile(r"(model|pytorch_model)-[0-9a-f]{16}-\d{5}-of-\d{5}\.(safetensors|bin)")


def find_entry(folder: Path) -> Path | None:
    """Return the file that a loader would start from, or None if `folder` has no weights."""
    for name in ENTRY_NAMES:
        if (folder / name).is_file():
            return folder / name
    return None


def files_of(entry: Path) -> list[str]:
    """Return the sorted names of the files with the weights of `entry`.

    A damaged index raises a ValueError (invalid JSON) or a KeyError (not an index).
    """
    if entry.name == ADAPTER_CONFIG:
        for name in ADAPTER_NAMES:
            if (entry.parent / name).is_file():
                return [name]
        return [ADAPTER_NAMES[0]]
    if not entry.name.endswith(".json"):
        return [entry.name]
    return sorted(set(json.loads(entry.read_text(encoding="utf-8"))["weight_map"].values()))


def weight_files_in(folder: Path) -> set[str]:
    """Return the names of all weight files, of any entry."""
    names: set[str] = set()
    for entry in ENTRY_NAMES:
        if (folder / entry).is_file():
            names.update(files_of(folder / entry))
    return names


def remove_unnamed_shards(folder: Path) -> None:
    """Delete shards by accmt that no index in `folder` lists; all other files are kept."""
    named = weight_files_in(folder)
    for path in folder.iterdir():
        if _OUR_SHARD.fullmatch(path.name) and path.name not in named:
            path.unlink()


# ---- What to write of a state dict: names without wrappers, and each tensor once.


_COMPILED = "_orig_mod"
_PARALLEL = "module."


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name of a state dict to the name without the prefixes of `torch.compile` and data parallelism.

    `_orig_mod` is removed at any position, because submodules can be compiled too. A leading `module.` is removed only
    if every name has it, because a wrapper encloses the whole model.
    """
    wrapped = list(names)
    plain: list[str] = []
    for name in wrapped:
        parts = [part for part in name.split(".") if part != _COMPILED]
        plain.append(".".join(parts))
    while plain and all(name.startswith(_PARALLEL) for name in plain):
        plain = [name.removeprefix(_PARALLEL) for name in plain]
    return dict(zip(wrapped, plain, strict=True))


def find_tied(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name whose tensor is the same view as an earlier one's to that earlier name."""
    first_names: dict[Hashable, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in state_dict.items():
        first = first_names.setdefault(_view(tensor), name)
        if first != name:
            tied[name] = first
    return tied


def give_own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous, each in separate memory; copies only where necessary."""
    owners: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage()
        # torch.save writes the whole memory of a view, and safetensors rejects tensors that share it.
        if memory.nbytes() != dense.nbytes or memory.data_ptr() in owners:
            dense = dense.clone()
        owners.add(dense.untyped_storage().data_ptr())
        separate[name] = dense
    return separate


def require_dense_tensors(state_dict: Mapping[str, object]) -> None:
    """Reject every value that a weight file cannot hold: not a tensor, sparse, or without memory."""
    faults = [f"{name}: {_kind(value)}" for name, value in state_dict.items() if not _is_dense(value)]
    if faults or not state_dict:  # extra state, a sparse embedding, shards that were not gathered
        raise fail(
            WeightsError,
            "weights to save",
            got="; ".join(faults) or "no tensors",
            expected="dense tensors that hold data",
            do="keep other values out of the state dict (`get_extra_state`, sparse parameters), gather shards first, "
            "or pass `model_saving=None`",
        )


def require_storable(state_dict: Mapping[str, object], *, safe_serialization: bool) -> None:
    """Reject early what `require_dense_tensors` rejects, and dtypes that safetensors does not support."""
    require_dense_tensors(state_dict)
    if not safe_serialization:
        return
    dtypes = {value.dtype: name for name, value in state_dict.items() if isinstance(value, Tensor)}
    for dtype, name in dtypes.items():
        try:
            safetensors.torch.save({name: torch.empty(1, dtype=dtype)})
        except (KeyError, ValueError, SafetensorError) as error:
            got, do = f"a tensor of {dtype}", "convert it, or pass `safe_serialization=False`"
            raise fail(WeightsError, name, got=got, expected="a dtype that safetensors supports", do=do) from error


def _view(tensor: Tensor) -> Hashable:
    anything: object = tensor
    if is_traceable_wrapper_subclass(anything):  # a DTensor among them
        return id(tensor)  # a wrapper has no memory itself
    address = tensor.untyped_storage().data_ptr()
    if address == 0 or tensor.numel() == 0:
        return id(tensor)  # without memory nothing is shared
    return tensor.device, address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_dense(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return is_dtensor(value) or not is_traceable_wrapper_subclass(value)


def _kind(value: object) -> str:
    if is_traceable_wrapper_subclass(value):
        return f"a {type(value).__name__}, which wraps other tensors"
    if isinstance(value, Tensor):
        return f"{value.layout} on {value.device}"
    return type(value).__name__


# ---- Streaming the weights of a sharded model: no process ever holds the whole model.
#
# The main process decides which tensor it needs next; the others follow, because each tensor is gathered from all.


T = TypeVar("T")

_END = ""  # torch accepts no parameter or buffer without a name
_CHUNK = 2**24


class WholeState(dict[str, Tensor]):
    """A full state dict on each process."""

    def run_on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the main process with the tensors, and return its result on every process.

        Processes: collective.

        Raises:
            Exception: Any error of the action, on every process.
        """
        return run_on_main_process(action)


class ShardedState:
    """A state dict whose tensors are gathered on demand.

    Attributes:
        outlines: Tensors without memory, by name; tied names share one.
    """

    def __init__(self, model: nn.Module) -> None:
        state_dict: dict[str, Tensor] = model.state_dict(keep_vars=True)  # keeps tied weights as one object
        self._tensors = {name: tensor.detach() for name, tensor in state_dict.items()}
        outlines: dict[int, Tensor] = {}
        self.outlines: dict[str, Tensor] = {}
        for name, tensor in state_dict.items():
            outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            self.outlines[name] = outlines.setdefault(id(tensor), outline)

    def fetch(self, name: str) -> Tensor:
        """Return a full tensor on the CPU.

        Processes: main only, within `run_on_main`.
        """
        _announce(name)
        return make_whole(self._tensors[name]).cpu()

    def fetch_outlined(self, outlines: Mapping[str, Tensor]) -> Callable[[str], Tensor] | None:
        """Return a function that fetches tensors by the names in `outlines`; None if it has tensors of other states."""
        names = {id(outline): name for name, outline in self.outlines.items()}
        for outline in outlines.values():
            if id(outline) not in names:
                return None
        return lambda name: self.fetch(names[id(outlines[name])])

    def fetch_all(self) -> dict[str, Tensor]:
        """Return all tensors in full, for saves that have to compute from them."""
        return {name: self.fetch(name) for name in self._tensors}

    def run_on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the main process with full tensors, and return its result on every process.

        Processes: collective.

        Raises:
            Exception: Any error of the action, on every process.
        """
        if not is_main_process():
            # Gather with the main process whatever it fetches; the result is used only there.
            while (name := _announce(_END)) != _END:
                make_whole(self._tensors[name])

        def act() -> T:
            try:
                return action()
            finally:  # also after an error: the others wait for the next name
                _announce(_END)

        return run_on_main_process(act)


def _announce(name: str) -> str:
    """Return the main process's name on every process."""
    return broadcast_object(name)


class StreamedFile:
    """A safetensors file that is written tensor by tensor; its metadata is written last.

    Args:
        path: The file.
        outlines: Its tensors by name, in this order.
        metadata: Placeholder metadata with the final length.

    Source: https://github.com/huggingface/safetensors#format
    """

    def __init__(self, path: Path, outlines: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._outlines = outlines
        self._begin = len(self._header(metadata))

    def write(self, fetch: Callable[[str], Tensor], digest: xxhash.xxh3_64) -> None:
        """Write every tensor, and update the digest."""
        with self.path.open("wb") as file:
            file.seek(self._begin)  # the header is written last: until then, nobody can read the file
            for name in self._outlines:
                tensor = fetch(name)
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                data = bytes_of(tensor)
                for start in range(0, len(data), _CHUNK):
                    digest.update(data[start : start + _CHUNK])
                    file.write(data[start : start + _CHUNK])

    def seal(self, metadata: Mapping[str, str]) -> None:
        """Write the header, which comes before the tensors."""
        with self.path.open("r+b") as file:
            file.write(self._header(metadata))

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        end = 0
        for name, outline in self._outlines.items():
            begin, end = end, end + outline.nbytes
            entries[name] = {
                "dtype": _name_of(outline.dtype),
                "shape": list(outline.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # as safetensors does: tensors begin at a multiple of 8
        return len(text).to_bytes(8, "little") + text


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Return the safetensors name of a dtype."""
    data = safetensors.torch.save({"one": torch.empty(1, dtype=dtype)})
    length = int.from_bytes(data[:8], "little")
    name: str = json.loads(data[8 : 8 + length])["one"]["dtype"]
    return name


SHARED_KEY = "accmt.shared"
DIGEST_KEY = "accmt.digest"
_DIGITS = 16

WriteOthers = Callable[[Path], object]


@dataclass(frozen=True)
class SavedWeights:
    """The result of `save_weights`.

    Attributes:
        digest: Fingerprint of the names, values and sharding of the weights (xxh3, 16 hexadecimal digits).
        files: Names of the files in the folder; the one that a loader starts from is last.
    """

    digest: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """The files of one save: `shards` (a single one is also the `entry`) and the index, if any.

    Files that were `written` elsewhere on the disk are moved into place.
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
    """Replace the weights in `folder` with `state_dict`.

    At any moment, even after a kill or on a full disk, a loader finds the old weights or the new ones. Prefixes of
    `torch.compile` and data parallelism are removed from names. Tensors that are the same view are written once, and
    `load_weights` ties them again. Other files are not changed.

    Args:
        max_shard_size: Maximum size of one file, in bytes or as "10GB"; a larger tensor gets a separate file.
        safe_serialization: `model*.safetensors` if True, `pytorch_model*.bin` if False.
        write_others: Writes the accompanying files into the folder that it receives; they become visible together with
            the weights or not at all.

    Raises:
        WeightsError: `state_dict` is empty, or contains what a file cannot hold.
        OSError: The files could not be written (`SavingError` if the library gives no reason). The old weights remain.

    Processes: main only.
    """
    named = _name_plainly(state_dict)
    tied = find_tied(named)
    distinct = {name: tensor for name, tensor in named.items() if name not in tied}
    tensors = give_own_memory(distinct)
    form = SAFETENSORS
    if not safe_serialization:
        form = PICKLE
        for name, first in tied.items():  # torch.save preserves tied weights itself
            tensors[name] = tensors[first]
        tied = {}
    split = _split(tensors, max_shard_size)
    plan = _name_files(split, _fingerprint(tensors, split, tied), tied, form)
    for suffix, names in split.filename_to_tensors.items():
        plan.shards[plan.file_of[suffix]] = {name: tensors[name] for name in names}
    return _save(plan, folder, write_others)


def stream_weights(
    outlines: Mapping[str, Tensor],
    fetch: Callable[[str], Tensor],
    folder: Path,
    *,
    max_shard_size: int | str = "10GB",
    write_others: WriteOthers | None = None,
) -> SavedWeights:
    """Like `save_weights`, in safetensors files, with one tensor in memory at a time.

    Args:
        outlines: Tensors without memory, by name; tied weights share one.
        fetch: Returns the tensor for a name.

    Processes: main only.
    """
    names, named = {}, {}
    for name, plain in plain_names(outlines).items():
        names[plain], named[plain] = name, outlines[name]
    tied = find_tied(named)
    distinct = {name: outline for name, outline in named.items() if name not in tied}
    split = _split(distinct, max_shard_size)
    digest = xxhash.xxh3_64(_describe_split(split, tied))
    folder.mkdir(parents=True, exist_ok=True)
    with staging_folder(folder, "parts") as parts:
        files = {}
        for number, (suffix, members) in enumerate(split.filename_to_tensors.items()):
            outlines_of_file = {name: named[name] for name in members}
            # The digest is known only after the last tensor, so its place is left free.
            files[suffix] = StreamedFile(parts / str(number), outlines_of_file, _metadata("0" * _DIGITS, tied))
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
    """Replace the weights in `folder` with those of an adapter, in the single file that PEFT looks for.

    Processes: main only.
    """
    tensors = give_own_memory(_name_plainly(state_dict))
    name, pickle_name = ADAPTER_NAMES
    if not safe_serialization:
        name = pickle_name
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
            files = [*plan.shards, *list_files(staged), plan.entry]
            publish(staged, folder, plan.entry)
    finally:  # those of the previous save, or of this one if it failed
        remove_unnamed_shards(folder)
    return SavedWeights(plan.digest, tuple(dict.fromkeys(files)))


def _split(tensors: dict[str, Tensor], max_shard_size: int | str) -> StateDictSplit:
    return split_torch_state_dict_into_shards(tensors, filename_pattern="{suffix}", max_shard_size=max_shard_size)


def _name_files(split: StateDictSplit, digest: str, tied: Mapping[str, str], form: WeightsFormat) -> _Plan:
    entry, index = form.single, None
    file_of = dict.fromkeys(split.filename_to_tensors, form.single)
    if split.is_sharded:
        # Names that no earlier save has: until the index is replaced, a loader still reads the old shards.
        file_of = {suffix: form.shard(digest, suffix) for suffix in split.filename_to_tensors}
        weight_map = {name: file_of[suffix] for name, suffix in sorted(split.tensor_to_filename.items())}
        entry, index = form.index, {"metadata": {**split.metadata, DIGEST_KEY: digest}, "weight_map": weight_map}
    shards: dict[str, dict[str, Tensor]] = {name: {} for name in file_of.values()}
    return _Plan(digest, entry, shards, _metadata(digest, tied), index, file_of)


def _metadata(digest: str, tied: Mapping[str, str]) -> dict[str, str]:
    metadata = {"format": "pt", DIGEST_KEY: digest}  # "format" as transformers writes it
    if tied:
        metadata[SHARED_KEY] = json.dumps(tied)
    return metadata


def _describe_split(split: StateDictSplit, tied: Mapping[str, str]) -> bytes:
    return json.dumps([split.filename_to_tensors, tied]).encode()


def _fingerprint(tensors: Mapping[str, Tensor], split: StateDictSplit, tied: Mapping[str, str]) -> str:
    # Includes the sharding: two shardings of the same weights must not share a file name.
    digest = xxhash.xxh3_64(_describe_split(split, tied))
    for names in split.filename_to_tensors.values():
        for name in names:
            tensor = tensors[name]
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(bytes_of(tensor))
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
    """Write tensors into one file of a staging folder, in the format of its suffix."""
    try:
        if path.suffix == SAFETENSORS.extension:
            safetensors.torch.save_file(tensors, path, metadata=metadata)
        else:
            torch.save(tensors, path)
    except (SafetensorError, RuntimeError) as error:  # how both libraries report a full disk
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise fail(
            SavingError,
            str(path.parent.parent),
            got=f"{path.name} could not be written: {error}",
            expected=f"space for {size:,} more bytes",
            do="free space on that disk; the weights saved before are untouched",
        ) from error


def publish(staged: Path, folder: Path, entry: str) -> None:
    """Move the files of a complete save from `staged` into `folder`, and remove other entry files.

    The file that a loader starts from, `entry`, is moved last, so that one rename switches the weights.
    """
    files = list_files(staged)
    for name in files:
        follow_umask(staged / name)
        fsync_file(staged / name)
    for name in files:
        if name != entry:
            _move(staged / name, folder / name)
    for parent in {(folder / name).parent for name in files}:
        fsync_folder(parent)  # the entry must not be durable before the files that it lists
    _move(staged / entry, folder / entry)
    fsync_folder(folder)
    # Otherwise, a model saved where an adapter was would be loaded as that adapter. In reverse lookup order, so that
    # what a loader reads changes only once, from the old to the new.
    for name in (*reversed(ENTRY_NAMES), *reversed(ADAPTER_NAMES)):
        if name != entry and name not in files:
            (folder / name).unlink(missing_ok=True)
    fsync_folder(folder)


def list_files(folder: Path) -> list[str]:
    """Return the paths of all files in `folder` and its subfolders, relative to it, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def remove_leftovers(folder: Path, before: Collection[str], written: Collection[str]) -> None:
    """Delete files of the previous save that this one did not write, such as `config.json` of another kind of model."""
    for name in set(before) - set(written):
        if stays_inside(name):
            (folder / name).unlink(missing_ok=True)


def stays_inside(name: str) -> bool:
    """Return whether a name, from a file that anyone may have written, does not lead out of its folder."""
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


def _move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    source.replace(target)
