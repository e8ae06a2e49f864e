"""Argument checks with uniform error messages."""

from __future__ import annotations

import dis
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from inspect import CO_COROUTINE, CO_GENERATOR, Parameter, signature, unwrap
from itertools import pairwise
from math import inf
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self, Union, get_args, get_origin, get_type_hints

import numpy as np

from accmt.errors import (
    AccmtError,
    ArgumentError,
    CombinedError,
    HyperParameterError,
    combine,
    describe_value,
    fail,
    nearest,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


# ---- Numbers as people write them: YAML 1.1 reads `1e-3` as a string, and quotes turn any number into a string.


_DIGITS = r"\d+(?:_\d+)*"
_WHOLE = re.compile(rf"[+-]?{_DIGITS}")
_DECIMAL = re.compile(rf"[+-]?(?:{_DIGITS}\.?(?:{_DIGITS})?|\.{_DIGITS})(?:[eE][+-]?\d+)?")


def number_in(text: str) -> int | float | None:
    """Return the number in `text`, or None: "1e-3", ".001", "1_000" and "100" are numbers, "nan" is not."""
    text = text.strip()
    if _WHOLE.fullmatch(text):
        try:
            return int(text)
        except ValueError:  # Python limits the number of digits
            return None
    return float(text) if _DECIMAL.fullmatch(text) else None


def read_numbers(value: Any) -> Any:
    """Return a copy of `value` with numeric strings converted to numbers, at any depth."""
    if isinstance(value, str):
        number = number_in(value)
        return value if number is None else number
    if isinstance(value, float):
        return float(value)  # a numpy.float64 is a float that YAML cannot write
    if isinstance(value, dict):
        return {key: read_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(read_numbers, value))
    return value


def is_number(value: Any) -> bool:
    """Return whether a value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def as_float(value: Any) -> float:
    """Return a number as a float; an integer that is too large becomes infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole(value: Any) -> Any:
    """Return a float without a fraction, such as `1e5` steps, as an int, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def write_argument(name: str, value: Any) -> str:
    """Return the code that sets an argument to a value.

    Args:
        name: "clip_grad" for a Trainer argument, "failures.spike_guard" for a key of a dict argument, or
            "Failures.spike_guard" for an argument of an options class.
        value: The value.
    """
    argument, _, key = name.partition(".")
    if name[0].isupper():
        return f"{argument}({key}={value})" if key else f"{argument}({value})"
    return f'{argument}={{"{key}": {value}}}' if key else f"{name}={value}"


def write_place(name: str) -> str:
    """Return the location of an argument for messages; `name` as in `write_argument`."""
    return write_argument(name, "...") if name[0].isupper() else f"Trainer({write_argument(name, '...')})"


@dataclass(frozen=True)
class Options:
    """Base class of structured Trainer arguments: frozen, and checked on creation.

    `bool`, `Literal` and None fields are checked by annotation; `Annotated[kind, check]` fields by `check(name,
    value)` unless None. Override `check` for everything else.
    """

    def __post_init__(self) -> None:
        self._require(type(self).__name__)

    def check(self, name: str) -> None:
        """Check what annotations cannot express; `name` is the argument's name in messages."""

    def _require(self, name: str, faults: Sequence[ArgumentError] = ()) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        found = list(faults)
        for field in fields(self):
            value = _read_unusual(getattr(self, field.name), hints[field.name], field.default)
            set_field(self, field.name, value)
            try:
                _require_kind(f"{name}.{field.name}", value, hints[field.name])
            except ArgumentError as error:
                found.append(error)
        if not found:
            self.check(name)
        raise_faults(found)

    @classmethod
    def read(cls, argument: str, value: Any, also: str = "") -> Self:
        """Return options from an object or a dict; None means all defaults.

        Args:
            argument: The Trainer argument.
            value: Its value.
            also: Other valid values, for the message.

        Raises:
            ArgumentError: Anything is invalid; one error lists everything, with the closest name for unknown keys.
        """
        if isinstance(value, cls):
            return value
        known = [field.name for field in fields(cls)]
        if value is not None and not isinstance(value, Mapping):
            expected = f"{cls.__name__}(...), or a dict with any of {', '.join(known)}{also}"
            raise_wrong_value(argument, value, expected, f"{argument}={cls.__name__}({known[0]}=...)")
        made, faults = object.__new__(cls), []
        for field in fields(cls):
            object.__setattr__(made, field.name, field.default)
        for key, part in (value or {}).items():
            if key in known:
                object.__setattr__(made, key, part)
                continue
            do = f"did you mean {nearest(key, known, cutoff=0)}?"
            expected = f"any of {', '.join(known)}"
            faults.append(
                fail(ArgumentError, write_place(f"{argument}.{key}"), got=f"the key {key!r}", expected=expected, do=do)
            )
        made._require(argument, faults)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Return the values that differ from their defaults as a dict; 1 differs from 1.0."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: now for name, (now, default) in values.items() if (type(now), now) != (type(default), default)}


def set_field(frozen: DataclassInstance, name: str, value: Any) -> None:
    """Set a field of a frozen object while it is being created."""
    object.__setattr__(frozen, name, value)


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)


def _read_unusual(value: Any, hint: Any, default: Any) -> Any:
    """Return None for False, or for 0 of a positive number, if None is off; and the default for None if it is not."""
    members = _members(hint)
    if NoneType not in members:
        return default if value is None and Any not in members else value
    choices = [choice for member in members if get_origin(member) is Literal for choice in get_args(member)]
    if value is False and bool not in members and False not in choices:
        return None
    is_positive = any(require_positive in getattr(member, "__metadata__", ()) for member in members)
    return None if is_positive and is_number(value) and value == 0 else value


def _require_kind(name: str, value: Any, hint: Any) -> None:
    """Check a value against its annotation, if the annotation is one that can be checked."""
    members = _members(hint)
    choices: list[Any] = []
    checks: list[Callable[[str, Any], None]] = []
    for member in members:
        if member is NoneType:
            choices.append(None)
        elif member is bool:
            choices += [True, False]
        elif get_origin(member) is Literal:
            choices += get_args(member)
        elif get_origin(member) is Annotated:
            checks.append(member.__metadata__[0])
        else:
            return
    if checks:
        if not any(value is choice for choice in choices):
            checks[0](name, value)
    elif choices == [True, False]:
        require_flag(name, value, default=None)
    else:
        require_choice(name, value, choices)


def raise_faults(errors: Sequence[AccmtError]) -> None:
    """Raise the collected errors as one, if there are any.

    Raises:
        ArgumentError: All are about arguments.
        HyperParameterError: The only one is about hyper-parameters.
        CombinedError: Some are about arguments, some about hyper-parameters.
    """
    if len(errors) == 1:
        raise errors[0]
    if errors:
        is_mixed = any(isinstance(error, HyperParameterError) for error in errors)
        kind = CombinedError if is_mixed else ArgumentError
        raise combine(kind, errors, "several errors")


def require_flags(settings: DataclassInstance) -> None:
    """Check every field annotated as `bool`: the strings "no" and "false" would otherwise be truthy.

    Raises:
        ArgumentError: One of them is neither True nor False.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.type == "bool":
            require_flag(field.name, value, default=bool(field.default))


def require_flag(name: str, value: Any, *, default: bool | None) -> None:
    """Check True or False.

    Raises:
        ArgumentError: It is neither.
    """
    if not isinstance(value, bool):
        raise_wrong_value(name, value, "True or False", write_argument(name, default is None or default))


def require_int(name: str, value: Any, *, at_least: int, at_most: float = inf, also: str = "") -> None:
    """Check an integer.

    Args:
        name: The argument.
        value: Its value.
        at_least: The smallest valid number.
        at_most: The largest.
        also: Other valid values, for the message.

    Raises:
        ArgumentError: `value` is not an int, or out of range.
    """

    def is_right(number: Any) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and at_least <= number <= at_most

    if not is_right(value):
        right = meant(value, is_right, at_least)
        bounds = f"of at least {at_least}" if at_most == inf else f"from {at_least} to {at_most}"
        raise_wrong_value(name, value, f"a whole number {bounds}{also}", write_argument(name, right))


def require_positive(name: str, value: Any) -> None:
    """Check a positive number.

    Raises:
        ArgumentError: `value` is not a positive number.
    """

    def is_right(number: Any) -> bool:
        return isinstance(number, int | float) and not isinstance(number, bool) and number > 0

    if not is_right(value):
        right = meant(value, is_right, None)
        do = (
            f"a positive number, or leave {name.rpartition('.')[2]} out"
            if right is None
            else write_argument(name, right)
        )
        raise_wrong_value(name, value, "a number above 0", do)


def meant(value: Any, is_right: Callable[[Any], bool], otherwise: Any) -> Any:
    """Return the number that an invalid value represents (the string "4", or 4.0), if that number is valid.

    Args:
        value: The value.
        is_right: Returns whether a number is valid.
        otherwise: Returned if it is not.
    """
    number = whole(read_numbers(value))
    return number if is_right(number) else otherwise


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a value is one of `choices`.

    Raises:
        ArgumentError: It is not; the message names the closest choice.
    """
    if value not in choices:
        written = [repr(choice) for choice in choices]
        named = [one for one, choice in zip(written, choices, strict=True) if isinstance(choice, str)]
        meant = nearest(repr(value), written) or [*named, *written][0]
        raise_wrong_value(name, value, "one of " + ", ".join(written), write_argument(name, meant) + "?")


def require_text(name: str, value: Any) -> None:
    """Check a name.

    Raises:
        ArgumentError: `value` is not a string, or empty.
    """
    if not isinstance(value, str) or not value.strip():
        raise_wrong_value(name, value, "a name", f'{name}="..."')


def require_mapping(name: str, value: Any) -> None:
    """Check an optional dict.

    Raises:
        ArgumentError: `value` is neither None nor a mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise_wrong_value(name, value, "a dict", write_argument(name, "{...}"))


def require_keywords(name: str, value: Mapping[str, Any] | None, function: Callable[..., Any], owner: str) -> None:
    """Check that a dict contains only arguments of the function they are passed to.

    Args:
        name: The Trainer argument with the dict.
        value: The dict, or None.
        function: The function to be called with it.
        owner: The function's name in the message.

    Raises:
        ArgumentError: The function has no such argument; the message names the closest one.
    """
    known = [name for name, parameter in signature(function).parameters.items() if parameter.kind in _BY_NAME]
    for keyword in value or {}:
        if keyword not in known:
            do = f"did you mean {meant}?" if (meant := nearest(keyword, known)) else f"leave {keyword!r} out"
            expected = f"an argument of {owner}: {', '.join(known)}"
            raise fail(ArgumentError, write_place(name), got=f"{keyword!r}", expected=expected, do=do)


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def raise_wrong_value(name: str, value: Any, expected: str, do: str) -> NoReturn:
    """Raise the error for a Trainer argument with an invalid value.

    Raises:
        ArgumentError: Always.
    """
    raise fail(ArgumentError, write_place(name), got=describe_value(value), expected=expected, do=do)


def find_returns_of_none(function: Callable[..., Any]) -> list[bool]:
    """Return, for each `return` in a function's source, whether it returns None, also at the end of the function.

    Of a generator, and of a function without Python source, nothing is known: there are none.
    """
    code = getattr(unwrap(function), "__code__", None)
    if code is None or code.co_flags & (CO_GENERATOR | CO_COROUTINE):
        return []
    instructions = [one for one in dis.get_instructions(code) if one.opname not in ("NOP", "CACHE")]
    nones = []
    for before, one in pairwise(instructions):
        if one.opname == "RETURN_CONST":
            nones.append(one.argval is None)
        elif one.opname == "RETURN_VALUE":
            nones.append(before.opname == "LOAD_CONST" and before.argval is None)
            nones += [False] if one.is_jump_target else []  # `loss if ... else None`
    return nones


# ---- Unusual ways to write a setting, where the meaning is clear: False, [] or "none" for off, None for the default.


_OFF: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("accelerator", "callbacks", "checkpoint_every", "checkpoint_options"),
            "checkpointer",
            *("clip_grad", "collate_fn", "data_options"),
            *("grad_accumulation_steps", "handlers", "log_with", "max_time", "metric_options", "metrics"),
            *("min_length", "model_saving", "model_saving_above", "model_saving_below"),
            *("parallelism", "patience", "profiler", "torch_flags", "tracker_options"),
        )
    ),
    "mixed_precision": "no",
    "limit_batches": 1.0,
    "num_sanity_val_steps": 0,
    "overfit_batches": 0,
    "reload_dataloaders_every_n_epochs": 0,
}
"""Arguments that can be off, and the value that means off."""

_COUNTS = ("enable_model_summary", "fast_dev_run", "resume")
"""Flags that may also be a number, or for which a number could mean something else."""

_LISTS = ("callbacks", "collate_fn", "handlers", "log_with", "metrics", "model_saving")


def is_off(value: Any) -> bool:
    """Return whether a value means off where off is possible: None, False, "none", or an empty list or dict."""
    is_word = isinstance(value, str) and value.lower() == "none"
    return value is None or value is False or is_word or is_empty(value)


def is_empty(value: Any) -> bool:
    """Return whether a value is a list, tuple, set or dict without entries."""
    return isinstance(value, list | tuple | set | Mapping) and not value


def read_arguments(arguments: Mapping[str, Any], arguments_fields: Iterable[Field[Any]]) -> dict[str, Any]:
    """Return the Trainer's arguments with unusual values replaced by the usual ones.

    None stands for the default of an argument for which None has no meaning of its own. Values with more than one
    possible meaning, such as `log_every=0`, stay as they are, and are rejected by the checks.
    """
    read = {name: _read(name, value) for name, value in arguments.items()}
    for field in arguments_fields:
        value, kind = read.get(field.name), str(field.type)
        if value is None and field.default not in (MISSING, None) and "None" not in kind:
            read[field.name] = field.default
        elif kind.startswith("bool") and field.name not in _COUNTS and type(value) is int and value in (0, 1):
            read[field.name] = bool(value)
    return read


def _read(name: str, value: Any) -> Any:
    value = to_python(value)
    if name in _LISTS and isinstance(value, list | tuple):
        kept: list[Any] = []
        for one in value:
            is_repeated = isinstance(one, str | type) and one in kept
            if one is not None and not is_repeated:
                kept.append(one)
        value = kept
    elif name == "patience" and isinstance(value, Mapping):
        value = {watched: to_python(one) for watched, one in value.items() if not is_off(one)}
    elif name == "parallelism" and isinstance(value, Mapping) and all(map(is_off, value.values())):
        value = None
    is_written_off = name in _OFF and (value is False or (_OFF[name] is None and is_off(value)))
    return _OFF[name] if is_written_off else value


def to_python(value: Any) -> Any:
    """Return a NumPy scalar, such as the result of a computation, as a Python number, and other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value
