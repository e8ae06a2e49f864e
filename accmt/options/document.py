"""Hyper-parameters as they were written: their names, the place of each key, what is wrong there and how it is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accmt.errors import HyperParameterError, explain, nearest

FIELDS = (
    "epochs",
    "batch_size",
    "optim",
    "optim_kwargs",
    "scheduler",
    "scheduler_kwargs",
    "max_steps",
    "max_samples",
    "max_target_tokens",
    "step_scheduler_per_epoch",
    "max_micro_batch_size",
    "max_tokens",
    "packing",
    "model",
    "sft",
)
"""The names of all hyper-parameters."""

KEYS = frozenset({*FIELDS, "optimizer"} - {"optim_kwargs", "scheduler_kwargs"})
"""What may stand in a file; without a value it counts as not written."""

KeyPath = tuple[str | int, ...]

_SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, at one key.

    Attributes:
        path: The keys that lead to it, `("optim", "lr")`.
        got: What stands there.
        expected: What could stand there.
        do: What to write instead.
        line: Its line, where that is not the line of `path`.
    """

    path: KeyPath
    got: str
    expected: str
    do: str
    line: int | None = None


def describe(value: Any) -> str:
    """Return a value and its type as messages show them."""
    return f"{value!r} ({type(value).__name__})"


def suggest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Return what to do about an unknown `name`: write the nearest one, or `otherwise`."""
    near = nearest(name, names)
    return f"write `{near}`" if near else otherwise


def names_like(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the dotted names that are most like a pattern, or the first ones."""
    parts = {part for name in names for part in (name, *name.split("."))}
    near = difflib.get_close_matches(pattern.replace("\\", ""), sorted(parts), n=1, cutoff=0.6)
    found = [name for name in names if near and near[0] in name]
    return (found or list(names))[:_SHOWN]


@dataclass(frozen=True)
class Document:
    """The content of one source, numbers read, nothing else judged.

    Attributes:
        name: The file, or `hps_config` for a dict, or `HyperParameters` for its constructor.
        values: What stands under `hps`; keys whose value is null are left out.
        lines: The line of each key; empty where the source is no file.
        faults: What reading already found, such as keys written twice.
        flags: The keys that were typed as flags.
    """

    name: str
    values: Mapping[str, Any]
    lines: Mapping[KeyPath, int] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    flags: frozenset[KeyPath] = frozenset()

    def where(self, path: KeyPath) -> str:
        """Return the place of a key for messages: `hps/digits.yaml:7 optim.lr`."""
        return self._place(path, self._line(path))

    def reject(self, faults: Iterable[Fault]) -> HyperParameterError:
        """Return the one error that reports all `faults`, in the order of their lines."""
        placed = sorted(((fault.line or self._line(fault.path), fault) for fault in faults), key=lambda pair: pair[0])
        messages = [
            explain(self._place(fault.path, line), fault.got, fault.expected, fault.do) for line, fault in placed
        ]
        if len(messages) > 1:
            messages.insert(0, f"{len(messages)} faults in {self.name}")
        return HyperParameterError("\n\n".join(messages))

    def _place(self, path: KeyPath, line: int) -> str:
        if any(path[: len(flag)] == flag for flag in self.flags):
            return f"--hps.{'.'.join(map(str, path))}"
        file = f"{self.name}:{line}" if line else self.name
        return " ".join([file, ".".join(map(str, path))]).rstrip()

    def _line(self, path: KeyPath) -> int:
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)
