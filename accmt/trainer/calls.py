"""Calls of the Trainer: what they accept in place of the usual arguments, and how they report errors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from torch import nn

from accmt.errors import AccmtError, ArgumentError, MissingArgumentError, UnknownArgumentError, explain
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters
from accmt.options.settings import Settings

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
        if args and is_dataclass(args[0]) and hasattr(args[0], "output_dir"):  # TrainingArguments, or a subclass
            args, kwargs = (), {**dict(zip(("args", "model_path"), args, strict=False)), **kwargs}
        missing = [name for name in _REQUIRED[len(args) :] if name not in kwargs]
        others: list[str] = []
        try:
            init(self, *args, **kwargs, **{name: _STAND_INS[name] for name in missing})
        except AccmtError as error:
            if not missing:
                raise error.with_traceback(None) from error.__cause__
            others = [str(error)]
        if missing:  # reported together with all other errors
            do = 'Trainer({"epochs": 3, "batch_size": 16, "optim": {"type": "AdamW", "lr": 1e-4}}, "out/model"), or '
            do += "the path of a YAML file in place of the dict"
            fault = explain("Trainer", f"no {' and no '.join(missing)}", _EXPECTED, do)
            raise MissingArgumentError("\n\n".join([fault, *others]))

    return cast(Init, checked)


def resolve_aliases(arguments: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Move arguments with alternative spellings from `extra` to their names."""
    resolved = dict(arguments)
    for alias in [name for name in extra if name in ALIASES]:
        name = ALIASES[alias]
        if resolved[name] != Settings.defaults()[name]:
            raise UnknownArgumentError(
                explain(f"Trainer({alias}=..., {name}=...)", "both", "one of them", f"remove {alias}")
            )
        resolved[name] = extra.pop(alias)
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
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            _shorten(error, error.__traceback__)
            error = error.__cause__ or error.__context__


def _shorten(error: BaseException, traceback: TracebackType | None) -> None:
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    if not frames or (_is_own(frames[-1]) and not isinstance(error, AccmtError)):
        return
    following = [*map(_is_own, frames[1:]), False]
    kept = [
        frame
        for frame, is_own_next in zip(frames, following, strict=True)
        if frame is frames[0] or not _is_own(frame) or not is_own_next
    ]
    for frame, after in zip(kept, [*kept[1:], None], strict=True):
        frame.tb_next = after


def _is_own(traceback: TracebackType) -> bool:
    file = traceback.tb_frame.f_code.co_filename
    return file.startswith(_OWN) or file == contextlib.__file__


# ---- The module that `Trainer.fit` trains if it receives a path or hyper-parameters instead


def as_module(module: Any, kwargs: dict[str, Any], hps: HyperParameters) -> AcceleratorModule:
    """Return the module for an argument of `fit`: a module, a model's path, `(path, type)`, or hyper-parameters.

    Args:
        module: One of these.
        kwargs: Further keywords of `fit`, used to build the model.
        hps: The Trainer's hyper-parameters.

    Raises:
        UnknownArgumentError: There are unused keywords.
        ArgumentError: The hyper-parameters describe a different model than the Trainer's.
    """
    is_file = isinstance(module, str | PathLike) and str(module).endswith((".yaml", ".yml", ".json"))
    if is_file or isinstance(module, Mapping | HyperParameters):
        # Reject keywords for `from_pretrained` with hyper-parameters: they belong in the `model` section.
        others = {name: value for name, value in kwargs.items() if name != "processor"}
        if others:
            got = f"the keywords {sorted(others)} together with hyper-parameters"
            lines = ", ".join(f"`{name}: {value}`" for name, value in others.items())
            expected = "only `processor`: arguments of `from_pretrained` belong in the `model` section"
            raise UnknownArgumentError(explain("fit", got, expected, f"write {lines} in `model`"))
        if isinstance(module, Mapping | HyperParameters) or not hps.is_from(module):
            own_hps = HyperParameters.from_config(module)
            _require_same(own_hps, hps, "trainer.fit(trainer.hps, data)")
        else:
            own_hps = hps  # from the same source; only the Trainer's include the flags, and the run records them
        return AcceleratorModule.from_hps(own_hps, in_fit=True, **kwargs)
    if isinstance(module, str | PathLike):
        return AcceleratorModule.from_hf(module, in_fit=True, **kwargs)
    if isinstance(module, tuple):
        return AcceleratorModule.from_hf(*module, in_fit=True, **kwargs)
    if kwargs:
        got, expected = (
            f"the keywords {sorted(kwargs)}",
            "keywords only if `module` is the path of a transformers model",
        )
        raise UnknownArgumentError(explain("fit", got, expected, "pass them to the Trainer, or to your module"))
    from accmt.module import HuggingFaceModule  # a slow import, which `import accmt` avoids

    if isinstance(module, HuggingFaceModule) and module.hps is not None:
        name = "AcceleratorModule" if type(module) is HuggingFaceModule else type(module).__name__
        _require_same(module.hps, hps, f"{name}.from_hps(trainer.hps)")
    own: AcceleratorModule = module
    return own


def _require_same(own: HyperParameters, hps: HyperParameters, do: str) -> None:
    """Check that a module matches the Trainer's hyper-parameters, which the run records.

    Raises:
        ArgumentError: They differ, for example because of flags.
    """
    for section in ("model", "sft", "prefer"):
        if hps[section] is not None and own[section] != hps[section]:
            got = f"{own.where(section)}: {own[section]}, and {hps.where(section)}: {hps[section]}"
            do = f"{do}: the Trainer's hyper-parameters include the flags"
            raise ArgumentError(explain("fit", got, "the model of the Trainer's hyper-parameters", do))
