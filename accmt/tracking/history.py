"""`history.jsonl`: every row of a run, one strict JSON object a line, whatever other trackers there are.

Three kinds of line: `{"step", "time", "values"}` for a row of logged numbers, `{"time", "config"}` where a run starts
or goes on, `{"time", "status"}` where it ends. `time` is in seconds since the epoch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accmt.files import JsonLines, read_json_lines

HISTORY_FILE = "history.jsonl"


class History:
    """Appends rows to `history.jsonl`; each is with the operating system before the call returns.

    Args:
        folder: The run folder; it must exist. Rows of an earlier part of the run stay.
    """

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / HISTORY_FILE)

    def add_values(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers logged at update `step`."""
        self._lines.append({"step": step, "time": time.time(), "values": dict(values)})

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Write the configuration, nested as it is, at the start of the run."""
        self._lines.append({"time": time.time(), "config": dict(config)})

    def add_status(self, status: str) -> None:
        """Write how the run ended."""
        self._lines.append({"time": time.time(), "status": status})

    def close(self) -> None:
        """Close the file; calling it twice does no harm."""
        self._lines.close()


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Read all rows of a run in the order of writing; a last line that a crash cut short is passed over.

    Args:
        folder: The run folder, of a finished run or of one that is going on.

    Raises:
        FileNotFoundError: There is no `history.jsonl` in `folder`.
    """
    return list(read_json_lines(folder / HISTORY_FILE))
