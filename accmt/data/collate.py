"""Which collate function makes a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from accmt.errors import ArgumentError, explain

Collate = Callable[[Any], Any]


class CollateChain:
    """Several collate functions, each applied to what the one before returned.

    Args:
        functions: The functions, in order.
    """

    def __init__(self, functions: Sequence[Collate]) -> None:
        self._functions = tuple(functions)

    def __call__(self, samples: Any) -> Any:
        """Make a batch of a list of samples."""
        for function in self._functions:
            samples = function(samples)
        return samples


def build_collate(value: Any, argument: str) -> Collate | None:
    """Return one collate function of what the user gave: None, a function, or a list of functions.

    Raises:
        ArgumentError: Something in it cannot be called.
    """
    if value is None:
        return None
    functions = list(value) if isinstance(value, list | tuple) else [value]
    if not functions or not all(callable(function) for function in functions):
        raise ArgumentError(
            explain(
                f"Trainer({argument}=...)",
                repr(value),
                "a function of a list of samples, or a list of such functions",
                f"{argument}=my_function",
            )
        )
    return functions[0] if len(functions) == 1 else CollateChain(functions)
