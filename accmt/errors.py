"""Every error that accmt raises on purpose; `docs/errors.md` lists them.

Each is also the built-in that a reader would expect, so `except ValueError` works as well as `except AccmtError`.
Only `Preempted` is no `AccmtError`, for it is no `Exception`.

Every message has four parts, which `explain` joins: where, what was got, what was expected, what to do.
"""

from __future__ import annotations

import dis
from difflib import get_close_matches
from typing import TYPE_CHECKING

from accmt.secrets import hide_text

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST_VALUE = 300
_RAISING = (dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"])


class AccmtError(Exception):
    """Base of every error that accmt raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows in a cell: a terminal's traceback. Its own has each frame's whole signature."""
        from traceback import TracebackException

        shown = TracebackException.from_exception(self)
        shown.stack[:] = [frame for frame in shown.stack if "/IPython/" not in frame.filename]
        return "".join(shown.format()).splitlines()


class HyperParameterError(AccmtError, ValueError):
    """A fault in the hyper-parameters; all faults of one source are reported together."""


class HyperParameterFileError(HyperParameterError, FileNotFoundError):
    """The file of hyper-parameters is not there."""


class HyperParameterTypeError(HyperParameterError, TypeError):
    """`hps_config` is neither a path, a dict nor a `HyperParameters`."""


class ArgumentError(AccmtError, ValueError):
    """A Trainer argument has an invalid value."""


class UnknownArgumentError(ArgumentError, TypeError):
    """A Trainer argument that does not exist, or a keyword that nobody would read."""


class MissingArgumentError(ArgumentError, TypeError):
    """The Trainer was made without hyper-parameters, or without a folder for the model."""


class CombinedError(HyperParameterError, ArgumentError):
    """There are faults in the hyper-parameters and in the Trainer's arguments; they are reported together."""


class CallbackNotFoundError(AccmtError, KeyError):
    """A callback that was asked for is not among those of the Trainer."""

    __str__ = Exception.__str__  # that of a KeyError is on one line, in quotes


class ModuleContractError(AccmtError, TypeError):
    """A user's module, callback or step violates the contract of `AcceleratorModule`."""


class MetricError(AccmtError, ValueError):
    """A metric's name, direction or result is wrong."""


class DataError(AccmtError, ValueError):
    """Data that cannot be trained or evaluated on."""


class SavingError(AccmtError, OSError):
    """A folder for models or logs that cannot be written."""


class CheckpointError(AccmtError, RuntimeError):
    """A checkpoint that cannot be written (the older ones are untouched), read, or loaded into this run."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint to resume from."""


class CheckpointCorruptError(CheckpointError):
    """Files of a checkpoint are missing or changed."""


class NonFiniteError(AccmtError, FloatingPointError):
    """A training loss is not finite, or a spike far above those before it; the message names the batch."""


class ReplicasDifferError(AccmtError, RuntimeError):
    """Weights or optimizer state that processes hold alike have become different; the message names the first."""


class ProcessFailedError(AccmtError, RuntimeError):
    """Another process of the run failed, exited, or does not answer; the message holds its report."""


class DeviceError(AccmtError, RuntimeError):
    """The device of a run is busy, has no memory left at the start, or cannot be used by this torch."""


class TrackerError(AccmtError, RuntimeError):
    """A tracker does not start: a wrong server, or an invalid argument."""


class WeightsError(AccmtError, RuntimeError):
    """Saved weights that are incomplete or do not fit the model."""


class MissingPackageError(AccmtError, ImportError):
    """A package is not installed, only in part, or too old."""


class PackageConflictError(AccmtError, ImportError):
    """Another project's files lie in the folder of this package."""


class Preempted(SystemExit):  # noqa: N818 - no error: the program ends as requested
    """A run was left because of SIGTERM or SIGUSR1, at a checkpoint if checkpoints are on.

    A child of `SystemExit` alone, so that the program ends with its exit code and no `except Exception` stops that.
    """


def explain(where: str, got: str, expected: str, do: str) -> str:
    """Join the four parts of an error message; secrets in them are hidden.

    Args:
        where: The argument, file, line, key or hook at fault.
        got: The value (and type) that was found.
        expected: The range, type or list of valid names.
        do: The line to write, or the nearest valid name.
    """
    if "\n  got: " in got:  # a message of four parts itself
        got = got.replace("\n", "\n    ")
    return hide_text(f"{where}\n  got: {got}\n  expected: {expected}\n  do: {do}")


def nearest(name: object, names: Iterable[object], cutoff: float = 0.6) -> str | None:
    """Return the name that was probably meant by another, upper and lower case aside.

    Args:
        name: What was written.
        names: What there is.
        cutoff: How like the two have to be, from 0 to 1: at 0 the nearest is always returned.
    """
    spelling = {str(candidate).lower(): str(candidate) for candidate in names}
    matches = get_close_matches(str(name).lower(), spelling, n=1, cutoff=cutoff)
    return spelling[matches[0]] if matches else None


def describe_value(value: object) -> str:
    """Return a value and its type as messages show them: of a long one, such as a model, the type alone."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= _LONGEST_VALUE and "\n" not in text else f"an object of type {kind}"


def place_of(error: BaseException) -> tuple[str, bool]:
    """Return the file in which an error arose, and whether a `raise` of Python code raised it, not what that calls.

    An error that was never raised counts as raised in "".
    """
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None:
        return "", True
    code = step.tb_frame.f_code
    return code.co_filename, code.co_code[step.tb_lasti] in _RAISING


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device ran out of memory: `torch.OutOfMemoryError`, or an error with such words.

    cuBLAS and cuDNN have words of their own for memory that they could not get.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    is_of_library = "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDNN_STATUS_ALLOC_FAILED" in text
    return type(error).__name__ == "OutOfMemoryError" or is_of_library or "out of memory" in text.lower()
