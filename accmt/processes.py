"""Ranks, communication between processes, and functions that run on one of them.

Without a process group all answers are those of a single process.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce, wraps
from operator import add
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accmt.errors import ModuleContractError, ProcessFailedError, explain

# ---- What a process is doing, read from its stack, for messages about several processes.


_PACKAGE = str(Path(__file__).parent)
_CALLS = ("validate", "test", "predict", "save_model", "save_checkpoint", "load_checkpoint")
# Of several that fit, the first.
_PLACES = {
    "/data/": "reading data",
    "/loop/train_step.py": "a training step",
    "/features/manual.py": "a training step",
    "/loop/optimizer_step.py": "an optimizer step",
    "/loop/evaluation.py": "an evaluation",
    "/loop/prediction.py": "a prediction",
    "/loop/preflight.py": "the trial before training",
    "/loop/row_logger.py": "logging",
    "/recovery/checkpoints.py": "saving a checkpoint",
    "/recovery/model_saver.py": "saving the model",
    "/engine/replicas.py": "comparing replicas",
    "/metrics/running_averages.py": "",
    "/metrics/": "computing metrics",
    "/features/loss_guard.py": "checking losses",
    "/checkpoint/": "saving a checkpoint",
    "/saving/": "saving the model",
    "/setup/": "setting up the run",
    "/trainer/standalone_evaluation.py": "",
    "/loop/fit.py": "fit",
}


def describe_activity(frame: FrameType | None) -> str:
    """Return what the code of a frame, and what called it, is doing: "trainer.test in on_epoch_end (train.py:7)"."""
    words: list[str] = []
    place = ""
    while frame is not None:
        code, file = frame.f_code, frame.f_code.co_filename
        if file.startswith(_PACKAGE):
            words += _of_package(file.removeprefix(_PACKAGE), code.co_name)
        elif _is_of_user(file):
            place = place or f"{Path(file).name}:{frame.f_lineno}"
            words += [code.co_name] if code.co_name.startswith("on_") or code.co_name.endswith("_step") else []
        frame = frame.f_back
    named = list(dict.fromkeys(word for word in words if word))
    if len(named) > 1:
        named = [word for word in named if word != "fit"]
    called = next((index for index, word in enumerate(named) if word.startswith("trainer.")), 0)
    named = named[called:]  # what such a call does inside explains nothing
    return " in ".join(named[:3] or ["the program"]) + (f" ({place})" if place else "")


def _of_package(file: str, function: str) -> Iterator[str]:
    if file == "/trainer/trainer.py":
        yield f"trainer.{function}" if function in _CALLS else ""
    else:
        yield next((words for start, words in _PLACES.items() if file.startswith(start)), "")


def _is_of_user(file: str) -> bool:
    return not any(part in file for part in ("site-packages", "/lib/python", "<"))


P = ParamSpec("P")
T = TypeVar("T")


_is_alone = False
_ranks_per_batch = 1  # of a run; see `share_batches`
_index_after_leaving = 0
_host_group: tuple[Any, dist.ProcessGroup] | None = None  # the default group, and the one beside it for host memory
_serving: list[str] = []  # the Trainer's methods that are running, which every process has to call
_tags: dict[tuple[CodeType, str], int] = {}
names_of_threads: set[str] = set()
"""The groups in which other threads than the main one communicate."""
_TAG = struct.Struct("qq")  # the number of a call, and how many bytes it sends
_INLINE = 112
_LONGEST = 400


@contextmanager
def acting_alone() -> Iterator[None]:
    """Let everything behave as in a run of one process: for the main one, when the others have exited."""
    global _is_alone  # noqa: PLW0603 - all functions below read it
    _is_alone = True
    try:
        yield
    finally:
        _is_alone = False


def num_processes() -> int:
    """Return how many processes train together (1 without a process group)."""
    if _is_alone:
        return 1
    return dist.get_world_size() if _has_group() else 1


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def process_index() -> int:
    """Return this process's rank over all machines, counted from 0."""
    return dist.get_rank() if _has_group() else _index_after_leaving


def share_batches(ranks: int) -> None:
    """Let so many processes with neighbouring ranks, which hold one model together, share each batch from here on.

    Whatever is about samples counts them once: `num_data_processes` and `data_index` stand in the place of
    `num_processes` and `process_index` there. Files, checkpoints and agreement are those of the processes themselves.

    Processes: all.
    """
    global _ranks_per_batch  # noqa: PLW0603 - as there is one group of processes
    _ranks_per_batch = ranks


def num_data_processes() -> int:
    """Return how many processes, or groups of processes that share each batch, the data are divided among."""
    return max(1, num_processes() // _ranks_per_batch)


def data_index() -> int:
    """Return which part of the data this process has, counted from 0; those that share batches have the same."""
    return process_index() // _ranks_per_batch


def is_counted() -> bool:
    """Return whether what this process computed of its batches counts; of those that share them one does."""
    return process_index() % _ranks_per_batch == 0


def is_main_process() -> bool:
    """Return whether this is the process that writes files and messages."""
    return process_index() == 0


def leave_process_group() -> None:
    """End the process group. Afterwards each process is alone, but keeps its index: there is still one main process.

    Processes: all.
    """
    global _index_after_leaving  # noqa: PLW0603 - torch forgets the rank
    _index_after_leaving = process_index()
    dist.destroy_process_group()


def sum_over_processes(values: Sequence[float]) -> list[float]:
    """Add up each value over all processes, in double precision.

    Processes: collective; every process passes the same number of values.
    """
    if num_processes() == 1:
        return [float(value) for value in values]
    layout = struct.Struct(f"{len(values)}d")
    every = [layout.unpack(one) for one in _gather_bytes(layout.pack(*values), None)]
    return [reduce(add, of_all) for of_all in zip(*every, strict=True)]


def sum_over_data(values: Sequence[float]) -> list[float]:
    """Add up as `sum_over_processes`, and count those that share batches once.

    Processes: collective; every process passes the same number of values.
    """
    return sum_over_processes(values if is_counted() else [0.0] * len(values))


def _group_of_host() -> dist.ProcessGroup:
    """Return the group for what is in host memory, in which nothing but the functions here communicates.

    What a user's code or the reduction of gradients sends meets none of it, whatever the processes are doing. On GPUs
    the default group takes tensors of the device only: a number of the host would stand there behind all that is
    queued, and the host would wait for the backward pass at each step.

    Processes: collective, at the first call with a default group.
    """
    global _host_group  # noqa: PLW0603 - as long-lived as the default group of torch
    if _host_group is None or _host_group[0] is not dist.group.WORLD:
        _host_group = dist.group.WORLD, dist.new_group(backend="gloo")
    return _host_group[1]


def _gather_bytes(own: bytes, group: dist.ProcessGroup | None, *, source: int | None = None) -> list[bytes]:
    """Return the bytes of every process, or those of `source` alone; all processes have to be in the same call.

    A header goes first: a number of the call, the size, and the bytes themselves if they are few, as they mostly are.
    So calls that do not belong together are found before one takes what the other has sent.

    Raises:
        ModuleContractError: Another process is in another call.
    """
    tag = _tag_of_caller(_serving[-1] if _serving and group is None else "")  # another group is of another thread
    group = group or _group_of_host()
    is_sent = source is None or source == process_index()
    sent = own if is_sent else b""
    header = _TAG.pack(tag, len(sent)) + sent[:_INLINE].ljust(_INLINE, b"\0")
    headers = _all_gather(header, group)
    tags_and_sizes = [_TAG.unpack_from(one) for one in headers]
    if any(other != tag for other, _ in tags_and_sizes):
        _raise_apart(group)
    largest = max(size for _, size in tags_and_sizes)
    if largest <= _INLINE:
        every = [one[_TAG.size : _TAG.size + size] for one, (_, size) in zip(headers, tags_and_sizes, strict=True)]
    elif source is None:
        padded = _all_gather(sent.ljust(largest, b"\0"), group)
        every = [one[:size] for one, (_, size) in zip(padded, tags_and_sizes, strict=True)]
    else:
        buffer = torch.frombuffer(bytearray(sent or largest), dtype=torch.uint8)
        dist.broadcast(buffer, src=source, group=group)
        return [buffer.numpy().tobytes()]
    return every if source is None else [every[source]]


def _all_gather(own: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return bytes of every process, as many of each."""
    tensor = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    every = [torch.empty_like(tensor) for _ in range(num_processes())]
    dist.all_gather(every, tensor, group=group)
    return [one.numpy().tobytes() for one in every]


def _tag_of_caller(call: str) -> int:
    """Return a number for the function that calls into this module, on behalf of a call of the user's."""
    own: CodeType = _tag_of_caller.__code__
    frame = sys._getframe(2)
    while frame.f_code.co_filename == own.co_filename and frame.f_back is not None:
        frame = frame.f_back
    key = frame.f_code, call
    if key not in _tags:
        _tags[key] = zlib.crc32(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname} {call}".encode())
    return _tags[key]


@contextmanager
def serving(call: str) -> Iterator[None]:
    """Let what communicates in this context belong to a call of the user's, which every process has to make.

    The processes meet first, so that nothing that the model sends meets what another one sends elsewhere.

    Processes: collective.

    Raises:
        ModuleContractError: Another process is in another call.
        ProcessFailedError: Another process has ended.
    """
    _serving.append(call)
    try:
        if num_processes() > 1:
            _meet(call)
        yield
    finally:
        _serving.pop()


def _meet(call: str) -> None:
    try:
        _gather_bytes(b"", None)
    except RuntimeError as error:  # of the connection
        expected, do = "the same call on every process", f"call {call} outside `if trainer.is_main:` and the like"
        raise ProcessFailedError(explain(call, f"another process has ended: {error}", expected, do)) from error


def describe_call(frame: FrameType | None) -> str:
    """Return what the main thread, with this frame, is doing, and for which call of the user's."""
    doing = describe_activity(frame)
    return doing if not _serving or _serving[-1] in doing else f"{_serving[-1]}, {doing}"


def _raise_apart(group: dist.ProcessGroup) -> NoReturn:
    """Raise, on every process, what each of them is doing."""
    own = describe_call(sys._getframe(2)).encode()[:_LONGEST]
    doing = [one.rstrip(b"\0").decode(errors="replace") for one in _all_gather(own.ljust(_LONGEST, b"\0"), group)]
    raise ModuleContractError(explain_apart(dict(enumerate(doing))))


def explain_apart(doing: Mapping[int, str]) -> str:
    """Return the message about processes that wait for one another in different calls."""
    groups: dict[str, list[int]] = {}
    for index, what in doing.items():
        groups.setdefault(what, []).append(index)
    got = "; ".join(f"process {', '.join(map(str, indices))}: {what}" for what, indices in groups.items())
    do = "make calls that need every process on all of them, outside `if trainer.is_main:` and the like; "
    do += "only the main process writes files anyway"
    return explain("processes that wait for one another", got, "the same call on every process", do)


def new_cpu_group() -> dist.ProcessGroup | None:
    """Return a new group of all processes, for collectives on host memory in another thread; None with one process.

    Two threads of a process must not use one group: their collectives would be matched in the order of their arrival,
    which differs between processes.

    Processes: collective.
    """
    if num_processes() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    names_of_threads.add(group.group_name)
    return group


def close_cpu_group(group: dist.ProcessGroup | None) -> None:
    """Close the connections and threads of `new_cpu_group`, without the other processes."""
    if group is not None and dist.is_initialized():
        dist.destroy_process_group(group)


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return one picklable value of every process, in the order of ranks.

    Processes: collective.
    """
    if num_processes() == 1:
        return [value]
    return [pickle.loads(one) for one in _gather_bytes(pickle.dumps(value), group)]


def gather_from_data(value: T) -> list[T]:
    """Return one picklable value of every part of the data, in their order: as `gather_objects`, those shared once.

    Processes: collective.
    """
    return each_once(gather_objects(value))


def each_once(of_processes: list[T]) -> list[T]:
    """Return what is left of a list with an entry for each process where those that share batches count once."""
    return of_processes[::_ranks_per_batch]


def broadcast_object(value: T, *, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the picklable value of one process, the main one by default, on every process.

    Processes: collective; what the others pass is ignored.
    """
    if num_processes() == 1:
        return value
    own = pickle.dumps(value) if process_index() == source else b""
    [sent] = _gather_bytes(own, group, source=source)
    result: T = pickle.loads(sent)
    return result


def run_on_main_process(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Call `action` on the main process only, and return its picklable result on every process.

    Processes: collective.

    Raises:
        Exception: What the action raised, on every process, so that none waits for the others; without the traceback
            on the others.
    """
    if num_processes() == 1:
        return action()
    if not is_main_process():
        return broadcast_object(_Result[T](), group=group).unwrap()
    result = _Result.of(action)
    broadcast_object(result.for_others(), group=group)
    return result.unwrap()


def run_on_every_process(action: Callable[[], T]) -> list[T]:
    """Call `action` on each process, and return the picklable results of all, in the order of ranks.

    Processes: collective.

    Raises:
        Exception: What the action raised here, else on the first process where it failed, without its traceback; on
            every process, so that none waits for the others.
    """
    own = _Result.of(action)
    try:
        every = gather_objects(own.for_others())
    except Exception:
        if own.error is None:
            raise
        raise own.error from None  # because of which the others may be elsewhere
    own.unwrap()
    return [result.unwrap() for result in every]


@dataclass
class _Result(Generic[T]):
    """What an action returned, or raised instead."""

    value: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Result[T]:
        try:
            value = action()
            pickle.dumps(value)  # here, where the others can still get the error if it cannot be sent
            return cls(value=value)
        except Exception as error:  # noqa: BLE001 - raised on every process
            return cls(error=error)

    def for_others(self) -> _Result[T]:
        """Return the result in a form that can be sent: some errors cannot be pickled or unpickled."""
        try:
            pickle.loads(pickle.dumps(self.error))
        except Exception:  # noqa: BLE001 - whatever the error's own pickling does
            where = "the main process" if is_main_process() else f"process {process_index()}"
            return _Result(error=RuntimeError(f"on {where}: {type(self.error).__name__}: {self.error}"))
        return self

    def unwrap(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def on_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function on the main process only; on the others it does nothing and returns None.

    It must not communicate with other processes: they would not answer.

    Examples:
        >>> @on_main_process
        ... def name():
        ...     return "main"
        >>> name()
        'main'
    """
    return _run_where(function, lambda: _launched_rank() == 0)


def on_local_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function on the first process of each machine only; otherwise as `on_main_process`."""
    return _run_where(function, lambda: int(os.environ.get("LOCAL_RANK", 0)) == 0)


def on_last_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function on the last process only; otherwise as `on_main_process`."""
    return _run_where(function, lambda: _launched_rank() == _num_launched() - 1)


def _run_where(function: Callable[P, T], is_here: Callable[[], bool]) -> Callable[P, T | None]:
    @wraps(function)
    def act(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_here() else None

    return act


def _launched_rank() -> int:
    return dist.get_rank() if _has_group() else int(os.environ.get("RANK", 0))


def _num_launched() -> int:
    return dist.get_world_size() if _has_group() else int(os.environ.get("WORLD_SIZE", 1))
