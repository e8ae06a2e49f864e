"""`status.json`: what a run had reached when it wrote the folder beside which the file stands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accmt.files import dumps, loads, write_text

STATUS_NAME = "status.json"
STATUS_VERSION = 1


def write_status(folder: Path, status: Mapping[str, Any]) -> None:
    """Replace `status.json` in `folder` as one step, as strict JSON (infinite and undefined numbers become strings).

    Processes: main only.
    """
    write_text(folder / STATUS_NAME, dumps({"version": STATUS_VERSION, **status}, indent=2) + "\n")


def read_status(folder: Path | str) -> dict[str, Any]:
    """Read what `write_status` wrote, `version` included."""
    status: dict[str, Any] = loads((Path(folder) / STATUS_NAME).read_text(encoding="utf-8"))
    return status
