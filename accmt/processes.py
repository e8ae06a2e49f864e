"""Ranks, communication between processes, and functions that run on only one of them.

Without a process group everything behaves as with a single process.
"""

from __future__ import annotations

import hashlib
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
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from accmt.errors import ModuleContractError, ProcessFailedError, fail

# ---- What a process is doing, derived from its stack, for messages about several processes.


_PACKAGE = Path(__file__).parent
_LIBRARIES = ("site-packages", "/lib/python", "<")


def describe_activity(frame: FrameType | None) -> str:
    """Describe what a frame is doing: accmt's function and the user's, "loop.evaluation.run in on_log (train.py:7)"."""
    function, place = "", ""
    while frame is not None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if file.is_relative_to(_PACKAGE):
            if not function and file != Path(__file__):
                function = ".".join([*file.relative_to(_PACKAGE).with_suffix("").parts, name])
        elif not place and not any(part in str(file) for part in _LIBRARIES):
            place = f" in {name} ({file.name}:{frame.f_lineno})"
        frame = frame.f_back
    return (function or "the program") + place


P = ParamSpec("P")
T = TypeVar("T")


_is_alone = False
_ranks_per_batch = 1  # of a run; see `share_batches`
_disk_managers: tuple[int, ...] = ()  # of each process; empty if all share a disk; see `separate_disks`
_index_after_leaving = 0
_host_group: tuple[Any, dist.ProcessGroup] | None = None  # the default group, and another one for host memory
_serving: list[str] = []  # the Trainer's methods that are running, which every process has to call
names_of_threads: set[str] = set()
"""The groups in which threads other than the main one communicate."""
_TAG = struct.Struct("qq")  # the number of the user's call, and how many bytes are sent
_INLINE = 112
_LONGEST = 400


@contextmanager
def acting_alone() -> Iterator[None]:
    """Behave as in a run of one process: for the main process, when the others have exited."""
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
    """Let `ranks` neighboring processes, which hold one model together, share each batch from now on.

    Samples are then counted once per such group: use `num_data_processes` and `data_index` instead of `num_processes`
    and `process_index`. Files, checkpoints and agreements still involve every process.

    Processes: all.
    """
    global _ranks_per_batch  # noqa: PLW0603 - as there is one group of processes
    _ranks_per_batch = ranks


def separate_disks(managers: Sequence[int]) -> None:
    """Record that the run's checkpoint folder is on a separate disk for some of the processes.

    Args:
        managers: For each process, the process that manages the files on its disk: the first one that uses this disk.
            Empty if all share a disk, which the main process manages.

    Processes: all.
    """
    global _disk_managers  # noqa: PLW0603 - as there is one group of processes
    _disk_managers = tuple(managers)


def has_separate_disks() -> bool:
    """Return whether some processes do not see the files that the main process writes."""
    return len(set(_disk_managers)) > 1 and num_processes() > 1


def disk_managers() -> tuple[int, ...]:
    """Return, for each process, the process that manages the files on its disk; empty if all share a disk."""
    return _disk_managers if has_separate_disks() else ()


def manages_disk() -> bool:
    """Return whether this process manages the files on its disk: one process per disk does."""
    if not has_separate_disks():
        return is_main_process()
    return process_index() == _disk_managers[process_index()]


def num_data_processes() -> int:
    """Return the number of processes, or groups of processes that share each batch, that the data are divided among."""
    return max(1, num_processes() // _ranks_per_batch)


def data_index() -> int:
    """Return the index of this process's part of the data; equal for processes that share batches."""
    return process_index() // _ranks_per_batch


def is_counted() -> bool:
    """Return whether this process's results count; only one of the processes that share batches does."""
    return process_index() % _ranks_per_batch == 0


def is_main_process() -> bool:
    """Return whether this is the process that writes files and messages."""
    return process_index() == 0


def leave_process_group() -> None:
    """Destroy the process group. Afterwards each process is alone but keeps its index, so there is one main process.

    Processes: all.
    """
    global _index_after_leaving  # noqa: PLW0603 - torch forgets the rank
    _index_after_leaving = process_index()
    dist.destroy_process_group()


def gather_numbers(values: Sequence[float]) -> list[tuple[float, ...]]:
    """Return the numbers of each process, in double precision.

    Processes: collective; every process passes the same number of values.
    """
    if num_processes() == 1:
        return [tuple(map(float, values))]
    layout = struct.Struct(f"{len(values)}d")
    return [layout.unpack(packed) for packed in _gather_bytes(layout.pack(*values), None)]


def sum_over_processes(values: Sequence[float]) -> list[float]:
    """Add up each value over all processes, in double precision.

    Processes: collective; every process passes the same number of values.
    """
    # In the order of ranks, so that every process rounds alike.
    return [reduce(add, addends) for addends in zip(*gather_numbers(values), strict=True)]


def is_on_any_process(fact: bool) -> bool:  # noqa: FBT001 - like `any`
    """Return whether something is true on any process. Processes: collective."""
    return sum_over_processes((fact,)) != [0]


def sum_over_data(values: Sequence[float]) -> list[float]:
    """Like `sum_over_processes`, but counts processes that share batches once.

    Processes: collective; every process passes the same number of values.
    """
    return sum_over_processes(values if is_counted() else [0.0] * len(values))


def _group_of_host() -> dist.ProcessGroup:
    """Return the group for host memory, which is used only by the functions in this module.

    User code and the reduction of gradients never communicate in it. On GPUs the default group takes only
    device tensors: a number from the host would queue behind all pending kernels, and the host would wait for the
    backward pass at each step.

    Processes: collective, at the first call with a default group.
    """
    global _host_group  # noqa: PLW0603 - as long-lived as the default group of torch
    if _host_group is None or _host_group[0] is not dist.group.WORLD:  # a program may create another default group
        _host_group = dist.group.WORLD, dist.new_group(backend="gloo")
    return _host_group[1]


def _gather_bytes(data: bytes, group: dist.ProcessGroup | None, *, source: int | None = None) -> list[bytes]:
    """Return the bytes of every process, or only those of `source`; all processes have to be in the same call.

    A header is sent first: the number of the user's call, the size, and the bytes themselves if there are few, as is
    usual. This detects mismatched calls of the Trainer's methods before one receives the other's data.

    Raises:
        ModuleContractError: Another process is in another call.
    """
    call = _serving[-1] if _serving and group is None else ""  # other groups belong to other threads
    tag = zlib.crc32(call.encode())
    group = group or _group_of_host()
    sent = data if source is None or source == process_index() else b""
    header = _TAG.pack(tag, len(sent)) + sent[:_INLINE].ljust(_INLINE, b"\0")
    received = _all_gather(header, group)
    tags, sizes = zip(*map(_TAG.unpack_from, received), strict=True)
    if set(tags) != {tag}:
        # All processes see the same headers, so that all of them come here.
        activity = describe_call(sys._getframe(1)).encode()[:_LONGEST].ljust(_LONGEST, b"\0")
        calls = [text.rstrip(b"\0").decode(errors="replace") for text in _all_gather(activity, group)]
        raise fail_apart(dict(enumerate(calls)))
    largest = max(sizes)
    if largest > _INLINE and source is not None:
        buffer = torch.frombuffer(bytearray(sent or largest), dtype=torch.uint8)
        dist.broadcast(buffer, src=source, group=group)
        return [buffer.numpy().tobytes()]
    if largest > _INLINE:
        received = _all_gather(sent.ljust(largest, b"\0"), group)
    else:
        received = [header[_TAG.size :] for header in received]
    contents = [padded[:size] for padded, size in zip(received, sizes, strict=True)]
    return contents if source is None else [contents[source]]


def _all_gather(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return the bytes of every process, all of the same length."""
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    received = [torch.empty_like(tensor) for _ in range(num_processes())]
    dist.all_gather(received, tensor, group=group)
    return [part.numpy().tobytes() for part in received]


@contextmanager
def serving(call: str) -> Iterator[None]:
    """Attribute the communication in this context to a user's call, which every process has to make.

    The processes meet first, so that the model's communication never meets that of another call.

    Processes: collective.

    Raises:
        ModuleContractError: Another process is in another call.
        ProcessFailedError: Another process has exited.
    """
    _serving.append(call)
    try:
        if num_processes() > 1:
            try:
                _gather_bytes(b"", None)
            except RuntimeError as error:  # of the connection
                got, expected = f"another process has exited: {error}", "the same call on every process"
                do = f"call {call} outside `if trainer.is_main:` and the like"
                raise fail(ProcessFailedError, call, got=got, expected=expected, do=do) from error
        yield
    finally:
        _serving.pop()


def describe_call(frame: FrameType | None) -> str:
    """Describe what the main thread, with this frame, is doing, and for which call of the user."""
    return ", ".join([*_serving[-1:], describe_activity(frame)])


def fail_apart(doing: Mapping[int, str]) -> ModuleContractError:
    """Return the error about processes that wait for one another in different calls."""
    groups: dict[str, list[int]] = {}
    for index, what in doing.items():
        groups.setdefault(what, []).append(index)
    got = "; ".join(f"process {', '.join(map(str, indices))}: {what}" for what, indices in groups.items())
    do = "make calls that need every process on all of them, outside `if trainer.is_main:` and the like; "
    do += "only the main process writes files anyway"
    where, expected = "mismatched calls across processes", "the same call on every process"
    return fail(ModuleContractError, where, got=got, expected=expected, do=do)


def new_cpu_group() -> dist.ProcessGroup | None:
    """Return a new group of all processes, for collectives on host memory in another thread; None with one process.

    Two threads of a process must not use one group: their collectives would be matched in order of arrival, which
    differs between processes.

    Processes: collective.
    """
    if num_processes() == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo")
    names_of_threads.add(group.group_name)
    return group


def close_cpu_group(group: dist.ProcessGroup | None) -> None:
    """Close the connections and threads of `new_cpu_group`. Not collective."""
    if group is not None and dist.is_initialized():  # the program may have left the process group before
        dist.destroy_process_group(group)


def gather_objects(value: T, *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return one picklable value of every process, ordered by rank.

    Processes: collective.
    """
    if num_processes() == 1:
        return [value]
    return [pickle.loads(pickled) for pickled in _gather_bytes(pickle.dumps(value), group)]


def gather_from_data(value: T) -> list[T]:
    """Like `gather_objects`, but with one value per part of the data, in their order.

    Processes: collective.
    """
    return each_once(gather_objects(value))


def gather_if_different(value: T) -> list[T]:
    """Return the value of every process, ordered by rank, if they differ; otherwise nothing.

    Usually only a checksum is sent: the value may be large, such as a description of each weight. It consists of names
    and numbers. Values that are equal but not in the same order count as different.

    Processes: collective.
    """
    if num_processes() == 1:
        return []
    checksum = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    if len(set(_gather_bytes(checksum, None))) == 1:
        return []
    return gather_objects(value)


def each_once(of_processes: list[T]) -> list[T]:
    """Reduce a list with an entry per process to one entry per part of the data."""
    return of_processes[::_ranks_per_batch]


def broadcast_object(value: T, *, source: int = 0, group: dist.ProcessGroup | None = None) -> T:
    """Return the picklable value of one process, the main one by default, on every process.

    Processes: collective; the values of other processes are ignored.
    """
    if num_processes() == 1:
        return value
    pickled = pickle.dumps(value) if process_index() == source else b""  # what others pass may not be picklable
    [received] = _gather_bytes(pickled, group, source=source)
    result: T = pickle.loads(received)
    return result


def broadcast_buffer(buffer: torch.Tensor, *, source: int) -> None:
    """Fill a buffer of bytes in host memory with what one process has in it. For large buffers: it makes no copy.

    Processes: collective; nothing detects mismatched calls, so make another collective call first.
    """
    if num_processes() > 1:
        dist.broadcast(buffer, src=source, group=_group_of_host())


def run_on_main_process(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Call `action` on the main process only, and return its picklable result on every process.

    Processes: collective.

    Raises:
        Exception: Any error of the action, on every process, so that none waits for the others; on the others without
            the traceback.
    """
    if num_processes() == 1:
        return action()
    if not is_main_process():
        return broadcast_object(_Result[T](), group=group).unwrap()
    result = _Result.of(action)
    broadcast_object(result.for_others(), group=group)
    return result.unwrap()


def run_on_each_disk(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Call `action` on one process of each disk, and return its picklable result on all processes of this disk.

    Processes: collective.

    Raises:
        Exception: Any error of the action, on every process.
    """
    if not has_separate_disks():
        return run_on_main_process(action, group=group)
    results = run_on_every_process(lambda: action() if manages_disk() else None, group=group)
    return results[_disk_managers[process_index()]]  # type: ignore[return-value]


def run_on_every_process(action: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Call `action` on each process, and return all picklable results, ordered by rank.

    Processes: collective.

    Raises:
        Exception: The error of this process, otherwise of the first process that failed, without its traceback; on
            every process, so that none waits for the others.
    """
    local_result = _Result.of(action)
    try:
        results = gather_objects(local_result.for_others(), group=group)
    except Exception:
        if local_result.error is None:
            raise
        raise local_result.error from None  # the other processes may be elsewhere because of it
    local_result.unwrap()  # first, because the copies that were sent have no traceback
    return [result.unwrap() for result in results]


@dataclass
class _Result(Generic[T]):
    """The result of an action, or its error."""

    value: T | None = None
    error: Exception | None = None

    @classmethod
    def of(cls, action: Callable[[], T]) -> _Result[T]:
        try:
            value = action()
            pickle.dumps(value)  # here, where the others can still receive the error if it cannot be pickled
            return cls(value=value)
        except Exception as error:  # noqa: BLE001 - raised on every process
            return cls(error=error)

    def for_others(self) -> _Result[T]:
        """Return the result in a form that can be sent: some errors cannot be pickled or unpickled."""
        try:
            pickle.loads(pickle.dumps(self.error))
        except Exception:  # noqa: BLE001 - any error of the error's own pickling
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
    return run_where(function, lambda: launched_rank() == 0)


def on_local_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function only on the first process of each machine; otherwise like `on_main_process`."""
    return run_where(function, lambda: int(os.environ.get("LOCAL_RANK", 0)) == 0)


def on_last_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function only on the last process; otherwise like `on_main_process`."""
    return run_where(function, lambda: launched_rank() == _num_launched() - 1)


def run_where(function: Callable[P, T], is_here: Callable[[], bool]) -> Callable[P, T | None]:
    """Run a function only where a condition holds; elsewhere it returns None."""

    @wraps(function)
    def act(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if is_here() else None

    return act


def launched_rank() -> int:
    """Return the rank of this process, even before there is a process group."""
    return dist.get_rank() if _has_group() else int(os.environ.get("RANK", 0))


def _num_launched() -> int:
    return dist.get_world_size() if _has_group() else int(os.environ.get("WORLD_SIZE", 1))


def is_running(pid: int, created: float, *, slack_s: float = 0.0) -> bool:
    """Return whether a process of this machine is running, as far as can be seen.

    Args:
        pid: Its number, which another process may get later.
        created: When it was created, in seconds since 1970.
        slack_s: How much the system clock may have been adjusted since.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - created) <= slack_s
        return is_same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it exists, but belongs to another user
        return True
