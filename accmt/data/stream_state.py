"""The state of data that keep their own position, from which reading resumes at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch.utils.data import IterableDataset

from accmt.libraries.private_names import is_shuffle_buffer, steps_of_stream
from accmt.libraries.versions import why_states_are_inexact

_STATE = "state"


class StreamState:
    """The `state_dict` and `load_state_dict` of a stream or a loader, where resuming from them is exact.

    `load_state_dict` comes before `iter`, which then has to continue after what was last read; the next `iter` begins
    again at the start. The state is taken between two reads, so nothing may read ahead.

    Args:
        owner: The stream, or the loader.
        num_workers: Processes that read ahead.
        source: What a loader reads from.
        also_read: What is read meanwhile, such as validation data: where it is the same stream, or is derived from it,
            reading it moves the state of this one.

    Attributes:
        why_not: Why the state cannot be used; None where it can.
    """

    def __init__(self, owner: Any, *, num_workers: int = 0, source: Any = None, also_read: Iterable[Any] = ()) -> None:
        self._owner = owner
        self._source = source
        self.why_not = _find_obstacle(owner, num_workers, source, also_read)

    def take(self) -> dict[str, Any]:
        """Return what to put into the position; nothing where the state cannot be used."""
        return {} if self.why_not else {_STATE: deepcopy(self._owner.state_dict())}

    def is_in(self, position: Mapping[str, Any]) -> bool:
        """Return whether a position holds a state from which the data can resume."""
        return self.why_not is None and _STATE in position

    @contextmanager
    def restored(self, position: Mapping[str, Any]) -> Iterator[None]:
        """Let the next `iter` resume from a position that holds a state; afterwards the data begin at the start."""
        if not self.is_in(position):
            yield
            return
        self._owner.load_state_dict(deepcopy(position[_STATE]))
        try:
            yield
        finally:
            for data in _streaming_datasets_in(self._owner, self._source):
                data.load_state_dict(None)  # else it would resume there in that epoch of a later run, too


def _find_obstacle(owner: Any, num_workers: int, source: Any, also_read: Iterable[Any]) -> str | None:
    if not (hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict")):
        return "with state_dict and load_state_dict, and no workers, they would resume at once"
    if num_workers > 0:
        return "their state_dict can be used without workers only (dataloader_num_workers=0)"
    streams = _streaming_datasets_in(owner, source)
    inexact = why_states_are_inexact() if streams else None
    if inexact is not None:
        return inexact
    if any(map(_has_shuffle_buffer, streams)):
        return "their state_dict omits what was in the shuffle buffer"
    if any(_parts_of(owner, source) & _parts_of(other, getattr(other, "dataset", None)) for other in also_read):
        return "evaluations read them too, which changes their state"
    return None


def _parts_of(*data: Any) -> set[int]:
    """Return the identities of data, of the streams in them, and of their steps, which hold the state of some."""
    streams = _streams_in(*data)
    steps = [step for one in filter(_is_streaming_dataset, streams) for step in steps_of_stream(one)]
    return {id(part) for part in (*data, *streams, *steps) if part is not None}


def _streaming_datasets_in(*data: Any) -> list[Any]:
    return list(filter(_is_streaming_dataset, _streams_in(*data)))


def _streams_in(*data: Any) -> list[Any]:
    """Return the streams among data, and those that they hold, such as the rows of one that groups them."""
    found: list[Any] = []
    left = list(data)
    while left:
        one = left.pop()
        if _is_stream(one) and not any(one is other for other in found):
            found.append(one)
        if not _is_streaming_dataset(one):  # its parts are its steps
            left += [part for part in getattr(one, "__dict__", {}).values() if _is_stream(part) and part not in found]
    return found


def _is_stream(data: Any) -> bool:
    return isinstance(data, IterableDataset) or _is_streaming_dataset(data)


def _has_shuffle_buffer(data: Any) -> bool:
    """Return whether a streaming dataset of `datasets` shuffles in a buffer.

    Source: `datasets.IterableDataset.state_dict`: "examples from shuffle buffers are lost when resuming". No public
    attribute shows that there is one.
    """
    return any(map(is_shuffle_buffer, steps_of_stream(data)))


def _is_streaming_dataset(data: Any) -> bool:
    datasets = sys.modules.get("datasets")  # not imported, it made no data
    return datasets is not None and isinstance(data, datasets.IterableDataset)
