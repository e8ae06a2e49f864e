"""Tells kinds of errors apart."""

from __future__ import annotations

import torch

from accmt.settings.handlers import Handler


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device has no memory left."""
    is_said = isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    return is_said or isinstance(error, torch.OutOfMemoryError)


def kind_of(error: BaseException) -> Handler | None:
    """Return the handler that an error is a matter of; None where no handler is."""
    if isinstance(error, KeyboardInterrupt):
        return Handler.KEYBOARD
    if is_out_of_memory(error):
        return Handler.CUDA_OUT_OF_MEMORY
    return Handler.ANY if isinstance(error, Exception) else None
