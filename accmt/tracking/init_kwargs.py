"""Which tracker gets which of the Trainer's further keywords."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from accmt.errors import UnknownArgumentError, explain
from accmt.tracking.spec import TrackerSpec


def kwargs_of_each(specs: Sequence[TrackerSpec], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Share keywords out to trackers.

    `mlflow={...}` goes to MLflow alone; any other keyword goes to every tracker that takes it.

    Args:
        specs: The trackers of the run.
        kwargs: Keywords of the Trainer that are none of its own.

    Returns:
        One dict for each of `specs`, its own arguments (`MLFlow(tags=...)`) included.

    Raises:
        UnknownArgumentError: No tracker takes a keyword.
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


def _require_accepted(given: Mapping[str, Any], accepted: frozenset[str] | None, where: str) -> None:
    if accepted is None:
        return
    for name in given:
        if name not in accepted:
            nearest = get_close_matches(name, accepted, n=1)
            do = f"{nearest[0]}=...?" if nearest else f"leave {name} out"
            expected = "a keyword of a tracker in log_with" + (f": {', '.join(sorted(accepted))}" if accepted else "")
            raise UnknownArgumentError(explain(where, f"{name}=..., which no tracker takes", expected, do))
