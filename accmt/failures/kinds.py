"""What an error says about where a run failed: which handler is for it, and whether another process caused it."""

from __future__ import annotations

import contextlib
import os

import torch.distributed as dist

from accmt.errors import ProcessFailedError, file_of, is_out_of_memory
from accmt.options.failures import Handler

COLLECTIVES = ("torch/distributed/", "accmt/processes.py")
"""The files of functions in which a process waits for others."""

WRAPPER = "torch/nn/parallel/distributed.py"
"""The file of DDP, which also waits for them."""

_TENSORS = "torch/distributed/tensor/"


def record_for_launcher(error: BaseException) -> None:
    """Name this process in the launcher's summary, which uses the time in the file, not which process it ended first.

    Source: https://docs.pytorch.org/docs/stable/elastic/errors.html
    """
    if "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

        with contextlib.suppress(OSError):
            ErrorHandler().record_exception(error)


def kind_of(error: BaseException) -> Handler | None:
    """Return the kind of an error for `Trainer(handlers=...)`; None if no handler is for it."""
    if isinstance(error, KeyboardInterrupt):
        return Handler.KEYBOARD
    if is_out_of_memory(error):
        return Handler.CUDA_OUT_OF_MEMORY
    if isinstance(error, Exception):
        return Handler.ANY
    return None


def is_consequence(error: BaseException) -> bool | None:
    """Return whether an error only results from the failure of another process; None if that is unknown.

    Does not depend on the message. torch.distributed raises errors of its own types or, from C++, a plain RuntimeError.
    """
    if isinstance(error, dist.DistError | ProcessFailedError):
        return True
    cause = error.__cause__
    if cause is None and not error.__suppress_context__:
        cause = error.__context__
    if cause is not None and is_consequence(cause):
        return True
    if type(error) is not RuntimeError:
        return False
    file = file_of(error)
    if _TENSORS in file:  # which Python code of torch raises about a DTensor's wrong use
        return None
    if any(path in file for path in (*COLLECTIVES, WRAPPER)):
        return True
    return None
