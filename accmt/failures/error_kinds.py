"""Tells kinds of errors apart."""

from __future__ import annotations

from accmt.errors import is_out_of_memory as is_out_of_memory
from accmt.settings.handlers import Handler


def kind_of(error: BaseException) -> Handler | None:
    """Return the handler that an error is a matter of; None where no handler is."""
    if isinstance(error, KeyboardInterrupt):
        return Handler.KEYBOARD
    if is_out_of_memory(error):
        return Handler.CUDA_OUT_OF_MEMORY
    return Handler.ANY if isinstance(error, Exception) else None
