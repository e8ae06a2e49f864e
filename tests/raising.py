"""Expects an error by what it is about: its class, and the argument, key, file or hook that it names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_at(
    kind: type[BaseException] | tuple[type[BaseException], ...], where: str, *got: str, expected: str = "", do: str = ""
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error of this class, or of one of these, about this place; `test_advice.py` looks at what it says.

    Args:
        kind: The class of the error, or several.
        where: A part of the `where` of one of its mistakes.
        got: Names, numbers or paths in the `got` of the same mistake.
        expected: A name, number or path in its `expected`.
        do: A name, number or path in its `do`.
    """
    with pytest.raises(kind) as raised:
        yield raised
    faults = getattr(raised.value, "faults", ())
    assert any(
        where in fault.where
        and all(part in fault.got for part in got)
        and expected in fault.expected
        and do in fault.do
        for fault in faults
    ), f"an error about {[where, *got, expected, do]}, not {raised.value!r}"
