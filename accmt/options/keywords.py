"""Keywords of the Trainer that are none of its arguments: those of trackers, and mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accmt.errors import UnknownArgumentError, explain, nearest
from accmt.options.document import FIELDS
from accmt.registry import addon

_HPS = [name for name in FIELDS if name != "model"]  # an object, where others' Trainers have an argument of that name


def check_keywords(extra: Mapping[str, Any], names: Iterable[str], *, has_tracker: bool) -> None:
    """Reject keywords that are a mistake, all in one error.

    Args:
        extra: The keywords.
        names: The arguments of the Trainer.
        has_tracker: Whether there is a tracker, which takes what looks like no mistake.

    Raises:
        UnknownArgumentError: There is a hyper-parameter, an argument of another trainer, or a misspelt argument; or
            any keyword where there is no tracker.
    """
    known = [*names, *_HPS]
    found = [_find_mistake(name, extra, known, has_tracker=has_tracker) for name in extra]
    mistakes = [mistake for mistake in found if mistake is not None]
    if len(mistakes) > 1:
        mistakes.insert(0, f"{len(mistakes)} arguments that Trainer does not have")
    if mistakes:
        raise UnknownArgumentError("\n\n".join(mistakes))


def _find_mistake(name: str, extra: Mapping[str, Any], names: Iterable[str], *, has_tracker: bool) -> str | None:
    where, expected = f"Trainer({name}=...)", "an argument of Trainer"
    if name in _HPS:
        return explain(where, "a hyper-parameter", expected, f"put {name} into the hyper-parameters: it is one of them")
    if (do := addon("hint_for_replaced")(name, extra[name])) is not None:
        return explain(where, "no argument of its own here", expected, do)
    if (foreign := addon("hint_for_argument")(name, extra[name], extra)) is not None:
        owner, do = foreign
        do += f"; one meant for a tracker goes to it alone, as in mlflow={{{name!r}: ...}}" if has_tracker else ""
        return explain(where, f"an argument of {owner}", expected, do)
    meant = nearest(name, names, cutoff=0.8 if has_tracker else 0.7)
    if not has_tracker and not meant:
        meant = next((known for known in names if known.endswith(f"_{name}")), None)
    if has_tracker and not meant:
        return None
    do = "drop it, or give a tracker: log_with=MLFlow"
    if meant:
        do = f"did you mean {meant}{', one of the hyper-parameters' if meant in _HPS else ''}?"
    expected += "" if has_tracker else "; there is no tracker to take others"
    return explain(where, "an argument that does not exist", expected, do)
