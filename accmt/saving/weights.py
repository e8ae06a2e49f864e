"""Writing the weights of a model into its folder, so that a loader finds the old ones or the new, never a mixture."""

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

from accmt.errors import SavingError, WeightsError, explain
from accmt.files import follow_umask, fsync_file, fsync_folder, staging_folder
from accmt.libraries.private_names import is_made_of_tensors
from accmt.processes import broadcast_object, is_main_process, run_on_main_process
from accmt.sharded_tensors import is_dtensor, make_whole

# ---- The names of weight files in a model folder, and which of them a loader would read.


@dataclass(frozen=True)
class WeightsFormat:
    """One of the two ways to write weights."""

    stem: str
    extension: str

    @property
    def single(self) -> str:
        return f"{self.stem}{self.extension}"

    @property
    def index(self) -> str:
        """Name of the file that says which shard holds which weight."""
        return f"{self.single}.index.json"

    def shard(self, digest: str, suffix: str) -> str:
        """Name of one shard; the digest keeps it apart from every other save's shards."""
        return f"{self.stem}-{digest}{suffix}{self.extension}"


SAFETENSORS = WeightsFormat("model", ".safetensors")
PICKLE = WeightsFormat("pytorch_model", ".bin")

ADAPTER_CONFIG = "adapter_config.json"
"""The file from which PEFT and transformers start where a folder holds an adapter."""

ADAPTER_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
"""The weights of an adapter, in the order in which PEFT looks for them."""

ENTRY_NAMES = (ADAPTER_CONFIG, SAFETENSORS.single, SAFETENSORS.index, PICKLE.single, PICKLE.index)
"""The files a loader starts from, in the order in which transformers looks for them: the first that exists is read."""

_OUR_SHARD = re.compile(r"(model|pytorch_model)-[0-9a-f]{16}-\d{5}-of-\d{5}\.(safetensors|bin)")


def find_entry(folder: Path) -> Path | None:
    """Return the file that a loader would start from, or None where `folder` holds no weights."""
    return next((folder / name for name in ENTRY_NAMES if (folder / name).is_file()), None)


def files_of(entry: Path) -> list[str]:
    """Return the names of the files that hold the weights of `entry`, sorted.

    A damaged index is a ValueError (no JSON) or a KeyError (no index).
    """
    if entry.name == ADAPTER_CONFIG:
        return [next((name for name in ADAPTER_NAMES if (entry.parent / name).is_file()), ADAPTER_NAMES[0])]
    if not entry.name.endswith(".json"):
        return [entry.name]
    return sorted(set(json.loads(entry.read_text(encoding="utf-8"))["weight_map"].values()))


def weight_files_in(folder: Path) -> set[str]:
    """Return the names of the files that hold weights, of whatever entry."""
    return {name for entry in ENTRY_NAMES if (folder / entry).is_file() for name in files_of(folder / entry)}


def remove_unnamed_shards(folder: Path) -> None:
    """Delete our shards that no index in `folder` names; every other file stays."""
    named = weight_files_in(folder)
    for path in folder.iterdir():
        if _OUR_SHARD.fullmatch(path.name) and path.name not in named:
            path.unlink()


# ---- What to write of a state dict: names without wrappers, and each tensor once.


_COMPILED = "_orig_mod"
_PARALLEL = "module."


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name of a state dict to the name without what `torch.compile` and data parallelism put around a model.

    `_orig_mod` goes wherever it stands in a name, because a submodule can be compiled too. A leading `module.` goes
    only where every name has it: a wrapper encloses the whole model.
    """
    own = list(names)
    plain = [".".join(part for part in name.split(".") if part != _COMPILED) for name in own]
    while plain and all(name.startswith(_PARALLEL) for name in plain):
        plain = [name.removeprefix(_PARALLEL) for name in plain]
    twice = sorted({name for name in plain if plain.count(name) > 1}) if len(set(plain)) < len(plain) else []
    if twice:
        message = explain(
            "names of the weights",
            f"more than one weight is called {', '.join(twice)} once `{_COMPILED}` is taken out",
            "names that differ without what torch.compile adds",
            f"rename the submodule that is called `{_COMPILED}`",
        )
        raise WeightsError(message)
    return dict(zip(own, plain, strict=True))


def find_tied(state_dict: Mapping[str, Tensor]) -> dict[str, str]:
    """Map each name whose tensor is the very same view as an earlier one's to that earlier name."""
    first: dict[Hashable, str] = {}
    kept = {name: first.setdefault(_view(tensor), name) for name, tensor in state_dict.items()}
    return {name: earlier for name, earlier in kept.items() if earlier != name}


def give_own_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the CPU, contiguous, each with memory of its own; only those that need it are copied."""
    owners: set[int] = set()
    separate: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        memory = dense.untyped_storage()
        if memory.nbytes() != dense.nbytes or memory.data_ptr() in owners:
            dense = dense.clone()
        owners.add(dense.untyped_storage().data_ptr())
        separate[name] = dense
    return separate


def require_complete(state_dict: Mapping[str, Tensor], model: nn.Module) -> None:
    """Reject a state dict that holds less than the model's parameters: shards of ZeRO-3 or FSDP, or nothing.

    A model that leaves something out itself, by a `state_dict` method of its own, is not checked.
    """
    if any(type(module).state_dict is not nn.Module.state_dict for module in model.modules()):
        return
    expected = _count(dict(model.named_parameters()))
    buffers = set(plain_names(name for name, _ in model.named_buffers(remove_duplicate=False)).values())
    names = plain_names(state_dict)
    weights = {name: tensor for name, tensor in state_dict.items() if isinstance(tensor, Tensor)}
    got = _count({name: tensor for name, tensor in weights.items() if names[name] not in buffers})
    if got < expected:
        empty = [names[name] for name, tensor in weights.items() if not tensor.numel()]
        message = explain(
            f"the weights of {type(model).__name__}",
            f"{got:,} values in {len(state_dict)} tensors" + (f", none in {', '.join(empty[:3])}" if empty else ""),
            f"at least {expected:,}, as its parameters have",
            "gather the shards of all processes before saving (ZeRO-3 and FSDP keep empty ones on each)",
        )
        raise WeightsError(message)


def _count(tensors: Mapping[str, Tensor]) -> int:
    tied = find_tied(tensors)
    # DeepSpeed keeps the size of the whole beside the empty tensor that ZeRO-3 leaves of a parameter.
    return sum(getattr(tensors[name], "ds_numel", tensors[name].numel()) for name in tensors if name not in tied)


def require_dense_tensors(state_dict: Mapping[str, object]) -> None:
    """Reject, by name, every value that a weight file cannot hold: no tensor, a sparse one, or one without memory."""
    faults = [f"{name}: {_kind(value)}" for name, value in state_dict.items() if not _is_dense(value)]
    if faults or not state_dict:
        message = explain(
            "weights to save",
            "; ".join(faults) or "no tensor at all",
            "dense tensors that hold data",
            "keep other values out of the state dict (`get_extra_state`, sparse parameters), gather shards first, or "
            "pass `model_saving=None`",
        )
        raise WeightsError(message)


def require_storable(state_dict: Mapping[str, object], *, safe_serialization: bool) -> None:
    """Reject at the start of a run what `require_dense_tensors` rejects, and dtypes that safetensors does not have."""
    require_dense_tensors(state_dict)
    dtypes = {value.dtype: name for name, value in state_dict.items() if isinstance(value, Tensor)}
    for dtype, name in dtypes.items() if safe_serialization else ():
        try:
            safetensors.torch.save({name: torch.empty(1, dtype=dtype)})
        except (KeyError, ValueError, SafetensorError) as error:
            got, do = f"a tensor of {dtype}", "convert it, or pass `safe_serialization=False`"
            raise WeightsError(explain(name, got, "a dtype that safetensors has", do)) from error


def _view(tensor: Tensor) -> Hashable:
    anything: object = tensor
    if is_made_of_tensors(anything):  # a DTensor among them
        return id(tensor)  # which has no memory itself
    address = tensor.untyped_storage().data_ptr()
    if address == 0 or tensor.numel() == 0:
        return id(tensor)  # without memory nothing is shared
    return tensor.device, address, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_dense(value: object) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return False
    return is_dtensor(value) or not is_made_of_tensors(value)


def _kind(value: object) -> str:
    if is_made_of_tensors(value):
        return f"a {type(value).__name__}, which is made of other tensors"
    return f"{value.layout} on {value.device}" if isinstance(value, Tensor) else type(value).__name__


# ---- Weights of a sharded model, written one after the other: no process ever holds the whole of it.
#
# The main process decides which tensor it needs next; the others follow it, because each is put together by all.


T = TypeVar("T")

_END = ""
_CHUNK = 2**24


class WholeState(dict[str, Tensor]):
    """A state dict that each process has whole."""

    def lend(self, action: Callable[[], T]) -> T:
        """Let the main process do something with the tensors, and return its result on every process.

        Processes: collective.

        Raises:
            Exception: What the action raised, on every process.
        """
        return run_on_main_process(action)


class ShardedState:
    """A state dict whose tensors are put together when they are needed.

    Attributes:
        outlines: Tensors without memory, by name; names of one weight have the same one.
    """

    def __init__(self, model: nn.Module) -> None:
        state_dict: dict[str, Tensor] = model.state_dict(keep_vars=True)  # in which tied weights are one object
        self._own = {name: tensor.detach() for name, tensor in state_dict.items()}
        first: dict[int, Tensor] = {}
        self.outlines = {
            name: first.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            for name, tensor in state_dict.items()
        }

    def fetch(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU.

        Processes: main only, within `lend`.
        """
        _announce(name)
        return make_whole(self._own[name]).cpu()

    def fetch_outlined(self, outlines: Mapping[str, Tensor]) -> Callable[[str], Tensor] | None:
        """Return what fetches tensors by the names under which `outlines` has ours; None where it has others too."""
        names = {id(outline): name for name, outline in self.outlines.items()}
        if any(id(outline) not in names for outline in outlines.values()):
            return None
        return lambda name: self.fetch(names[id(outlines[name])])

    def fetch_all(self) -> dict[str, Tensor]:
        """Return all tensors whole, where what is saved has to be computed from them."""
        return {name: self.fetch(name) for name in self._own}

    def lend(self, action: Callable[[], T]) -> T:
        """Let the main process do something with whole tensors, and return its result on every process.

        Processes: collective.

        Raises:
            Exception: What the action raised, on every process.
        """
        if not is_main_process():
            self._follow()
        return run_on_main_process(lambda: self._act(action))

    def _act(self, action: Callable[[], T]) -> T:
        try:
            return action()
        finally:
            _announce(_END)

    def _follow(self) -> None:
        while (name := _announce(_END)) != _END:
            make_whole(self._own[name])


def _announce(name: str) -> str:
    """Return the name that the main process passes, on every process."""
    return broadcast_object(name)


class StreamedFile:
    """A safetensors file that is written tensor by tensor, and gets its metadata at the end.

    Args:
        path: The file.
        outlines: What will be in it, by name, in this order.
        metadata: Metadata as long as that which it will have.

    Source: https://github.com/huggingface/safetensors#format
    """

    def __init__(self, path: Path, outlines: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._outlines = outlines
        self._begin = len(self._header(metadata))

    def write(self, fetch: Callable[[str], Tensor], digest: xxhash.xxh3_64) -> None:
        """Write every tensor, and add it to the digest of all."""
        with self.path.open("wb") as file:
            file.seek(self._begin)
            for name in self._outlines:
                tensor = fetch(name)
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                for start in range(0, len(data), _CHUNK):
                    digest.update(data[start : start + _CHUNK].data)
                    file.write(data[start : start + _CHUNK].data)

    def seal(self, metadata: Mapping[str, str]) -> None:
        """Write what stands before the tensors."""
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
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text


@cache
def _name_of(dtype: torch.dtype) -> str:
    """Return what safetensors calls a type."""
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
