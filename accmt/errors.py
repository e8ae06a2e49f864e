"""Every error that accmt raises on purpose; `docs/failures.md` lists them.

Each error also derives from the matching built-in, so `except ValueError` works as well as `except AccmtError`.
Only `Preempted` is not an `AccmtError`, because it is not an `Exception`.

Every error is raised with `raise fail(kind, where, got=..., expected=..., do=...)`. The four parts stay readable as
`error.faults`; `explain` joins them to the text of the message, of a warning or of a note.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from accmt.secrets import hide_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LONGEST_VALUE = 300


class Fault(NamedTuple):
    """One mistake, in the four parts of its message."""

    where: str
    """The argument, file, line, key or hook with the error."""
    got: str
    """The value found, and its type."""
    expected: str
    """The valid range, type or names."""
    do: str
    """The line to write, or the closest valid name."""


class AccmtError(Exception):
    """Base class of all errors that accmt raises on purpose."""

    faults: tuple[Fault, ...] = ()
    """What is wrong, one entry per mistake; empty if the error reports an event, such as a failed process."""

    def _render_traceback_(self) -> list[str]:
        """Return a terminal's traceback for IPython, whose own prints each frame's whole signature."""
        from traceback import TracebackException

        shown = TracebackException.from_exception(self)
        shown.stack[:] = [frame for frame in shown.stack if "/IPython/" not in frame.filename]
        return "".join(shown.format()).splitlines()


class HyperParameterError(AccmtError, ValueError):
    """Invalid hyper-parameters; all errors in one source are reported together."""


class HyperParameterFileError(HyperParameterError, FileNotFoundError):
    """The hyper-parameter file does not exist."""


class HyperParameterTypeError(HyperParameterError, TypeError):
    """`hps_config` is neither a path, a dict nor a `HyperParameters`."""


class ArgumentError(AccmtError, ValueError):
    """A Trainer argument has an invalid value."""


class ArgumentFileError(ArgumentError, FileNotFoundError):
    """An argument names a file or folder that does not exist."""


class UnknownArgumentError(ArgumentError, TypeError):
    """An unknown Trainer argument, or a keyword that nothing would use."""


class MissingArgumentError(ArgumentError, TypeError):
    """The Trainer was created without hyper-parameters or without a model folder."""


class CallbackNotFoundError(AccmtError, KeyError):
    """The Trainer has no such callback."""

    __str__ = Exception.__str__  # KeyError's puts the message on one line, in quotes


class ModuleContractError(AccmtError, TypeError):
    """A user's module, callback or step violates the contract of `AcceleratorModule`."""


class MetricError(AccmtError, ValueError):
    """A metric has an invalid name, direction or result."""


class DataError(AccmtError, ValueError):
    """The data cannot be used for training or evaluation."""


class StoreError(AccmtError, RuntimeError):
    """A file or a store of data cannot be read, or has changed during the run; `on_bad_sample` does not apply to it."""


class CombinedError(HyperParameterError, ArgumentError, ModuleContractError, MetricError, DataError):
    """Several mistakes of different kinds, reported together; `faults` has each."""


class SavingError(AccmtError, OSError):
    """A folder for models or logs is not writable."""


class CheckpointError(AccmtError, RuntimeError):
    """A checkpoint cannot be written (older ones are untouched), read, or loaded into this run."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint to resume from."""


class CheckpointCorruptError(CheckpointError):
    """Checkpoint files are missing or modified."""


class NonFiniteError(AccmtError, FloatingPointError):
    """A training loss is not finite, or spikes far above the losses before it; the message names the batch."""


class ReplicasDifferError(AccmtError, RuntimeError):
    """Replicated weights or optimizer states differ between processes; the message names the first difference."""


class StepDiffersError(AccmtError, RuntimeError):
    """A step that a resumed run made again has another result than before the interruption."""


class ProcessFailedError(AccmtError, RuntimeError):
    """Another process of the run failed, exited or stopped responding; the message includes its report."""


class DeviceError(AccmtError, RuntimeError):
    """The device is busy, has no free memory at the start, or is not supported by the installed torch."""


class TrackerError(AccmtError, RuntimeError):
    """A tracker cannot start: wrong server or invalid argument."""


class WeightsError(AccmtError, RuntimeError):
    """Saved weights are incomplete or do not match the model."""


class MissingPackageError(AccmtError, ImportError):
    """A package is missing, incomplete or too old."""


class PackageConflictError(AccmtError, ImportError):
    """This package's folder contains files of another project."""


class Preempted(SystemExit):  # noqa: N818 - not an error: the program ends as requested
    """A run was stopped by SIGTERM or SIGUSR1, after a checkpoint if checkpoints are enabled.

    Derives from `SystemExit` only: the program ends with its exit code, and `except Exception` does not catch it.
    """


_Error = TypeVar("_Error", bound=AccmtError)


def fail(kind: type[_Error], where: str, *, got: str, expected: str, do: str) -> _Error:
    """Return an error about one mistake, to be raised.

    Args:
        kind: The class of the error.
        where: The argument, file, line, key or hook with the error.
        got: The value found, and its type.
        expected: The valid range, type or names.
        do: The line to write, or the closest valid name.
    """
    error = kind(explain(where, got, expected, do))
    error.faults = (Fault(where, got, expected, do),)
    return error


def combine(kind: type[_Error], errors: Sequence[AccmtError], title: str | None = None) -> _Error:
    """Return one error that reports the mistakes of several.

    Args:
        kind: The class of the error.
        errors: The errors, in the order in which they are reported.
        title: The first line of the message.
    """
    combined = kind("\n\n".join([*([] if title is None else [title]), *map(str, errors)]))
    combined.faults = tuple(fault for error in errors for fault in error.faults)
    return combined


def join_errors(errors: Sequence[AccmtError]) -> AccmtError:
    """Return one error for all mistakes: the error itself if there is only one, of their class if they share it.

    Args:
        errors: The errors, at least one.
    """
    if len(errors) == 1:
        return errors[0]
    kinds = {type(error) for error in errors}
    kind = kinds.pop() if len(kinds) == 1 else CombinedError
    combined = combine(kind, errors, "several errors")
    for note in (note for error in errors for note in getattr(error, "__notes__", ())):
        combined.add_note(note)
    return combined


def explain(where: str, got: str, expected: str, do: str) -> str:
    """Join the four parts of an error message and hide secrets.

    Args:
        where: The argument, file, line, key or hook with the error.
        got: The value found, and its type.
        expected: The valid range, type or names.
        do: The line to write, or the closest valid name.
    """
    if "\n  got: " in got:  # itself a message of four parts
        got = got.replace("\n", "\n    ")
    return hide_text(f"{where}\n  got: {got}\n  expected: {expected}\n  do: {do}")


def nearest(name: object, names: Iterable[object], cutoff: float = 0.6) -> str | None:
    """Return the valid name closest to a misspelled one, ignoring case.

    Args:
        name: The misspelled name.
        names: The valid names.
        cutoff: Required similarity, from 0 to 1; 0 always returns the closest name.
    """
    spelling = {str(candidate).lower(): str(candidate) for candidate in names}
    matches = get_close_matches(str(name).lower(), spelling, n=1, cutoff=cutoff)
    return spelling[matches[0]] if matches else None


def describe_value(value: object) -> str:
    """Return a value and its type for a message; only the type if the value is long, such as a model."""
    text = repr(value)
    kind = type(value).__name__
    return f"{text} ({kind})" if len(text) <= _LONGEST_VALUE and "\n" not in text else f"an object of type {kind}"


def file_of(error: BaseException) -> str:
    """Return the file whose code raised an error, or called the compiled code that did; "" if it was never raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return "" if step is None else step.tb_frame.f_code.co_filename


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device ran out of memory: `torch.OutOfMemoryError`, or an error whose message says so.

    cuBLAS and cuDNN report failed allocations with their own status codes.
    """
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    is_of_library = "CUBLAS_STATUS_ALLOC_FAILED" in text or "CUDNN_STATUS_ALLOC_FAILED" in text
    return type(error).__name__ == "OutOfMemoryError" or is_of_library or "out of memory" in text.lower()
