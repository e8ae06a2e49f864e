"""Lengths of time, as people write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from accmt.settings.checks import raise_wrong_value

_WRITTEN = (
    re.compile(r"(\d+):(\d\d?):(\d\d?):(\d\d?)"),
    re.compile(r"(?:(\d+)d)? ?(?:(\d+)h)? ?(?:(\d+)m)? ?(?:(\d+)s)?"),
)


def read_max_time(value: Any) -> float | None:
    """Return the seconds of `Trainer(max_time=...)`; None is no limit.

    Args:
        value: "DD:HH:MM:SS" or "1h30m", a timedelta, a dict of its arguments, or None.

    Raises:
        ArgumentError: Something else, or no time at all.
    """
    if value is None:
        return None
    seconds = _read(value)
    if seconds is None or seconds <= 0:
        expected = '"DD:HH:MM:SS" or "1h30m", a timedelta, or a dict of its arguments, above 0'
        raise_wrong_value("max_time", value, expected, 'max_time="1h"')
    return seconds


def _read(value: Any) -> float | None:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Mapping):
        try:
            return timedelta(**value).total_seconds()
        except TypeError:
            return None
    forms = [form.fullmatch(value) for form in _WRITTEN] if isinstance(value, str) else []
    written = next((form for form in forms if form), None)
    if written is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in written.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
