"""Names and places of a run: its folder, or the URL of the server that keeps it."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import string
import time
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from accmt.files import is_current

DEFAULT_LOGGING_DIR = "logs"

_MAX_BYTES = 180  # file systems take 255; names of files are made from it, too
_HOST = re.compile(r"localhost|[\w.-]+:\d{1,5}", re.ASCII)


def default_run_name() -> str:
    """Make a readable name, the time first so that names sort: `2026-11-21_10-24-31-kqtz`.

    Processes: each one would draw other letters; one draws them and sends them to the others.
    """
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{letters}"


def default_track_name(model_path: str | os.PathLike[str]) -> str:
    """Take the base name of `model_path`, which a trailing slash or `.` does not make empty."""
    return Path(os.path.normpath(Path(model_path).absolute())).name or "accmt"


def is_url(logging_dir: str | os.PathLike[str]) -> bool:
    """Return whether it is a tracker's server or database, and no folder.

    Args:
        logging_dir: Anything with a scheme (`https://...`, `sqlite:///...`, but not `file:`), `databricks`,
            `localhost` and `host:port`, with or without a path after it, are URLs; all else is a folder.
    """
    place = os.fspath(logging_dir)
    if place.startswith("file:"):
        return False
    host = place.split("/", maxsplit=1)[0]
    return "://" in place or place == "databricks" or _HOST.fullmatch(host) is not None


@dataclass(frozen=True)
class RunPlace:
    """Where the records of one run go.

    Args:
        logging_dir: Folder of logs, or a URL as by `is_url`.
        folder: The run folder, where it is not the one that the other three say.
        home: From where a relative folder of logs holds.
    """

    logging_dir: str
    track_name: str
    run_name: str
    folder: Path | None = None
    home: Path = Path()

    @property
    def url(self) -> str | None:
        """The server or database with its scheme (`http://` where none was given), or None for a folder."""
        if not is_url(self.logging_dir):
            return None
        has_scheme = "://" in self.logging_dir or self.logging_dir == "databricks"
        return self.logging_dir if has_scheme else f"http://{self.logging_dir}"

    @property
    def base_folder(self) -> Path:
        """The folder of all runs' logs; `logs` when `logging_dir` is a URL."""
        if is_url(self.logging_dir):
            return self.home / DEFAULT_LOGGING_DIR
        is_file_uri = self.logging_dir.startswith("file:")
        return self.home / (unquote(urlsplit(self.logging_dir).path) if is_file_uri else self.logging_dir)

    @property
    def run_folder(self) -> Path:
        """`<base_folder>/<track_name>/<run_name>`, the names made fit for a file system."""
        return self.folder or self.base_folder / folder_name(self.track_name) / folder_name(self.run_name)

    @property
    def shown_folder(self) -> Path:
        """The run folder for messages: as the user wrote it, while the program is in the folder where it was then."""
        is_there = is_current(self.home) and not Path(self.logging_dir).is_absolute() and self.folder is None
        return replace(self, home=Path()).run_folder if is_there else self.run_folder


def folder_name(name: str) -> str:
    """Return a name as a folder can have it: other characters become `_`, a long one ends in a digest of the whole."""
    fit = re.sub(r"[^\w.\- ]", "_", name).strip(" .") or "_"
    if len(fit.encode()) <= _MAX_BYTES:
        return fit
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{fit.encode()[: _MAX_BYTES - len(digest) - 1].decode(errors='ignore')}-{digest}"
