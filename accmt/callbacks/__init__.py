"""Callbacks: what users add to a run, and the table of moments at which they act."""

from accmt.callbacks.averaging import EMA
from accmt.callbacks.base import Callback, LambdaCallback, MainProcessCallback
from accmt.callbacks.dispatch import Hooks, build_callbacks, describe_hooks, find_hooks
from accmt.callbacks.hooks import ALIASES, HOOKS

__all__ = [
    "ALIASES",
    "EMA",
    "HOOKS",
    "Callback",
    "Hooks",
    "LambdaCallback",
    "MainProcessCallback",
    "build_callbacks",
    "describe_hooks",
    "find_hooks",
]
