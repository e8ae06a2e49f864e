"""Hyper-parameters as they were written, with the place of each key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from accmt.config.faults import Fault, KeyPath
from accmt.errors import HyperParameterError, explain


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
