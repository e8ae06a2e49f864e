"""Tracebacks that focus on the user's code: only accmt's frames at the boundaries are kept."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from accmt.errors import AccmtError

_OWN = str(Path(__file__).parent.parent)


class ShortTraceback:
    """Removes accmt's inner frames from the tracebacks of an error and its causes.

    An `AccmtError` keeps the frame that raised it. Any other error that accmt raises is a bug in accmt, so it keeps all
    frames.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            _shorten(error, error.__traceback__)
            error = error.__cause__ or error.__context__


def _shorten(error: BaseException, traceback: TracebackType | None) -> None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    if not frames or (_is_own(frames[-1]) and not isinstance(error, AccmtError)):
        return
    following = [*map(_is_own, frames[1:]), False]
    kept = [
        frame
        for frame, is_own_next in zip(frames, following, strict=True)
        if frame is frames[0] or not _is_own(frame) or not is_own_next
    ]
    for frame, after in zip(kept, [*kept[1:], None], strict=True):
        frame.tb_next = after


def _is_own(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(_OWN) or file == contextlib.__file__
