"""Callbacks, and the table of hooks that they can define."""

from pathlib import Path

from accmt.callbacks.callback import (
    ALIASES,
    HOOKS,
    Callback,
    Hooks,
    LambdaCallback,
    MainProcessCallback,
    StatelessCallback,
    build_callbacks,
    describe_hooks,
    find_hooks,
    name_by_class,
)
from accmt.installation import require_own_folder

# If the other project named accmt on PyPI was installed last, its `accmt/__init__.py` has replaced ours.
# This is the first of our packages that it imports.
require_own_folder(str(Path(__file__).parents[1]))

__all__ = [
    "ALIASES",
    "HOOKS",
    "Callback",
    "Hooks",
    "LambdaCallback",
    "MainProcessCallback",
    "StatelessCallback",
    "build_callbacks",
    "describe_hooks",
    "find_hooks",
    "name_by_class",
]
