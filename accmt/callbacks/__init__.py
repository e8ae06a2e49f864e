"""Callbacks: what users add to a run, and the table of moments at which they act."""

from pathlib import Path

from accmt.callbacks.averaging import EMA
from accmt.callbacks.best_models import BestModels
from accmt.callbacks.callback import (
    ALIASES,
    HOOKS,
    Callback,
    Hooks,
    LambdaCallback,
    MainProcessCallback,
    build_callbacks,
    describe_hooks,
    find_hooks,
)
from accmt.installation import require_own_folder

# Where the project that is called accmt on the index was installed last, its `accmt/__init__.py` has replaced ours.
# This is the first of our rooms that it imports.
require_own_folder(str(Path(__file__).parents[1]))

__all__ = [
    "ALIASES",
    "EMA",
    "HOOKS",
    "BestModels",
    "Callback",
    "Hooks",
    "LambdaCallback",
    "MainProcessCallback",
    "build_callbacks",
    "describe_hooks",
    "find_hooks",
]
