"""Flags of a command that only libraries know which are slow to import."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add_when_parsed(parser: argparse.ArgumentParser, add: Callable[[argparse.ArgumentParser], None]) -> None:
    """Let a parser of a command have further flags, which `add` adds where that command is called."""
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = parse  # type: ignore[method-assign]
        add(parser)
        return parser.parse_known_args(args, namespace)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
