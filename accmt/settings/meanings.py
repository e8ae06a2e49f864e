"""What the docstring of a class says of each of its arguments: the one place where an argument is described."""

from __future__ import annotations

import inspect
import re

_ENTRY = re.compile(r"^    (\w+|\*\*\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def read_meanings(documented: type) -> dict[str, str]:
    """Return what the `Args:` section of a class says of each argument, in one line each.

    Args:
        documented: A class with a docstring in Google's style; one without has no meanings, as under `python -OO`.
    """
    section = inspect.cleandoc(documented.__doc__ or "").partition("Args:\n")[2].split("\n\n")[0]
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section)}
