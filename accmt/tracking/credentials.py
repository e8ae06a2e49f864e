"""Keys of the services behind trackers: what happens without one, and that none is written down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accmt.errors import TrackerError, explain
from accmt.messages import say
from accmt.tracking.run_folder import RunPlace
from accmt.tracking.spec import TrackerSpec

_SECRETS = ("api_key", "token", "password", "secret")


def tell_of_missing_key(spec: TrackerSpec, place: RunPlace, kwargs: Mapping[str, Any], *, is_needed: bool) -> None:
    """Say that a tracker without a key writes files, and how they get to its service later.

    Nobody is asked for a key: a run that waits for an answer on a terminal is a run that does not train.

    Args:
        spec: The tracker's kind.
        place: Where the records of the run go.
        kwargs: Arguments of the tracker's start.
        is_needed: Whether a missing key is an error.

    Raises:
        TrackerError: It is, and one is missing.
    """
    how = spec.missing_key(kwargs)
    if how is None:
        return
    if is_needed:
        where = f"the tracker {spec.name}"
        expected = "a key of its service, for tracker_offline=False"
        raise TrackerError(explain(where, "no key", expected, f'{how}, or tracker_offline="auto"'))
    say(f"the tracker {spec.name} has no key ({how}) and writes files; upload them by `{spec.upload_command(place)}`")


def without_secrets(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what must not lie in a run folder: keys and passwords."""
    return {name: value for name, value in kwargs.items() if not name.lower().endswith(_SECRETS)}
