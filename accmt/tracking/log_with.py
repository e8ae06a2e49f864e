"""Resolves the Trainer's `log_with` and tracker keywords into trackers and their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from accmt.errors import ArgumentError, MissingPackageError, TrackerError, UnknownArgumentError, explain, nearest
from accmt.messages import say
from accmt.registry import find, is_built_in, names
from accmt.tracking.history import RunPlace
from accmt.tracking.spec import TrackerSpec, UserTracker

GROUP = "accmt.trackers"
"""The extension point of trackers: `log_with` accepts the names in it."""


def resolve_trackers(log_with: Any) -> list[TrackerSpec]:
    """Turn the Trainer's `log_with` into the trackers of a run.

    Args:
        log_with: None or False for none, True for TensorBoard, a tracker's class, instance or lower-case name, a class
            or instance of any Accelerate `GeneralTracker`, or a list of these.

    Raises:
        ArgumentError: An entry is not a tracker (the message suggests the closest name), or a tracker is listed twice.
        MissingPackageError: The tracker's package is not installed.
    """
    specs = find_specs(log_with)
    for spec in specs:
        found = None if isinstance(spec, UserTracker) else find_spec(spec.name)
        # Without an origin it is only a folder of that name, such as the `wandb` folder that wandb runs leave.
        if not isinstance(spec, UserTracker) and (found is None or found.origin is None):
            where, do = f"Trainer(log_with={type(spec).__name__})", f"pip install {spec.package}"
            got = f"the package {spec.package} is not installed"
            raise MissingPackageError(explain(where, got, "the tracker's package", do))
    return specs


def find_specs(log_with: Any) -> list[TrackerSpec]:
    """Like `resolve_trackers`, without checking whether packages are installed."""
    if log_with is None or log_with is False:
        return []
    entries = log_with if isinstance(log_with, list | tuple) else ["tensorboard" if log_with is True else log_with]
    specs = [_find_spec(entry) for entry in entries]
    names = [spec.name for spec in specs if not isinstance(spec, UserTracker)]
    for name in names:
        if names.count(name) > 1:
            got = f"{name!r} {names.count(name)} times"
            raise ArgumentError(explain("Trainer(log_with=...)", got, "each tracker once", f"keep one {name!r}"))
    return specs


def kwargs_of_each(specs: Sequence[TrackerSpec], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Distribute keywords to trackers.

    `mlflow={...}` is only for MLflow; any other keyword goes to every tracker that accepts it.
    """
    own = {spec.name: dict(kwargs[spec.name]) for spec in specs if isinstance(kwargs.get(spec.name), Mapping)}
    shared = {name: value for name, value in kwargs.items() if name not in own}
    known: set[str] = set()
    result = []
    for spec in specs:
        direct = {**spec.init_kwargs, **own.get(spec.name, {})}
        accepted = spec.accepted_names() if shared or direct else None
        _require_accepted(direct, accepted, f"Trainer({spec.name}={{...}})")
        taken = {name: value for name, value in shared.items() if accepted is None or name in accepted}
        known |= shared.keys() if accepted is None else accepted
        result.append({**taken, **direct})
    _require_accepted(shared, frozenset(known), "Trainer(...)")
    return result


def report_missing_key(spec: TrackerSpec, place: RunPlace, kwargs: Mapping[str, Any], *, is_needed: bool) -> None:
    """Log that a tracker without an API key writes files, and how to upload them later.

    accmt never prompts for a key: a run that waits for input does not train.
    """
    how = spec.missing_key(kwargs)
    if how is None:
        return
    if is_needed:
        where = f"the tracker {spec.name}"
        expected = 'an API key, because of tracker_options={"offline": False}'
        raise TrackerError(explain(where, "no API key", expected, f'{how}, or tracker_options={{"offline": "auto"}}'))
    command = spec.upload_command(place)
    say(f"the tracker {spec.name} has no API key ({how}) and writes files; upload them with `{command}`")


def _find_spec(entry: Any) -> TrackerSpec:
    if isinstance(entry, str):
        return _find_named(entry)
    if isinstance(entry, TrackerSpec):
        return entry
    if isinstance(entry, type) and issubclass(entry, TrackerSpec):
        return entry()
    from accelerate.tracking import GeneralTracker

    kind = entry if isinstance(entry, type) else type(entry)
    if not issubclass(kind, GeneralTracker):
        _reject_unknown(entry)
    is_accelerates_own = isinstance(entry, type) and entry.__module__ == GeneralTracker.__module__
    is_known = is_accelerates_own and is_built_in(GROUP, entry.name)
    return _find_named(entry.name) if is_known else UserTracker(entry)


def _find_named(name: str) -> TrackerSpec:
    try:
        tracker = find(GROUP, name.lower())
    except KeyError:
        _reject_unknown(name)
    return _find_spec(tracker)


def _reject_unknown(entry: Any) -> NoReturn:
    known = names(GROUP)
    meant = nearest(entry, known, cutoff=0.5)
    got = f"{entry!r} ({type(entry).__name__})"
    expected = f"{', '.join(known)}, a tracker class, any Accelerate GeneralTracker, or a list of these"
    do = f"did you mean log_with={meant!r}?" if meant else "for example log_with='tensorboard'"
    raise ArgumentError(explain("Trainer(log_with=...)", got, expected, do))


def _require_accepted(names: Iterable[str], accepted: frozenset[str] | None, where: str) -> None:
    if accepted is None:
        return
    for name in names:
        if name not in accepted:
            meant = nearest(name, accepted)
            do = f"did you mean {meant}=...?" if meant else f"leave out {name}"
            expected = "a keyword of a tracker in log_with" + (f": {', '.join(sorted(accepted))}" if accepted else "")
            raise UnknownArgumentError(explain(where, f"{name}=..., which no tracker accepts", expected, do))
