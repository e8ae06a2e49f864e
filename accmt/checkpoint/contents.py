"""The state of a training run in a folder: collecting it, writing it, and loading it on any number of processes.

A folder holds one file of tensors per process (safetensors) and `state.json` with everything else (typed JSON): the
structure of the whole state, with `{"$tensor": name}` in place of each tensor. Reading it executes no code.

Saving has three phases, so that a thread can do the last one: `StateCollector.collect` (collective, copies nothing),
`CollectedState.copied_by` (copies into a snapshot), and `write_state` (each process independently).
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from accmt.checkpoint.frozen import FrozenWeights, require_same_frozen
from accmt.checkpoint.state_dicts import (
    State,
    TensorReference,
    WrappedTensor,
    decode,
    describe_kind,
    encode,
    has_inner_tensors,
    join_tensors,
    local_part,
    model_state,
    non_persistent_buffers,
    optimizer_state,
    referred_tensors,
    require_known,
    restore_model,
    restore_non_persistent_buffers,
    restore_optimizer,
    split_tensors,
    with_inner,
)
from accmt.errors import AccmtError, CheckpointCorruptError, CheckpointError, fail
from accmt.files import follow_umask
from accmt.libraries.private_names import states_of_comm_hooks
from accmt.messages import warn_once
from accmt.processes import gather_objects, has_separate_disks, is_main_process, num_processes, process_index
from accmt.registry import addon
from accmt.sharded_tensors import is_expanded

# ---- Which process writes which piece of each tensor, and to which file.
#
# Follows `torch.distributed.checkpoint`: a shard is written by a process that has it, a replicated tensor by one of the
# processes. The files are safetensors, with the metadata from which torch's `HuggingFaceStorageReader` reassembles the
# pieces for any other number of processes.


@dataclass(frozen=True)
class Pieces:
    """The pieces that one process writes.

    Attributes:
        tensors: This process's piece of each tensor that it writes, by tensor name.
        offsets: Where the piece starts in the whole tensor, per dimension.
    """

    tensors: Mapping[str, Tensor]
    offsets: Mapping[str, tuple[int, ...]]

    @classmethod
    def whole(cls, tensors: Mapping[str, Tensor]) -> Pieces:
        return cls(tensors, {name: (0,) * tensor.dim() for name, tensor in tensors.items()})

    def __or__(self, pieces: Pieces) -> Pieces:
        return Pieces({**self.tensors, **pieces.tensors}, {**self.offsets, **pieces.offsets})


class PiecePlanner:
    """Decides which process writes what: everything exactly once, spread evenly over the processes.

    A plan is reused as long as the tensors keep their names, shapes and dtypes on every process, because planning takes
    longer than copying the tensors.
    """

    def __init__(self) -> None:
        self._layouts: list[str] = []
        self._offsets: Mapping[str, tuple[int, ...]] = {}

    def pieces_of(self, tensors: Mapping[str, Tensor]) -> Pieces:
        """Return this process's pieces: the tensors themselves or their local parts, not copies.

        Processes: collective; every process passes the same names. A tensor is replicated or sharded (DTensor).
        """
        if num_processes() == 1:
            return Pieces.whole({name: local_part(tensor) for name, tensor in tensors.items()})
        placements = {name: tensor.placements for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
        layout = [(name, tensor.shape, tensor.dtype, placements.get(name)) for name, tensor in tensors.items()]
        # All processes compare all layouts: one that kept its plan while another plans again would leave that waiting.
        layouts = gather_objects(hashlib.sha256(repr(layout).encode()).hexdigest())
        if layouts != self._layouts:
            planner = DefaultSavePlanner(flatten_state_dict=False)
            planner.set_up_planner(dict(tensors), is_coordinator=True)
            # Every process computes the same plan from the same local plans, so the plan is never sent.
            plans, _ = planner.create_global_plan(gather_objects(planner.create_local_plan()))
            items = plans[process_index()].items
            self._offsets = {item.index.fqn: tuple(item.index.offset or ()) for item in items}
            self._layouts = layouts
        return Pieces({name: local_part(tensors[name]) for name in self._offsets}, self._offsets)


def file_names(num_files: int) -> list[str]:
    return [f"tensors-{number + 1:05d}-of-{num_files:05d}.safetensors" for number in range(num_files)]


def write_pieces(pieces: Pieces, folder: Path) -> Path:
    """Write this process's file of tensors, even if it is empty, and return its path. Does not fsync."""
    path = folder / file_names(num_processes())[process_index()]
    sharding = {name: {"saved_offsets": list(offsets)} for name, offsets in pieces.offsets.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    try:
        save_file({name: tensor.contiguous() for name, tensor in pieces.tensors.items()}, path, metadata)
    except SafetensorError as error:
        # safetensors hides the number of an OSError in its message; the advice for a full disk depends on it.
        match = re.search(r"os error (\d+)", str(error))
        number = errno.EIO
        if match:
            number = int(match[1])
        raise OSError(number, str(error), str(path)) from error
    follow_umask(path)
    return path


# ---- A copy of the tensors in host memory, which a thread writes during training.


class HostSnapshot:
    """Host buffers that are reused for every copy.

    Allocating fresh memory costs several times the copy itself (the system maps it page by page), so the buffers are
    kept. Buffers for tensors of a CUDA device are pinned, so that the device writes into them directly. If no more
    pinned memory is available, ordinary memory is used.

    A reader must be done with a copy before the next `take`.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor], helper: Executor | None = None) -> dict[str, Tensor]:
        """Copy the current tensors; the sources may change afterwards. The copies are valid until the next call.

        If torch uses one thread, as launchers configure it, `helper` copies half of the CPU tensors: a single core does
        not saturate the memory bandwidth.
        """
        self._fit(tensors)
        pairs, devices = [], set()
        for name, tensor in tensors.items():
            pairs.append((self._buffers[name], tensor.detach()))
            if tensor.device.type != "cpu":
                devices.add(tensor.device)
        if helper is None or devices or torch.get_num_threads() > 1:
            _copy(pairs)
        else:
            by_size = sorted(pairs, key=lambda pair: pair[0].nbytes)
            half = helper.submit(_copy, by_size[::2])
            _copy(by_size[1::2])
            half.result()
        # Copies from a device are asynchronous: without waiting, the next optimizer step would change what is copied.
        for device in devices:
            torch.accelerator.synchronize(device)
        return dict(self._buffers)

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate memory for a copy of such tensors, so that the first `take` is as fast as the following ones."""
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
                what = f"checkpoints are copied through unpinned memory, which is slower: {error}"
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
        pieces: Its shards of the tensors: the live tensors until `copied_by` returns copies.
        text: The rest of the whole state, as typed JSON; written by the main process.
    """

    pieces: Pieces
    text: str

    def copied_by(self, snapshot: HostSnapshot, helper: Executor | None = None) -> CollectedState:
        """Return this state with copies of the current tensors; valid until the snapshot's next copy."""
        return replace(self, pieces=replace(self.pieces, tensors=snapshot.take(self.pieces.tensors, helper)))


class StateCollector:
    """Collects the state of a run, once per checkpoint.

    Args:
        model: The model.
        optimizers: Its optimizers.
        has_replicas: Whether each process trains a model of its own, as in local SGD, so that each one is saved.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], *, has_replicas: bool = False) -> None:
        require_known(model, optimizers)
        self._model = model
        self._optimizers = optimizers
        self._has_replicas = has_replicas and num_processes() > 1
        self._frozen = FrozenWeights(model)
        self._layout = _model_layout(model_state(model))
        self._planner = PiecePlanner()

    def collect(self, part_states: Mapping[str, Any]) -> CollectedState:
        """Collect the current state and decide which process writes which part; copies nothing.

        Processes: collective. Model and optimizers may be sharded; no process gathers either of them.

        Args:
            part_states: Further states by name: JSON values and tensors. The main process's are saved; the state named
                "process", if there is one on every process, is saved for each of them.

        Raises:
            CheckpointError: Something cannot be stored; the message names it.
        """
        _reject_stateful_hooks(self._model)
        optimizer_states = [optimizer_state(self._model, optimizer) for optimizer in self._optimizers]
        frozen = self._frozen.digests()
        state = model_state(self._model)
        layout = _model_layout(state)
        if layout != self._layout:  # a new model could not load these entries
            raise _changed_layout(self._layout, layout)
        model = {name: value for name, value in state.items() if name not in frozen}
        weights = {"model": model, "buffers": non_persistent_buffers(self._model), "optimizers": optimizer_states}
        shared, structure = split_tensors(weights)
        main_state = dict(part_states)
        process_state = main_state.pop("process", None)
        if self._has_replicas:
            # A dict on the main process too, even if it is empty: collecting it is collective.
            process_state = dict(process_state or {})
            # The main process's weights are saved in their usual place.
            if not is_main_process():
                process_state |= weights
        process_tensors, process_structure = _collect_of_processes(process_state)
        main_tensors, main_structure = split_tensors({"others": main_state})
        # Of a sharded tensor, the main process has only its shard: all processes write it together.
        for name, tensor in list(main_tensors.items()):
            if isinstance(tensor, DTensor):
                shared[name] = main_tensors.pop(name)
        files = {"files": file_names(num_processes()), "frozen": frozen}
        text = encode({**files, **structure, **main_structure, **process_structure})
        if self._has_replicas:
            # Replicas differ, so a planner must not choose whose weights to write: these are the main process's.
            main_tensors, shared = main_tensors | shared, {}
        pieces = self._planner.pieces_of(shared)
        if is_main_process():
            process_tensors |= main_tensors
        return CollectedState(pieces | Pieces.whole(process_tensors), text)


def _changed_layout(built: Mapping[str, str], current: Mapping[str, str]) -> AccmtError:
    """Return the error about a model whose entries have changed since it was built."""
    faults = []
    for name in sorted(built.keys() & current.keys()):
        if built[name] != current[name]:
            faults.append(f"{name} is {current[name]} but was {built[name]}")
    for name in current.keys() - built.keys():
        faults.append(f"{name} is new")
    for name in built.keys() - current.keys():
        faults.append(f"{name} is missing")
    expected = "the same entries, shapes and dtypes as when it was built, so that a resumed run can load them"
    do = "allocate a buffer at its final size when the model is built, and count how much of it is used"
    if built.keys() != current.keys():
        do = "add, replace or prune layers when the module is built, before fit"
    return fail(CheckpointError, "the state of the model", got="; ".join(faults[:5]), expected=expected, do=do)


def _collect_of_processes(state: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return this process's tensors of the state that each process has for itself, and the rest of every process's.

    Processes: collective, unless there is no such state.
    """
    if state is None:
        return {}, {}
    tensors, structure = split_tensors({"process": {str(process_index()): state}})
    states: State = {}
    for text in gather_objects(encode(structure)):
        states |= decode(text)["process"]
    return tensors, {"process": states}


def _reject_stateful_hooks(model: nn.Module) -> None:
    """Reject communication hooks whose state differs by process and changes from step to step."""
    if not isinstance(model, DistributedDataParallel):
        return
    for state in states_of_comm_hooks(model):
        kind = type(state).__name__
        if kind in _STATEFUL_HOOKS:  # a resumed run would start with other errors to feed back, silently
            got = f"a DistributedDataParallel communication hook whose state ({kind}) cannot be saved in checkpoints"
            expected = "gradients that depend on the step alone, so that the run can resume from a checkpoint"
            do = "set checkpoint_every=None without failure handlers; or use a hook without state, such as "
            do += "DDPCommunicationHookType.BF16"
            raise fail(CheckpointError, "checkpoints", got=got, expected=expected, do=do)


def require_numbers(collected: CollectedState) -> None:
    """Reject weights and optimizer states that contain NaN: no run could resume from them.

    Uses the norm of each tensor: one pass, no extra memory. Infinite entries, as in masks, are allowed.
    """
    for name, tensor in collected.pieces.tensors.items():
        if name.startswith(("others.", "process.")):  # a module may store NaN on purpose, as "not measured yet"
            continue
        if not tensor.is_floating_point() or tensor.element_size() == 1:  # torch has no norm of 8-bit floats
            continue
        if torch.isnan(torch.linalg.vector_norm(tensor)):
            do = "find the step where a loss or gradient became NaN or infinite"
            raise fail(CheckpointError, f"the checkpoint's {name}", got="NaN", expected="numbers to resume from", do=do)


def write_state(collected: CollectedState, folder: Path) -> list[Path]:
    """Write this process's files and return their paths. Not collective; does not fsync."""
    written = [write_pieces(collected.pieces, folder)]
    if is_main_process():
        path = folder / STATE_FILE
        path.write_text(collected.text, encoding="utf-8")
        written.append(path)
    return written


@contextmanager
def rejecting_other_forms(folder: Path) -> Iterator[None]:
    """Report the checkpoint's path if its files are intact but its state has an unexpected structure."""
    try:
        yield
    except AccmtError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a KeyError alone names no file
        got = f"a state with another structure: {type(error).__name__}: {error}"
        do = "resume from another checkpoint, or with the version of accmt that wrote this one (see manifest.json)"
        raise fail(
            CheckpointError, f"checkpoint {folder}", got=got, expected="the structure of this version", do=do
        ) from error


def read_others(folder: Path, *, whole: Sequence[str] = ()) -> dict[str, Any]:
    """Return the states of a folder besides model and optimizers; each tensor is a `TensorReference`.

    Args:
        folder: The checkpoint's folder.
        whole: States to read with their tensors, on the CPU.

    Processes: collective if `whole` is not empty.
    """
    saved = _read_structure(folder)
    part_states: dict[str, Any] = saved["others"]
    with_tensors = {name: part_states[name] for name in whole if name in part_states}
    if names := referred_tensors(with_tensors):
        part_states |= join_tensors(_read_whole(names, saved, _open(folder, saved), folder), with_tensors)
    return part_states


def read_model(folder: Path) -> tuple[dict[str, Tensor], int]:
    """Read the saved model state without a model, for any number of saving processes.

    Returns the full weights and buffers on the CPU by plain name (tied weights as one tensor), and the number of frozen
    weights that were left out.
    """
    with rejecting_other_forms(folder):
        saved = _read_structure(folder)
        names = referred_tensors(saved["model"])
        tensors = _read_whole(names, saved, HuggingFaceStorageReader(str(folder)), folder)
        model = join_tensors(tensors, saved["model"])
        # A layer's `get_extra_state` may return anything.
        weights = {name: value for name, value in model.items() if isinstance(value, Tensor)}
        return weights, len(saved["frozen"])


def load_state(model: nn.Module, optimizers: Sequence[Optimizer] | None, folder: Path) -> dict[str, Any]:
    """Load a state saved by any number of processes; each process reads the parts that it needs.

    Processes: collective.

    Args:
        model: The model, built and wrapped for training; its weights are replaced in place.
        optimizers: The optimizers, built as in the saved run; None leaves them unchanged.

    Returns:
        The states besides model and optimizers, with their tensors on the CPU.

    Raises:
        CheckpointCorruptError: The checkpoint is incomplete.
        CheckpointError: The checkpoint is from another model or other optimizers.
        OSError: A file cannot be read.
    """
    saved = _read_structure(folder)
    # Every tensor that `saved` still refers to is read.
    if optimizers is None:
        optimizers, saved = [], {**saved, "optimizers": []}
    if "process" in saved:
        saved = _select_process(saved, resets_optimizers=optimizers == [])
    require_known(model, optimizers)
    reader = _open(folder, saved)
    stored = _read_metadata(reader, saved, folder)
    require_same_frozen(model, saved["frozen"])
    ours = {name: value for name, value in model_state(model).items() if name not in saved["frozen"]}
    _require_same_model(ours, saved["model"], stored)
    if len(optimizers) != len(saved["optimizers"]):
        expected = f"{len(saved['optimizers'])}, as in the checkpoint"
        do = "build the same optimizers as in the saved run"
        raise fail(CheckpointError, "the optimizers", got=str(len(optimizers)), expected=expected, do=do)
    targets: dict[str, Tensor] = {}  # to read into: weights in place, optimizer state sharded like its parameter
    for name, entry in saved["model"].items():
        if isinstance(entry, TensorReference):
            target = ours[name]
            # The elements of an expanded tensor share memory, so that nothing can be read into it.
            if is_expanded(target):
                target = _empty(stored[entry.name], None)
            targets.setdefault(entry.name, target)
    for states in chain.from_iterable(map(with_inner, saved["optimizers"])):
        for name, state in states["state"].items():
            for key in referred_tensors(state):
                targets[key] = _empty(stored[key], ours.get(name))
    for key in referred_tensors(saved) - targets.keys():
        targets[key] = _empty(stored[key], None)
    _read_tensors(targets, reader, folder)
    loaded = join_tensors(targets, saved)
    restore_model(model, loaded["model"])
    restore_non_persistent_buffers(model, loaded["buffers"])
    for optimizer, state in zip(optimizers, loaded["optimizers"], strict=True):
        restore_optimizer(model, optimizer, state)
    part_states: dict[str, Any] = loaded["others"]
    if "process" in loaded:
        part_states["process"] = loaded["process"]
    return part_states


def _select_process(saved: State, *, resets_optimizers: bool) -> State:
    """Return a saved state with what this process had in place of what every process had for itself.

    Raises:
        CheckpointError: There were other processes.
    """
    num_saved = len(saved["files"])
    # There is no rule by which other processes could share these states.
    if num_saved != num_processes():
        got = f"{num_processes()} processes, and a checkpoint with a separate state for each of {num_saved}"
        do = f"launch {num_saved} processes; or start a new run without `process_state` and with equal replicas"
        raise fail(CheckpointError, "resuming", got=got, expected="as many processes as in the saved run", do=do)
    process = dict(saved["process"][str(process_index())])
    # Where each process trains a replica, its weights are here; the main process's are in their usual place.
    weights = {}
    for name in ("model", "buffers", "optimizers"):
        if name in process:
            weights[name] = process.pop(name)
    if resets_optimizers:
        weights.pop("optimizers", None)
    return {**saved, **weights, "process": process}


def _read_structure(folder: Path) -> State:
    structure: State = decode((folder / STATE_FILE).read_text(encoding="utf-8"))
    present, expected_files = {path.name for path in folder.glob("*.safetensors")}, set(structure["files"])
    # A file too many is an error as well: torch's reader takes the tensors of every file that it sees.
    if present == expected_files or (has_separate_disks() and present <= expected_files):
        return structure
    missing, unexpected = sorted(expected_files - present), sorted(present - expected_files)
    got = f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}"
    do = "resume from another checkpoint"
    raise fail(
        CheckpointCorruptError, str(folder), got=got, expected=f"{len(structure['files'])} files of tensors", do=do
    )


def _open(folder: Path, saved: State) -> HuggingFaceStorageReader:
    if not has_separate_disks():
        return HuggingFaceStorageReader(str(folder))
    reader: HuggingFaceStorageReader = addon("spread_reader")(folder, saved["files"])
    return reader


def _read_metadata(reader: HuggingFaceStorageReader, saved: State, folder: Path) -> Mapping[str, Any]:
    try:
        stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except SafetensorError as error:  # a file that was cut short
        raise _incomplete(folder, str(error)) from None
    missing = sorted(referred_tensors(saved) - stored.keys())
    if missing:  # such as files of two checkpoints in one folder
        raise _incomplete(folder, f"missing tensors: {', '.join(missing[:5])}")
    return stored


def _incomplete(folder: Path, got: str) -> AccmtError:
    do = "resume from another checkpoint"
    return fail(CheckpointCorruptError, str(folder), got=got, expected="a complete checkpoint", do=do)


def _read_whole(names: set[str], saved: State, reader: HuggingFaceStorageReader, folder: Path) -> dict[str, Tensor]:
    stored = _read_metadata(reader, saved, folder)
    targets = {name: _empty(stored[name], None) for name in names}
    _read_tensors(targets, reader, folder)
    return targets


def _empty(stored: TensorStorageMetadata, like: Tensor | None) -> Tensor:
    # A scalar is most likely a step count, which torch.optim keeps on the CPU; it moves other scalars itself.
    if like is not None and like.dim() > 0 and like.shape == stored.size:
        return torch.empty_like(like, dtype=stored.properties.dtype)
    return torch.empty(stored.size, dtype=stored.properties.dtype)


def _read_tensors(targets: dict[str, Tensor], reader: HuggingFaceStorageReader, folder: Path) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        if has_separate_disks():  # `load` would read files that this disk lacks
            reader.read_into(targets)  # type: ignore[attr-defined]
            return
        with warnings.catch_warnings():
            # "assuming the intent is to load in a single process", which is the case here.
            # Source: `load` in torch/distributed/checkpoint/state_dict_loader.py of torch 2.13.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            load(targets, storage_reader=reader, planner=planner)
    except (CheckpointException, SafetensorError) as error:
        raise _incomplete(folder, str(error)) from error


def _model_layout(state: State) -> dict[str, str]:
    """Return what the model's state must share with a loaded state: names, shapes, dtypes."""
    return {name: _describe(entry) for name, entry in state.items()}


def _require_same_model(ours: State, saved: State, stored: Mapping[str, Any]) -> None:
    """Check that the model has the same entries as the checkpoint."""
    faults = []
    for name in ours.keys() - saved.keys():
        faults.append(f"{name} is not in the checkpoint")
    for name in saved.keys() - ours.keys():
        faults.append(f"{name} is not in the model")
    for name in ours.keys() & saved.keys():
        metadata = saved[name]
        if isinstance(metadata, TensorReference):
            metadata = stored.get(metadata.name)
        got, expected = _describe(ours[name]), _describe(metadata)
        if got != expected:
            faults.append(f"{name} is {got} in the model, {expected} in the checkpoint")
    if faults:
        got = f"{len(faults)} differences: " + "; ".join(sorted(faults)[:5])
        do = "build it as in the saved run, or start a new run with `resume=False`"
        raise fail(CheckpointError, "the model", got=got, expected="the saved model", do=do)


def _describe(entry: Any) -> str:
    match entry:
        case Tensor():
            text = f"{tuple(entry.shape)} {entry.dtype}"
            if has_inner_tensors(entry):
                text += f" {describe_kind(type(entry))}"
            return text
        case WrappedTensor():
            return f"{entry.size} {entry.dtype} {entry.kind}"
        case TensorStorageMetadata():
            return f"{tuple(entry.size)} {entry.properties.dtype}"
        case None:
            return "missing"
        case _:
            return "not a tensor"
