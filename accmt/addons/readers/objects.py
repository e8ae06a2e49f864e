"""Rejects streams of other libraries whose order depends on processes and loader workers."""

from __future__ import annotations

from typing import Any

from accmt.errors import DataError, explain

_LIBRARIES = {"streaming": "MosaicML Streaming", "litdata": "LitData"}


def reject_stream(data: Any, kind: str) -> None:
    """Reject the streams of MosaicML Streaming and LitData, which can be read by index instead.

    They choose samples by the rank and the worker that read them, repeat some so that all get equally many, and resume
    only from a loader of their own.

    Raises:
        DataError: It is such a stream.
    """
    for base in type(data).__mro__:
        library = _LIBRARIES.get(base.__module__.partition(".")[0])
        if library is not None and base.__name__.endswith("StreamingDataset"):
            got = f"a {base.__name__} of {library}, which gives each process and loader worker samples of its own"
            expected = "the same samples in the same order on every process, with any number of workers"
            do = f"read its shards by index: accmt.read_files({_folder_of(data)!r}), a local folder"
            raise DataError(explain(f"the {kind} data", got, expected, do))


def _folder_of(data: Any) -> str:
    streams = getattr(data, "streams", None)
    if streams:
        return str(streams[0].local)
    return str(getattr(getattr(data, "input_dir", None), "path", None) or "FOLDER")
