"""Argument checks with uniform error messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from inspect import Parameter, signature
from os import PathLike, fspath
from pkgutil import resolve_name
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

from accmt.errors import (
    ArgumentError,
    describe_value,
    fail,
    join_errors,
    nearest,
)
from accmt.libraries.versions import require
from accmt.registry import addon

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
    match value:
        case str():
            number = number_in(value)
            return value if number is None else number
        case float():
            return float(value)  # a numpy.float64 is a float that YAML cannot write
        case dict():
            return {key: read_numbers(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(map(read_numbers, value))
        case _:
            return value


def to_plain(value: Any) -> Any:
    """Return mappings, such as OmegaConf's, as dicts, their lists as lists, and paths as strings, at any depth.

    Settings are stored in YAML and JSON, which have nothing else.
    """
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, MutableSequence) and not isinstance(value, list):
        return list(map(to_plain, value))
    return fspath(value) if isinstance(value, PathLike) else value


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
    argument, *keys = name.split(".")
    if name[0].isupper():
        if keys:
            value = f"{keys[0]}={value}"
        return f"{argument}({value})"
    for key in reversed(keys):
        value = f'{{"{key}": {value}}}'
    return f"{argument}={value}"


def write_place(name: str) -> str:
    """Return the location of an argument for messages; `name` as in `write_argument`."""
    code = write_argument(name, "...")
    return code if name[0].isupper() else f"Trainer({code})"


# ---- The validator: classes declare the types and ranges of their fields, and pydantic checks them.


Note = TypeVar("Note")
KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class KeyFault:
    """One error at one key.

    Attributes:
        path: The path of keys, `("optim", "lr")`.
        got: The value found.
        expected: The valid values.
        do: What to write instead.
        line: Its line, if different from the line of `path`.
    """

    path: KeyPath
    got: str
    expected: str
    do: str
    line: int | None = None


@dataclass(frozen=True)
class Expected:
    """In an annotation: the valid values in words, and the code of a valid one; otherwise both follow from the type."""

    text: str
    example: str


@dataclass(frozen=True)
class Off:
    """In an annotation: the value that False stands for; if it is None, `is_off` says what else does.

    Attributes:
        value: The value that means off.
        is_zero: Whether 0 means off too.
    """

    value: Any = None
    is_zero: bool = False


@dataclass(frozen=True)
class Range:
    """In an annotation: the bounds of a number; `annotated_types` has them too, but importing accmt must not load it.

    Attributes:
        ge: The smallest valid number.
        gt: A number that valid ones are greater than.
        le: The largest valid number.
        lt: A number that valid ones are less than.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        """Add the bounds to pydantic's schema of the number, which alone accepts a tensor as a float."""
        from pydantic_core import core_schema

        bounds = {name: bound for name, bound in vars(self).items() if bound is not None}
        return core_schema.chain_schema([core_schema.is_instance_schema((int, float)), handler(source) | bounds])


@dataclass(frozen=True)
class Arguments:
    """Base class of the Trainer's arguments: frozen, and checked on creation.

    Annotations declare what is valid: types, `Literal`, `Range`, `Off`, `Expected`, and functions `check(name, value)`
    for what types cannot express. Override `check` for what concerns several fields.
    """

    def __post_init__(self) -> None:
        self._validate(f"{type(self).__name__}.")

    def check(self, name: str) -> None:
        """Check several fields together; `name` is the argument's name in messages."""

    def _validate(self, prefix: str, unknown: Mapping[str, Any] | None = None) -> None:
        """Check all fields and report all errors at once.

        Args:
            prefix: What stands before the name of a field in messages, as in `write_argument`.
            unknown: Entries that are not fields, to be reported.
        """
        declared: Any = type(self)
        errors: list[ArgumentError] = []
        values = dict(unknown or {})
        for field in fields(self):
            name, hint = f"{prefix}{field.name}", hints_of(declared)[field.name]
            value = read_unusual(getattr(self, field.name), hint, field.default)
            # An error about one field must not hide those about others.
            try:
                value = _read_options(name, value, hint)
                for check in _metadata(hint):
                    if callable(check) and value is not None:
                        check(name, value)
            except ArgumentError as error:
                errors.append(error)
            else:
                set_field(self, field.name, value)
                # Defaults are valid, and pydantic costs time in every process.
                if value is not field.default:
                    values[field.name] = value

        def write(key: str, example: str) -> str:
            return write_argument(f"{prefix}{key}", example)

        if values:
            for fault in find_faults(shape_of(declared), values, write):
                where = write_place(f"{prefix}{fault.path[0]}")
                errors.append(fail(ArgumentError, where, got=fault.got, expected=fault.expected, do=fault.do))
        if not errors:
            self.check(prefix.rstrip("."))
        if errors:
            raise join_errors(errors)


@dataclass(frozen=True)
class Options(Arguments):
    """Base class of structured Trainer arguments, which may also be written as a dict."""

    @classmethod
    def read(cls, argument: str, values: Mapping[str, Any]) -> Self:
        """Return options from a dict.

        Args:
            argument: The Trainer argument.
            values: The dict.

        Raises:
            ArgumentError: Anything is invalid; one error lists everything, with the closest name for unknown keys.
        """
        # Without `__init__`, whose message would have the class's name and no unknown keys.
        options = object.__new__(cls)
        unknown = {str(key): value for key, value in values.items()}
        for field in fields(cls):
            set_field(options, field.name, unknown.pop(field.name, field.default))
        options._validate(f"{argument}.", unknown)
        return options

    def to_dict(self) -> dict[str, Any]:
        """Return the values that differ from their defaults as a dict; 1 differs from 1.0."""
        changed = {}
        for field in fields(self):
            value = getattr(self, field.name)
            # 1 batch is not 1.0, which is all of them, although Python says that they are equal.
            if type(value) is not type(field.default) or value != field.default:
                changed[field.name] = value
        return changed

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Accept only objects of the class, which are checked already."""
        from pydantic_core import core_schema

        return core_schema.is_instance_schema(cls)


class Group(Arguments):
    """Base class of a group of Trainer arguments."""

    def __post_init__(self) -> None:
        self._validate("")


def _read_options(name: str, value: Any, hint: Any) -> Any:
    """Return options in place of their dict, and default options in place of None where None is not valid."""
    members = _members(hint)
    for member in members:
        kind = _bare(member)
        if _is_options(kind):
            if isinstance(value, Mapping):
                return kind.read(name, value)
            if value is None and NoneType not in members:
                return kind()
    return value


def _is_options(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Options)


def set_field(frozen: DataclassInstance, name: str, value: Any) -> None:
    """Set a field of a frozen object while it is being created."""
    object.__setattr__(frozen, name, value)


@cache
def hints_of(declared: Any) -> dict[str, Any]:
    """Return the annotation of each field of a class, including what `Annotated` adds."""
    return get_type_hints(declared, include_extras=True)


def _metadata(hint: Any) -> tuple[Any, ...]:
    return getattr(hint, "__metadata__", ())


def _notes(hint: Any, kind: type[Note]) -> Iterator[Note]:
    """Yield what `Annotated` adds of one kind."""
    for note in _metadata(hint):
        if isinstance(note, kind):
            yield note


def _members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the only type."""
    bare = _bare(hint)
    return get_args(bare) if get_origin(bare) in (UnionType, Union) else (hint,)


def _bare(hint: Any) -> Any:
    """Return a type without what `Annotated` adds to it."""
    return hint.__origin__ if get_origin(hint) is Annotated else hint


def is_off(value: Any) -> bool:
    """Return whether a value means off where off is possible: None, False, "none", or an empty list or dict."""
    is_word = isinstance(value, str) and value.lower() == "none"
    return value is None or value is False or is_word or is_empty(value)


def is_empty(value: Any) -> bool:
    """Return whether a value is a list, tuple, set or dict without entries."""
    return isinstance(value, list | tuple | set | Mapping) and not value


def read_unusual(value: Any, hint: Any, default: Any) -> Any:
    """Return a value as it is usually written.

    A NumPy scalar is its Python number, 0 and 1 are False and True where neither a number nor a string is valid, and
    None is the default where None is not valid. Where the annotation has `Off`, False and the like are its value, and
    a list has no None and no entry twice.
    """
    value = to_python(value)
    for off in _notes(hint, Off):
        if isinstance(value, list | tuple):
            value = _without_repetition(value)
        is_zero = off.is_zero and is_number(value) and value == 0
        if value is False or is_zero or (off.value is None and is_off(value)):
            return off.value
    kinds = set(map(_bare, _members(hint)))
    if value is None and not {NoneType, Any} & kinds and default is not MISSING:
        return default
    is_binary = type(value) is int and value in (0, 1)
    if is_binary and bool in kinds and not {int, float, str} & kinds:
        return bool(value)
    return value


def to_python(value: Any) -> Any:
    """Return a NumPy scalar, such as the result of a computation, as a Python number, and other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _without_repetition(values: Iterable[Any]) -> list[Any]:
    """Return a list without None and without names and classes that it contains already."""
    unique: list[Any] = []
    for value in values:
        is_repeated = isinstance(value, str | type) and value in unique
        if value is not None and not is_repeated:
            unique.append(value)
    return unique


class Shape(NamedTuple):
    """The keys that are valid, with their annotations, and pydantic's model of them."""

    hints: Mapping[str, Any]
    model: Any


def make_shape(name: str, hints: Mapping[str, Any], defaults: Mapping[str, Any], *, is_open: bool = False) -> Shape:
    """Return the shape of values.

    Args:
        name: The name of the class or function that takes the values.
        hints: The annotation of each key.
        defaults: The default of each optional key.
        is_open: Whether other keys are valid too.
    """
    require("pydantic")
    from pydantic import ConfigDict, Field, create_model  # not at the top: it takes 0.1 s

    extra: Literal["allow", "forbid"] = "allow" if is_open else "forbid"
    config = ConfigDict(strict=True, extra=extra, arbitrary_types_allowed=True, protected_namespaces=())
    entries: dict[str, Any] = {}
    # By an alias: pydantic has names of its own, such as `copy`, and refuses those that begin with an underscore.
    for key, hint in hints.items():
        entries[f"field_{key}"] = (hint, Field(defaults.get(key, ...), alias=key))
    return Shape(hints, create_model(name, __config__=config, **entries))


@cache
def shape_of(declared: Any) -> Shape:
    """Return the shape that the annotations of a dataclass declare."""
    hints, defaults = {}, {}
    for field in fields(declared):
        hints[field.name] = hints_of(declared)[field.name]
        if field.default is not MISSING:
            defaults[field.name] = field.default
    return make_shape(declared.__name__, hints, defaults)


def find_faults(
    shape: Shape,
    values: Mapping[str, Any],
    write: Callable[[str, str], str],
    about_unknown: Callable[[str], str | None] = lambda key: None,
) -> list[KeyFault]:
    """Return what pydantic finds wrong in values, one error per key.

    Args:
        shape: The valid keys and values.
        values: The values by key.
        write: Returns what to do, from a key and the code of a valid value.
        about_unknown: Returns what to do about an unknown key; None suggests the closest name.
    """
    faults = []
    for key, kind in _errors_in(shape, values).items():
        value = values.get(key)
        if kind == "extra_forbidden":
            got = f"{key} = {describe_value(value)}"
            do = about_unknown(key) or addon("hint_for_option")(shape.model.__name__, key)
            do = do or f"did you mean {nearest(key, shape.hints, cutoff=0)}?"
            faults.append(KeyFault((key,), got, f"one of {', '.join(shape.hints)}", do))
            continue
        got = NOTHING if kind == "missing" else describe_value(value)
        expected = _describe(shape.hints[key], value, shape.model.model_fields[f"field_{key}"].default)
        # "3" and 3.0 are most often the number 3 in quotes, or from a computation.
        number = whole(read_numbers(value))
        example = expected.example
        if is_number(number) and number is not value and key not in _errors_in(shape, {key: number}):
            example = repr(number)
        faults.append(KeyFault((key,), got, expected.text, write(key, example)))
    return faults


NOTHING = "nothing"
"""The value shown for a missing key."""


def _errors_in(shape: Shape, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of pydantic's error for each wrong key."""
    from pydantic import ValidationError

    try:
        shape.model.model_validate(dict(values))
    except ValidationError as error:
        # What is deeper than a key, such as a tuple with too few entries, is an error of the key's value.
        kinds = {}
        for item in error.errors(include_url=False, include_context=False):
            key, *deeper = item["loc"]
            kinds[str(key)] = "" if deeper else item["type"]
        return kinds
    return {}


def _describe(hint: Any, value: Any, default: Any) -> Expected:
    """Return what an annotation accepts, with the valid choice closest to a value, or an example."""
    # Words that a person wrote are clearer than those that follow from the type.
    written = next(_notes(hint, Expected), None)
    if written is not None:
        return written
    choices: list[Any] = []
    expected: list[Expected] = []
    for member in _members(hint):
        kind = _bare(member)
        if kind is NoneType:
            choices.append(None)
        elif kind is bool:
            choices += [True, False]
        elif get_origin(kind) is Literal:
            choices += get_args(kind)
        elif kind in (int, float):
            expected.append(_describe_number(member))
        elif _is_options(kind):
            known = fields(kind)
            names = ", ".join(field.name for field in known)
            example = f"{kind.__name__}({known[0].name}={known[0].default!r})"
            expected.append(Expected(f"{kind.__name__}(...), or a dict with any of {names}", example))
    if choices == [True, False]:
        expected.append(Expected("True or False", repr(bool(default))))
    elif choices and choices != [None]:
        expected.append(Expected("one of " + ", ".join(map(repr, choices)), closest(value, choices)))
    return Expected(", or ".join(item.text for item in expected), expected[0].example)


def _describe_number(hint: Any) -> Expected:
    """Return what a number accepts, and the smallest valid one."""
    text = "a whole number" if _bare(hint) is int else "a number"
    bounds = next(_notes(hint, Range), None)
    if bounds is None:
        return Expected(text, "1")
    if bounds.gt is not None:
        return Expected(f"{text} above {bounds.gt}", str(bounds.gt + 1))
    if bounds.le is not None:
        return Expected(f"{text} from {bounds.ge} to {bounds.le}", str(bounds.ge))
    return Expected(f"{text} of at least {bounds.ge}", str(bounds.ge))


def closest(value: Any, choices: Sequence[Any]) -> str:
    """Return the code of the choice most similar to a value, or of the first string."""
    codes = list(map(repr, choices))
    names = [repr(choice) for choice in choices if isinstance(choice, str)]
    return nearest(repr(value), codes) or [*names, *codes][0]


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a value is one of `choices`.

    Raises:
        ArgumentError: It is not; the message names the closest choice.
    """
    if value not in choices:
        expected = "one of " + ", ".join(map(repr, choices))
        raise_wrong_value(name, value, expected, write_argument(name, closest(value, choices)))


def require_text(name: str, value: Any) -> None:
    """Check a name.

    Raises:
        ArgumentError: `value` is not a string, or empty.
    """
    # A blank name would be a blank title in every tracker.
    if not isinstance(value, str) or not value.strip():
        raise_wrong_value(name, value, "a name", f'{name}="..."')


def require_keywords(name: str, value: Any, owner: str) -> None:
    """Check that a dict contains only arguments of the function they are passed to.

    Args:
        name: The Trainer argument with the dict.
        value: The dict.
        owner: The import path of the function, which is imported only for this check.

    Raises:
        ArgumentError: The function has no such argument; the message names the closest one.
    """
    # The entries of a list would be taken for keywords.
    if not isinstance(value, Mapping):
        raise_wrong_value(name, value, "a dict", write_argument(name, "{}"))
    parameters = signature(resolve_name(owner)).parameters
    known = [name for name, parameter in parameters.items() if parameter.kind in _BY_NAME]
    for keyword in value:
        if keyword not in known:
            meant = nearest(keyword, known)
            do = f"leave {keyword!r} out" if meant is None else f"did you mean {meant}?"
            expected = f"an argument of {owner}: {', '.join(known)}"
            raise fail(ArgumentError, write_place(name), got=f"{keyword!r}", expected=expected, do=do)


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def raise_wrong_value(name: str, value: Any, expected: str, do: str) -> NoReturn:
    """Raise the error for a Trainer argument with an invalid value.

    Raises:
        ArgumentError: Always.
    """
    raise fail(ArgumentError, write_place(name), got=describe_value(value), expected=expected, do=do)
