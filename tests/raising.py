"""Expects an error by what it is about: its class, and the argument, key, file or hook that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from accmt.errors import AccmtError


@contextmanager
def raises_at(kind: type[BaseException], where: str) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of this class about this place. What it says is the business of `test_advice.py`.

    Args:
        kind: The class of the error.
        where: A part of the `where` of one of its mistakes.
    """
    with pytest.raises(kind) as raised:
        yield raised
    error = raised.value
    places = [fault.where for fault in error.faults] if isinstance(error, AccmtError) else []
    assert any(where in place for place in places), f"an error about {where!r}, not about {places}: {error}"
