"""A training run's state in a folder: what is collected, written and loaded again on any number of processes.

A folder holds one file of tensors per process (safetensors) and `state.json` with everything else (typed JSON): the
structure of the whole state, in which each tensor stands as `{"$tensor": name}`. Reading it executes nothing.

Saving has three parts, so that a thread can do the last: `StateCollector.collect` (all processes together, copies
nothing), `CollectedState.copied_by` a snapshot, and `write_state` (each process for itself).
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.distributed_c10d import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accmt.checkpoint.frozen import FrozenWeights, checksum, find_read_only, require_same_frozen
from accmt.checkpoint.state_dicts import (
    State,
    describe_kind,
    is_made_of_others,
    join_tensors,
    local_part,
    model_state,
    optimizer_state,
    referred_tensors,
    require_known,
    restore_model,
    restore_optimizer,
    split_tensors,
)
from accmt.checkpoint.typed_json import TensorReference, WrappedTensor, decode, encode
from accmt.errors import AccmtError, CheckpointCorruptError, CheckpointError, explain
from accmt.files import follow_umask
from accmt.libraries.private_names import states_of_comm_hooks
from accmt.messages import warn_once
from accmt.processes import gather_objects, is_main_process, num_processes, process_index
from accmt.sharded_tensors import is_dtensor, is_expanded

# ---- Which process writes which piece of the tensors, and the files that hold them.
#
# `torch.distributed.checkpoint` plans: each shard is written by a process that has it, what all processes have by one
# of them. The files are those of safetensors, with the metadata by which torch's `HuggingFaceStorageReader` puts pieces
# together for any other number of processes.


@dataclass(frozen=True)
class Pieces:
    """What one process writes.

    Attributes:
        tensors: This process's piece of each tensor it writes, by the tensor's name.
        offsets: Where the piece begins in the whole tensor, per dimension.
    """

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, tuple[int, ...]]

    @classmethod
    def whole(cls, tensors: Mapping[str, Tensor]) -> Pieces:
        return cls(tensors, {name: (0,) * tensor.dim() for name, tensor in tensors.items()})

    def __or__(self, other: Pieces) -> Pieces:
        return Pieces({**self.tensors, **other.tensors}, {**self.offsets, **other.offsets})


class PiecePlanner:
    """Decides which process writes what: everything once, each process about as much as the others.

    A plan holds as long as the tensors keep their names, shapes and dtypes on every process, and is then used again:
    planning is long beside a copy of the tensors.
    """

    def __init__(self) -> None:
        self._layouts: list[str] = []
        self._offsets: Mapping[str, tuple[int, ...]] = {}

    def pieces_of(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return this process's pieces; they are the tensors themselves or their local parts, not copies.

        Processes: collective; every process passes the same names. A tensor is the same on all, or sharded (DTensor).
        """
        if num_processes() == 1:
            return Pieces.whole({name: local_part(tensor) for name, tensor in tensors.items()})
        layouts = gather_objects(_layout_of(tensors))
        if layouts != self._layouts:
            self._offsets = _plan(tensors)
            self._layouts = layouts
        return Pieces({name: local_part(tensors[name]) for name in self._offsets}, self._offsets)


def _plan(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    # Every process computes the same plan from the same local plans, which saves sending it.
    plans, _ = planner.create_global_plan(gather_objects(planner.create_local_plan()))
    return {item.index.fqn: tuple(item.index.offset or ()) for item in plans[process_index()].items}


def _layout_of(tensors: Mapping[str, Tensor]) -> str:
    layout = [
        (name, tensor.shape, tensor.dtype, getattr(tensor, "placements", None)) for name, tensor in tensors.items()
    ]
    return hashlib.sha256(repr(layout).encode()).hexdigest()


def file_names(num_files: int) -> list[str]:
    return [f"tensors-{number + 1:05d}-of-{num_files:05d}.safetensors" for number in range(num_files)]


def write_pieces(pieces: Pieces, folder: Path) -> Path:
    """Write this process's file of tensors, also where it has none, and return it, not yet durable."""
    path = folder / file_names(num_processes())[process_index()]
    sharding = {name: {"saved_offsets": list(offsets)} for name, offsets in pieces.offsets.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    try:
        save_file({name: tensor.contiguous() for name, tensor in pieces.tensors.items()}, path, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    follow_umask(path)
    return path


# ---- A copy of tensors in host memory, so that a thread can write them during training.


class HostSnapshot:
    """Host buffers that are reused from one copy to the next.

    Fresh memory costs several times the copy itself (the system hands it out page by page), so the buffers stay. Those
    for tensors of a CUDA device are pinned, which lets the device write into them directly; a machine that gives no
    more pinned memory still gets its checkpoint.

    Who reads a copy must be done with it before the next `take`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], helper: Executor | None = None) -> dict[str, Tensor]:
        """Copy tensors as they are now; when this returns, the sources may change. The copies live until the next one.

        Where torch computes with one thread, as a launcher sets it, `helper` copies half of those on the CPU: one core
        alone does not use the memory's speed.
        """
        self._fit(tensors)
        pairs = [(self._buffers[name], tensor.detach()) for name, tensor in tensors.items()]
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        if helper is None or devices or torch.get_num_threads() > 1:
            _copy(pairs)
        else:
            by_size = sorted(pairs, key=lambda pair: pair[0].nbytes)
            other_half = helper.submit(_copy, by_size[::2])
            _copy(by_size[1::2])
            other_half.result()
        for device in devices:
            torch.accelerator.synchronize(device)
        return dict(self._buffers)

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Get the memory for a copy of such tensors, so that the first `take` takes no longer than the others."""
        self._fit(tensors)
        for buffer in self._buffers.values():
            buffer.zero_()

    def _fit(self, tensors: Mapping[str, Tensor]) -> None:
        self._buffers = {name: self._buffer_for(name, tensor) for name, tensor in tensors.items()}

    def _buffer_for(self, name: str, tensor: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype:
            return buffer
        if tensor.device.type == "cuda":
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError as error:
                what = f"checkpoints are copied through ordinary memory, which takes longer: {error}"
                warn_once(what, about="pinned memory")
        return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=True)


_STATEFUL_HOOKS = frozenset({"PowerSGDState", "PostLocalSGDState"})  # torch's

STATE_FILE = "state.json"


@dataclass(frozen=True)
class CollectedState:
    """What one process writes of a state.

    Attributes:
        pieces: Its share of the tensors: the live ones, until `copied_by` a snapshot.
        text: Everything else of the whole state, as typed JSON; the main process writes it.
    """

    pieces: Pieces
    text: str

    def copied_by(self, snapshot: HostSnapshot, helper: Executor | None = None) -> CollectedState:
        """Return the same with copies of the tensors as they are now; valid until the snapshot's next copy."""
        return replace(self, pieces=replace(self.pieces, tensors=snapshot.take(self.pieces.tensors, helper)))


class StateCollector:
    """Collects the state of a run again and again."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        require_known(model, optimizers)
        self._model = model
        self._optimizers = optimizers
        self._frozen = FrozenWeights(model)
        self._layout = _model_layout(model_state(model))
        self._planner = PiecePlanner()

    def collect(self, others: Mapping[str, Any]) -> CollectedState:
        """Collect the state as it is, and decide which process writes what of it; copies nothing.

        Processes: collective. Model and optimizers may be sharded; no process gets the whole of either.

        Args:
            others: Further states by name: JSON values and tensors. Those of the main process are kept, and of what is
                named "own" those of each process, where they differ.

        Raises:
            CheckpointError: Something cannot be stored; the message names it.
        """
        _reject_stateful_hooks(self._model)
        states = [optimizer_state(self._model, optimizer) for optimizer in self._optimizers]
        frozen = self._frozen.digests()
        state = model_state(self._model)
        _require_same_layout(self._layout, _model_layout(state))
        model = {name: value for name, value in state.items() if name not in frozen}
        shared, rest = split_tensors({"model": model, "optimizers": states})
        others = dict(others)
        of_process, every_rest = _collect_own(others.pop("own", None))
        own, other_rest = split_tensors({"others": others})
        shared |= {name: tensor for name, tensor in own.items() if is_dtensor(tensor)}
        own = {name: tensor for name, tensor in own.items() if name not in shared}
        text = encode({"files": file_names(num_processes()), "frozen": frozen, **rest, **other_rest, **every_rest})
        pieces = self._planner.pieces_of(shared)
        return CollectedState(pieces | Pieces.whole(own if is_main_process() else of_process), text)


def _collect_own(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Compare a state that each process has for itself, such as hidden states carried over its batches.

    Processes: collective.

    Returns:
        This process's tensors, and the rest of the state of each process but the main one, by its number; nothing where
        all have the same state.
    """
    if num_processes() == 1:
        return {}, {}
    tensors, rest = split_tensors({"own": state})
    if any(map(is_dtensor, tensors.values())):  # which all processes hold together
        tensors, rest = {}, {}
    sums = [checksum(tensor) for tensor in tensors.values()]
    if len(set(gather_objects(xxhash.xxh3_64_hexdigest(f"{encode(rest)} {sums}".encode())))) == 1:
        return {}, {}
    named, rest = split_tensors({"own": {str(process_index()): state}})
    every = [decode(text)["own"] for text in gather_objects(encode(rest))]
    return named, {"own": {number: own for one in every[1:] for number, own in one.items()}}


def _reject_stateful_hooks(model: nn.Module) -> None:
    """Reject communication hooks that carry something from step to step, on each process something else."""
    states = states_of_comm_hooks(model) if isinstance(model, DistributedDataParallel) else []
    for state in states:
        kind = type(state).__name__
        if kind in _STATEFUL_HOOKS:
            got = f"a communication hook of DistributedDataParallel whose state ({kind}) no checkpoint holds"
            expected = "gradients that depend on the step alone, so that a run can be resumed from a checkpoint"
            do = "checkpoint_every=None without failure handlers; or a hook without state, such as "
            do += "DDPCommunicationHookType.BF16"
            raise CheckpointError(explain("checkpoints", got, expected, do))
        if not (state is None or isinstance(state, ProcessGroup) or hasattr(state, "state_dict")):
            what = f"the state of a communication hook ({kind}) is in no checkpoint"
            warn_once(f"{what}: if it changes, return it from the module's `state_dict`", about="communication hook")


def require_numbers(collected: CollectedState) -> None:
    """Reject weights and optimizer states that hold NaN: no run could resume from them.

    The norm of a tensor tells, in one pass and without memory of its own; infinite entries, as in masks, are allowed.
    """
    for name, tensor in collected.pieces.tensors.items():
        if name.startswith(("others.", "own.")) or not tensor.is_floating_point() or tensor.element_size() == 1:
            continue
        if torch.isnan(torch.linalg.vector_norm(tensor)):
            do = "find the step that caused it: a loss or a gradient was not finite"
            raise CheckpointError(explain(f"the checkpoint's {name}", "NaN", "numbers to resume from", do))


def write_state(collected: CollectedState, folder: Path) -> list[Path]:
    """Write this process's files, and return them, not yet durable; no process waits for another."""
    written = [write_pieces(collected.pieces, folder)]
    if is_main_process():
        path = folder / STATE_FILE
        path.write_text(collected.text, encoding="utf-8")
        written.append(path)
    return written


@contextmanager
def rejecting_other_forms(folder: Path) -> Iterator[None]:
    """Name the checkpoint where its files are whole, and its state is not of the form that this version writes."""
    try:
        yield
    except AccmtError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        got = f"a state of another form: {type(error).__name__}: {error}"
        do = "resume from another checkpoint, or with the version of accmt that wrote this one (see manifest.json)"
        raise CheckpointError(explain(f"checkpoint {folder}", got, "the form that this version writes", do)) from error


def read_others(folder: Path, *, whole: Sequence[str] = ()) -> dict[str, Any]:
    """Return the other states of a folder without their tensors: each is a `TensorReference`.

    Args:
        folder: That of the checkpoint.
        whole: The states that are read with their tensors, on the CPU.

    Processes: collective where `whole` names any.
    """
    saved = _read_rest(folder)
    others: dict[str, Any] = saved["others"]
    wanted = {name: others[name] for name in whole if name in others}
    if names := referred_tensors(wanted):
        reader = HuggingFaceStorageReader(str(folder))
        stored = _read_metadata(reader, saved, folder)
        targets = {name: _empty(stored[name], None) for name in names}
        _read_tensors(targets, reader, folder)
        others |= join_tensors(targets, wanted)
    return others


def read_model(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Read the model's part of what any number of processes saved, without the model.

    That is whole weights and buffers on the CPU by plain name, tied ones as one tensor, and the number of frozen
    weights that were left out.
    """
    with rejecting_other_forms(folder):
        saved = _read_rest(folder)
        reader = HuggingFaceStorageReader(str(folder))
        stored = _read_metadata(reader, saved, folder)
        targets = {name: _empty(stored[name], None) for name in referred_tensors(saved["model"])}
        _read_tensors(targets, reader, folder)
        model = join_tensors(targets, saved["model"])
        return {name: value for name, value in model.items() if isinstance(value, Tensor)}, len(saved["frozen"])


def load_state(model: nn.Module, optimizers: Sequence[Optimizer] | None, folder: Path) -> dict[str, Any]:
    """Load what any number of processes saved; each process reads the parts that it needs.

    Processes: collective.

    Args:
        model: The model, built and wrapped as it will be trained; its weights are replaced in place.
        optimizers: The optimizers, built as when it was saved; None leaves them as they are.

    Returns:
        The other states, with their tensors on the CPU.

    Raises:
        CheckpointCorruptError: The checkpoint is incomplete.
        CheckpointError: It is that of another model or of other optimizers.
        OSError: A file cannot be read.
    """
    saved = _read_rest(folder)
    if optimizers is None:
        optimizers, saved = [], {**saved, "optimizers": []}
    require_known(model, optimizers)
    reader = HuggingFaceStorageReader(str(folder))
    stored = _read_metadata(reader, saved, folder)
    require_same_frozen(model, saved["frozen"])
    ours = {name: value for name, value in model_state(model).items() if name not in saved["frozen"]}
    _require_same_model(ours, saved["model"], stored)
    _require_same_number(optimizers, saved["optimizers"])
    fixed = {name: tensor for name, tensor in find_read_only(model).items() if name in ours}
    targets = _targets(ours, saved, stored, fixed)
    _read_tensors(targets, reader, folder)
    loaded = join_tensors(targets, saved)
    for name, tensor in fixed.items():
        if not torch.equal(loaded["model"].pop(name), tensor):
            got, do = (
                f"{name} has other values, in memory that is mapped read-only",
                "map the file of the run that saved",
            )
            raise CheckpointError(explain("the model", got, "the values of the checkpoint", do))
    restore_model(model, loaded["model"])
    for optimizer, state in zip(optimizers, loaded["optimizers"], strict=True):
        restore_optimizer(model, optimizer, state)
    others: dict[str, Any] = loaded["others"]
    if "own" in loaded:
        others["own"] = {"num_processes": len(saved["files"]), "states": loaded["own"]}
    return others


def _read_rest(folder: Path) -> State:
    rest: State = decode((folder / STATE_FILE).read_text(encoding="utf-8"))
    found = {path.name for path in folder.glob("*.safetensors")}
    if found == set(rest["files"]):
        return rest
    missing, unexpected = sorted(set(rest["files"]) - found), sorted(found - set(rest["files"]))
    got = f"missing: {', '.join(missing) or 'nothing'}; not part of it: {', '.join(unexpected) or 'nothing'}"
    do = "resume from another checkpoint"
    raise CheckpointCorruptError(explain(str(folder), got, f"{len(rest['files'])} files of tensors", do))


def _read_metadata(reader: HuggingFaceStorageReader, saved: State, folder: Path) -> Mapping[str, Any]:
    try:
        stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        missing = sorted(referred_tensors(saved) - stored.keys())
        fault = f"tensors are missing: {', '.join(missing[:5])}" if missing else None
    except SafetensorError as error:
        fault = str(error)
    if fault is None:
        return stored
    message = explain(str(folder), fault, "a complete checkpoint", "resume from another checkpoint")
    raise CheckpointCorruptError(message)


def _targets(ours: State, saved: State, stored: Mapping[str, Any], fixed: Collection[str]) -> dict[str, Tensor]:
    """Return where to read each tensor into: weights in place, optimizer state sharded like its parameter."""
    targets: dict[str, Tensor] = {}
    for name, entry in saved["model"].items():
        if isinstance(entry, TensorReference):
            is_writable = name not in fixed and not is_expanded(ours[name])
            targets.setdefault(entry.name, ours[name] if is_writable else _empty(stored[entry.name], None))
    for optimizer in saved["optimizers"]:
        for name, state in optimizer["state"].items():
            targets |= {key: _empty(stored[key], ours.get(name)) for key in referred_tensors(state)}
    return targets | {key: _empty(stored[key], None) for key in referred_tensors(saved) - targets.keys()}


def _empty(stored: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    # A scalar is rather a count, which torch.optim keeps on the CPU; it moves what it wants elsewhere.
    if like is not None and like.dim() > 0 and like.shape == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _read_tensors(targets: dict[str, Tensor], reader: HuggingFaceStorageReader, folder: Path) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with warnings.catch_warnings():
            # "assuming the intent is to load in a single process", which is so
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(targets, storage_reader=reader, planner=planner)
    except CheckpointException as error:
        message = explain(str(folder), str(error), "a complete checkpoint", "resume from another checkpoint")
        raise CheckpointCorruptError(message) from error


def _model_layout(state: State) -> dict[str, str]:
    """Return what a model's state has to have in common with the one that is loaded: names, shapes, dtypes."""
    return {name: _describe(entry) for name, entry in state.items()}


def _require_same_layout(begun: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Reject a model whose entries have changed since the run was built: a new model could not load them."""
    if begun == now:
        return
    both = sorted(begun.keys() & now.keys())
    faults = [f"{name} is {now[name]}, and was {begun[name]}" for name in both if begun[name] != now[name]]
    faults += [f"{name} is new" for name in now.keys() - begun.keys()]
    faults += [f"{name} is gone" for name in begun.keys() - now.keys()]
    expected = "the entries, shapes and dtypes that it was built with: only into those a resume can load"
    do = "give a buffer its final size when the model is built, and count how much of it is in use"
    if begun.keys() != now.keys():
        do = "add, replace or prune layers when the module is built, before fit"
    raise CheckpointError(explain("the state of the model", "; ".join(faults[:5]), expected, do))


def _require_same_model(ours: State, saved: State, stored: Mapping[str, Any]) -> None:
    """Check that a model has the entries of a checkpoint."""
    faults = [f"{name} is not in the checkpoint" for name in ours.keys() - saved.keys()]
    faults += [f"{name} is not in the model" for name in saved.keys() - ours.keys()]
    for name in ours.keys() & saved.keys():
        got, expected = _describe(ours[name]), _describe(_metadata_of(saved[name], stored))
        if got != expected:
            faults.append(f"{name} is {got} in the model, {expected} in the checkpoint")
    if faults:
        got = f"{len(faults)} differences: " + "; ".join(sorted(faults)[:5])
        do = "build it as in the run that saved, or start a new run with `resume=False`"
        raise CheckpointError(explain("the model", got, "the model that was saved", do))


def _metadata_of(entry: Any, stored: Mapping[str, Any]) -> Any:
    return stored.get(entry.name) if isinstance(entry, TensorReference) else entry


def _describe(entry: Any) -> str:
    if isinstance(entry, Tensor):
        kind = f" {describe_kind(type(entry))}" if is_made_of_others(entry) else ""
        return f"{tuple(entry.shape)} {entry.dtype}{kind}"
    if isinstance(entry, WrappedTensor):
        return f"{entry.size} {entry.dtype} {entry.kind}"
    if isinstance(entry, TensorStorageMetadata):
        return f"{tuple(entry.size)} {entry.properties.dtype}"
    return "missing" if entry is None else "no tensor"


def _require_same_number(optimizers: Sequence[Optimizer], saved: Sequence[State]) -> None:
    """Check that there are as many optimizers as in a checkpoint."""
    if len(optimizers) != len(saved):
        expected, do = f"{len(saved)}, as in the checkpoint", "build the ones that were saved"
        raise CheckpointError(explain("the optimizers", str(len(optimizers)), expected, do))
