"""Arguments that are part of the documented signature but whose behaviour is not built yet.

Passing one of them raises `NotImplementedError`, so that nobody believes in a setting that does nothing. The README
lists them until this table is empty; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PENDING: dict[str, str] = {
    "profiler": "the profiler",
    "reload_dataloaders_every_n_epochs": "reloading of loaders",
    "sync_batchnorm": "batch norm over processes",
}


def refuse_pending(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse every argument of `PENDING` that was given a value other than its default.

    Raises:
        NotImplementedError: One was; the message names it.
    """
    for name, what in PENDING.items():
        value = arguments.get(name, defaults[name])
        if value != defaults[name]:
            message = f"Trainer({name}={value!r}): not built yet in this version ({what}); leave `{name}` out"
            raise NotImplementedError(message)
