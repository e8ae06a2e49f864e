"""Checks of single arguments, with one wording for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NoReturn

from accmt.errors import ArgumentError, describe_value, explain
from accmt.options.numbers import read_numbers, whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def write_argument(name: str, value: str) -> str:
    """Return an argument with a value as one writes it; `name` is "clip_grad", or "failures.spike_guard" for a key."""
    argument, _, key = name.partition(".")
    return f'{argument}={{"{key}": {value}}}' if key else f"{name}={value}"


def require_options(name: str, value: Any, kind: type, *, also: str = "") -> None:
    """Check a dict of options: that it is one, and that each key exists.

    Args:
        name: The argument.
        value: Its value; None has nothing to check.
        kind: The `TypedDict` that names the keys.
        also: What else would have been right, for the message.

    Raises:
        ArgumentError: It is something else, or has a key that does not exist; the message names the nearest.
    """
    known = list(kind.__annotations__)
    if value is not None and not isinstance(value, Mapping):
        raise_wrong_value(name, value, f"a dict with any of {', '.join(known)}{also}", f'{name}={{"{known[0]}": ...}}')
    for key in value or {}:
        if key not in known:
            nearest = get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            where, expected = f"Trainer({write_argument(name + '.' + str(key), '...')})", f"any of {', '.join(known)}"
            raise ArgumentError(explain(where, f"the key {key!r}", expected, f"did you mean {nearest}?"))


def require_flags(settings: DataclassInstance) -> None:
    """Check every field annotated as `bool`: the text "no" or "false" would otherwise count as true.

    Raises:
        ArgumentError: One of them is neither True nor False.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.type == "bool" and not isinstance(value, bool):
            raise_wrong_value(field.name, value, "True or False", f"{field.name}={bool(field.default)}")


def require_int(name: str, value: Any, *, at_least: int, also: str = "") -> None:
    """Check a whole number.

    Args:
        name: The argument.
        value: Its value.
        at_least: The smallest number that is right.
        also: What else would have been right, for the message.

    Raises:
        ArgumentError: `value` is not an int, or is below `at_least`.
    """

    def is_right(number: Any) -> bool:
        return isinstance(number, int) and not isinstance(number, bool) and number >= at_least

    if not is_right(value):
        right = meant(value, is_right, at_least)
        raise_wrong_value(name, value, f"a whole number from {at_least}{also}", write_argument(name, right))


def require_positive(name: str, value: Any) -> None:
    """Check a number above 0.

    Raises:
        ArgumentError: `value` is not a number, or not above 0.
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
    """Return the number that a wrong value spells (the text "4", or 4.0), if that one is right.

    Args:
        value: The value.
        is_right: Says of a number whether it could be there.
        otherwise: What is returned if it could not.
    """
    number = whole(read_numbers(value))
    return number if is_right(number) else otherwise


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check one of a few values.

    Raises:
        ArgumentError: `value` is none of `choices`; the message names the nearest.
    """
    if value not in choices:
        written = [repr(choice) for choice in choices]
        named = [one for one, choice in zip(written, choices, strict=True) if isinstance(choice, str)]
        nearest = get_close_matches(repr(value), written, n=1, cutoff=0.6) or named or written
        raise_wrong_value(name, value, "one of " + ", ".join(written), write_argument(name, nearest[0]) + "?")


def require_text(name: str, value: Any) -> None:
    """Check a name.

    Raises:
        ArgumentError: `value` is no text, or empty.
    """
    if not isinstance(value, str) or not value.strip():
        raise_wrong_value(name, value, "a name", f'{name}="..."')


def require_mapping(name: str, value: Any) -> None:
    """Check a dict that may be missing.

    Raises:
        ArgumentError: `value` is neither None nor a mapping.
    """
    if value is not None and not isinstance(value, Mapping):
        raise_wrong_value(name, value, "a dict", f"{name}={{...}}")


def require_keywords(name: str, value: Mapping[str, Any] | None, function: Callable[..., Any], owner: str) -> None:
    """Check that a dict of arguments has those of the function that they are for.

    Args:
        name: The argument of the Trainer that holds the dict.
        value: The dict; None has nothing to check.
        function: What is called with it.
        owner: What the function is called in the message.

    Raises:
        ArgumentError: One of them is no argument of the function; the message names the nearest.
    """
    known = [name for name, parameter in signature(function).parameters.items() if parameter.kind in _BY_NAME]
    for keyword in value or {}:
        if keyword not in known:
            nearest = get_close_matches(str(keyword), known, n=1, cutoff=0.6)
            do = f"did you mean {nearest[0]}?" if nearest else f"leave {keyword!r} out"
            expected = f"an argument of {owner}: {', '.join(known)}"
            raise ArgumentError(explain(f"Trainer({name}={{...}})", f"{keyword!r}", expected, do))


_BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


def raise_wrong_value(name: str, value: Any, expected: str, do: str) -> NoReturn:
    """Raise the error of a Trainer argument with a wrong value.

    Raises:
        ArgumentError: Always.
    """
    raise ArgumentError(explain(f"Trainer({write_argument(name, '...')})", describe_value(value), expected, do))
