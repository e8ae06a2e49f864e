"""Turns off parts of a program's Trainers for one start: `accmt debug`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from accmt.addons.launches import DEBUG_VARIABLE

LEVELS: Mapping[int, Mapping[str, Any]] = {
    1: {"log_with": None},
    2: {"compile": False},
    3: {"model_saving": None, "checkpoint_every": None, "resume": False},
    4: {"eval_when_start": False},
    5: {"evaluate_every_n_steps": "never"},
}
"""Arguments of the Trainer by level; a level includes those below it."""

DEFAULT_LEVEL = 3


def change_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Trainer's arguments with those of the level in their place."""
    changed = dict(arguments)
    for level in range(1, int(os.environ.get(DEBUG_VARIABLE, DEFAULT_LEVEL)) + 1):
        changed.update(LEVELS[level])
    return changed
