"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from accmt.settings.checks import raise_wrong_value, require_int

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])B\s*", re.IGNORECASE)


def read_size(name: str, value: int | str) -> int:
    """Return a size in bytes.

    Args:
        name: The Trainer's argument.
        value: Bytes from 1, or text such as "5GB": a number with KB, MB, GB or TB, each 1,000 of the one before.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(value, str):
        require_int(name, value, at_least=1)
        return value
    found = _SIZE.fullmatch(value)
    if found is None:
        raise_wrong_value(name, value, "bytes, or a number with KB, MB, GB or TB", f'{name}="5GB"')
    return int(float(found[1]) * 1000 ** ("KMGT".index(found[2].upper()) + 1))
