"""Which errors make a run take a safe checkpoint before they are raised."""

from __future__ import annotations

from enum import Enum
from typing import Any

from accmt.settings.checks import raise_wrong_value


class Handler(Enum):
    """A kind of error that a run takes a safe checkpoint at, before the error is raised.

    Attributes:
        KEYBOARD: Ctrl-C, and the signals of pre-emption.
        CUDA_OUT_OF_MEMORY: A device without memory left.
        ANY: Every `Exception` that is none of these.
        ALL: All of them.
    """

    KEYBOARD = 1
    CUDA_OUT_OF_MEMORY = 2
    ANY = 3
    ALL = 4


def read_handlers(value: Any) -> frozenset[Handler]:
    """Return the single kinds that `Trainer(handlers=...)` names.

    Args:
        value: None, a `Handler`, its name in any case, or a list of these.

    Raises:
        ArgumentError: Something else.
    """
    values = [] if value is None else value if isinstance(value, list | tuple | set | frozenset) else [value]
    handlers = {_read_one(one) for one in values}
    if Handler.ALL in handlers:
        handlers = set(Handler)
    return frozenset(handlers - {Handler.ALL})


def _read_one(value: Any) -> Handler:
    if isinstance(value, Handler):
        return value
    name = value.upper() if isinstance(value, str) else ""
    if name not in Handler.__members__:
        names = ", ".join(f"Handler.{known}" for known in Handler.__members__)
        raise_wrong_value("handlers", value, f"{names}, the name of one, or a list", "handlers=Handler.ALL")
    return Handler[name]
