"""Tests of a table: one case that looks at every row, and reports all that fail.

As a case of its own a row costs ten times what most of them take: fixtures, a folder, a message between processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each row, as `pytest.mark.parametrize` does, but within one case.

    For tests whose rows share what fixtures give them: none that changes it, or needs an empty folder for each.
    """
    fields = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    cases = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def look(**given: Any) -> None:
            failures = []
            for row in cases:
                values = dict(zip(fields, (row,) if len(fields) == 1 else row, strict=True))
                try:
                    test(**values, **given)
                except Exception as error:  # noqa: BLE001 - raised below, with those of the other rows
                    error.add_note(f"at {', '.join(f'{name}={value!r}' for name, value in values.items())}")
                    failures.append(error)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise ExceptionGroup(f"{len(failures)} of {len(cases)} rows of {test.__name__}", failures)

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in fields]
        look.__name__, look.__doc__, look.__module__ = test.__name__, test.__doc__, test.__module__
        look.__signature__ = signature.replace(parameters=kept)
        look.pytestmark = list(getattr(test, "pytestmark", []))
        return look

    return decorate
