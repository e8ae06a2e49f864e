"""Further keywords of the Trainer: tracker arguments, and mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from accmt.addons.hints.arguments import find_foreign, find_replaced
from accmt.errors import UnknownArgumentError, combine, fail, nearest
from accmt.options.yaml_reader import FIELDS

_HPS = [name for name in FIELDS if name != "model"]  # in other trainers, `model` is an object


def check_keywords(extra: Mapping[str, Any], names: Iterable[str], *, has_tracker: bool) -> None:
    """Reject all mistaken keywords in one error.

    Args:
        extra: The keywords.
        names: The arguments of the Trainer.
        has_tracker: Whether there is a tracker; it receives all other keywords.

    Raises:
        UnknownArgumentError: A keyword is a hyper-parameter, an argument of another trainer, or misspelled; or there is
            no tracker.
    """
    known = [*names, *_HPS]
    errors: list[UnknownArgumentError] = []
    for name, value in extra.items():
        where, expected = f"Trainer({name}=...)", "an argument of Trainer"
        if name in _HPS:
            do = f"put {name} into the hyper-parameters"
            errors.append(fail(UnknownArgumentError, where, got="a hyper-parameter", expected=expected, do=do))
        elif (replacement := find_replaced(name, value)) is not None:
            errors.append(
                fail(UnknownArgumentError, where, got="replaced by another argument", expected=expected, do=replacement)
            )
        elif (foreign := find_foreign(name, value, extra)) is not None:
            owner, do = foreign
            do += f"; to pass it to a tracker: mlflow={{{name!r}: ...}}" if has_tracker else ""
            errors.append(fail(UnknownArgumentError, where, got=f"an argument of {owner}", expected=expected, do=do))
        else:
            meant = nearest(name, known, cutoff=0.8 if has_tracker else 0.7)
            if not has_tracker:
                meant = meant or next((other for other in known if other.endswith(f"_{name}")), None)
                expected += "; keywords for a tracker need log_with"
            do = "remove it, or add a tracker: log_with=MLFlow"
            if meant:
                do = f"did you mean {meant}{', one of the hyper-parameters' if meant in _HPS else ''}?"
            if meant or not has_tracker:  # else it is for the tracker
                errors.append(fail(UnknownArgumentError, where, got="an unknown argument", expected=expected, do=do))
    if errors:
        title = f"{len(errors)} arguments that Trainer does not have" if len(errors) > 1 else None
        raise combine(UnknownArgumentError, errors, title)
