"""Calls of the Trainer: what they accept in place of the usual arguments, and how they report errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from torch import nn

from accmt.errors import AccmtError, MissingArgumentError, UnknownArgumentError, combine, fail
from accmt.options.settings import Settings
from accmt.registry import addon

ALIASES = {
    "model_saving_aboce": "model_saving_above",
    "callback": "callbacks",
}
"""Alternative spellings from the original accmt."""

MISSPELT = ("model_saving_aboce",)


Init = TypeVar("Init", bound=Callable[..., None])

_STAND_INS: Mapping[str, Any] = {"hps_config": {"epochs": 1, "batch_size": 1, "optim": "SGD"}, "model_path": "model"}
_REQUIRED = tuple(_STAND_INS)
_OF_TRANSFORMERS = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
_EXPECTED = "hyper-parameters and a model folder"


def reports_at_call(init: Init) -> Init:
    """Make the Trainer's constructor report errors at the call, including missing arguments.

    The message names the location of the error; the frames of the checks, on each process, would bury it. If required
    arguments are missing, Python would report only these, and hide the hints about another trainer's arguments.
    """

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if args and isinstance(args[0], nn.Module):  # in the order of transformers' Trainer
            args, kwargs = (), {**dict(zip(_OF_TRANSFORMERS, args, strict=False)), **kwargs}
        if is_dataclass(args[0] if args else kwargs.get("hps_config")):  # another trainer's arguments
            args, kwargs = (), addon("read_arguments")(*args, **kwargs)
        missing = [name for name in _REQUIRED[len(args) :] if name not in kwargs]
        stand_ins = {name: _STAND_INS[name] for name in missing}
        errors: list[AccmtError] = []
        try:
            init(self, *args, **kwargs, **stand_ins)
        except AccmtError as error:
            if not missing:
                # The frames are those of the checks: the line to correct is the call.
                raise error.with_traceback(None) from error.__cause__
            errors.append(error)
        if missing:  # reported together with all other errors
            do = 'Trainer({"epochs": 3, "batch_size": 16, "optim": {"type": "AdamW", "lr": 1e-4}}, "out/model"), or '
            do += "the path of a YAML file in place of the dict"
            got = f"no {' and no '.join(missing)}"
            absent = fail(MissingArgumentError, "Trainer", got=got, expected=_EXPECTED, do=do)
            raise combine(MissingArgumentError, [absent, *errors])

    return cast(Init, checked)


def resolve_aliases(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Move arguments with alternative spellings from `extra` to their names."""
    resolved = dict(arguments)
    for alias in list(extra):
        if alias not in ALIASES:
            continue
        name = ALIASES[alias]
        # One would win without a word.
        if resolved[name] != Settings.defaults()[name]:
            raise fail(
                UnknownArgumentError,
                f"Trainer({alias}=..., {name}=...)",
                got="both",
                expected="one of them",
                do=f"remove {alias}",
            )
        resolved[name] = extra.pop(alias)
        # A name that the original accmt misspelled: its programs run, and see the right one.
        if alias in MISSPELT:
            warnings.warn(f"{alias} is a misspelling; write {name}", DeprecationWarning, stacklevel=3)
    return resolved


# ---- Tracebacks that focus on the user's code: only accmt's frames at the boundaries are kept.


_OWN = str(Path(__file__).parent.parent)


class ShortTraceback:
    """Removes accmt's inner frames from the tracebacks of an error and its causes.

    An `AccmtError` keeps the frame that raised it. Any other error that accmt raises is a bug in accmt, so it keeps all
    frames.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        seen: set[int] = set()
        # An error may be in its own chain of causes.
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            _shorten(error, error.__traceback__)
            error = error.__cause__ or error.__context__


def _shorten(error: BaseException, traceback: TracebackType | None) -> None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    # A bug of accmt: whoever reports it needs all frames.
    if not frames or (_is_own(frames[-1]) and not isinstance(error, AccmtError)):
        return
    shown = []
    following = [*map(_is_own, frames[1:]), False]
    for frame, is_own_next in zip(frames, following, strict=True):
        if frame is frames[0] or not _is_own(frame) or not is_own_next:
            shown.append(frame)
    for frame, after in zip(shown, [*shown[1:], None], strict=True):
        frame.tb_next = after


def _is_own(traceback: TracebackType) -> bool:
    # A context manager of accmt adds a frame of contextlib.
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(_OWN) or file == contextlib.__file__
