"""`history.jsonl`: all rows of a run, one strict JSON object per line; trackers receive their rows from this file.

There are five kinds of lines: `{"step", "time", "values"}` for a row of logged numbers; `{"step", "time", "media"}` for
images, a table or files, with their location in `"media": {"kind", "name", "path"}`; `{"time", "config"}` when a run
starts or resumes; `{"time", "rewind"}` when a resumed run returns to its checkpoint, or to the beginning without one;
`{"time", "status"}` when it ends, after Ctrl-C with `"how": "interrupted"`, which trackers receive as "KILLED".
`time` is in seconds since the epoch. Lines are never removed: `"rewind": {"line", "step", "attempt"}` means that all
rows from line `line` (counted from 0) up to this one were logged after the checkpoint and are superseded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import string
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from accmt.errors import explain
from accmt.files import dumps, is_current, read_json_line, read_json_lines, set_folder_aside
from accmt.messages import warn, warn_once

HISTORY_FILE = "history.jsonl"
EVALUATIONS_FOLDER = "evaluations"
"""A folder in a run folder, with the history of the process that evaluates checkpoints and models beside the run."""

DELIVERY_FILE = "delivery.json"
"""Beside the history of a run with trackers: what each of them has got of it."""

MAX_UNWRITTEN = 10_000


class History:
    """Appends rows to `history.jsonl`; each row is passed to the operating system before the call returns.

    If the disk is full, up to `MAX_UNWRITTEN` rows wait in memory and are written as soon as there is free space.

    Args:
        folder: The run folder; it must exist. Existing rows are kept.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / HISTORY_FILE
        set_folder_aside(self.path)  # another program may have made a folder of this name
        self._descriptor: int | None = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        size, self.num_written = _measure(self.path)
        os.ftruncate(self._descriptor, size)  # the next row must not continue a torn one
        self._unwritten: deque[bytes] = deque()
        self._num_lost = 0
        self._is_full = False
        self._lock = threading.Lock()

    @property
    def num_lines(self) -> int:
        """The number of lines, including those of earlier attempts and those that wait for free disk space."""
        with self._lock:
            return self.num_written + len(self._unwritten)

    def is_ours_alone(self) -> bool:
        """Lock the file until it is closed or the process ends; return False if another process holds the lock."""
        try:
            fcntl.flock(self._open_descriptor(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def add_values(self, values: Mapping[str, float], step: int) -> None:
        """Write the numbers logged at step `step`."""
        self._append({"step": step, "time": time.time(), "values": dict(values)})

    def add_media(self, kind: str, name: str, path: str, step: int) -> None:
        """Record images, a table or files logged at step `step`; `path` is relative to the run folder."""
        self._append({"step": step, "time": time.time(), "media": {"kind": kind, "name": name, "path": path}})

    def add_config(self, config: Mapping[str, Any]) -> None:
        """Write the nested configuration at the start of the run."""
        self._append({"time": time.time(), "config": dict(config)})

    def add_rewind(self, line: int, step: int | None, attempt: int) -> None:
        """Mark all rows from `line` on as superseded: attempt `attempt` resumes after step `step`."""
        self._append({"time": time.time(), "rewind": {"line": line, "step": step, "attempt": attempt}})

    def add_status(self, status: str, *, how: str | None = None) -> None:
        """Write the final status; `how` is more specific than the status that trackers receive."""
        row = {"time": time.time(), "status": status}
        if how is not None:
            row["how"] = how
        self._append(row)

    def unwritten(self, line: int) -> bytes | None:
        """Return a line that waits for free disk space; None if it is on disk or does not exist yet."""
        with self._lock:
            index = line - self.num_written
            return self._unwritten[index] if 0 <= index < len(self._unwritten) else None

    def close(self) -> None:
        """Close the file; may be called more than once."""
        with self._lock:
            if self._descriptor is None:
                return
            self._write_out()
            os.close(self._descriptor)
            self._descriptor = None
        lost = self._num_lost + len(self._unwritten)
        if lost:
            got = f"{lost} rows could not be written"
            do = "free disk space before the next run"
            warn(explain(str(self.path), got, "free disk space before the end of the run", do))

    def _append(self, row: dict[str, Any]) -> None:
        line = (dumps(row) + "\n").encode()
        with self._lock:
            self._unwritten.append(line)
            self._write_out()
            if len(self._unwritten) > MAX_UNWRITTEN:
                self._unwritten.pop()  # the newest: trackers read lines in order
                self._num_lost += 1

    def _write_out(self) -> None:
        try:
            while self._unwritten:
                self._write(self._unwritten[0])
                self._unwritten.popleft()
                self.num_written += 1
            self._is_full = False
        except OSError as error:
            if not self._is_full:  # one warning, not one per row
                self._is_full = True
                expected = f"free disk space; training continues, and up to {MAX_UNWRITTEN:,} rows are kept in memory"
                warn(explain(str(self.path), str(error), expected, f"free disk space in {self.path.parent}"))

    def _write(self, line: bytes) -> None:
        descriptor = self._open_descriptor()
        written = os.write(descriptor, line)
        if written < len(line):  # the disk became full within the line: a torn one would hide the next
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise OSError(errno.EBADF, f"{self.path} is closed")
        return self._descriptor


class HistoryReader:
    """Reads the rows of a `History` as they come, from any thread."""

    def __init__(self, history: History, line: int = 0) -> None:
        self._history = history
        self._file = history.path.open("rb")
        self._line_in_file = 0
        self.line = line

    def read(self, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """Return up to `limit` further rows with their line numbers; empty if there are none yet."""
        rows: list[tuple[int, dict[str, Any]]] = []
        while len(rows) < limit:
            line: bytes | None
            if self.line >= self._history.num_written:
                line = self._history.unwritten(self.line)
                if line is None:
                    break
            else:
                while self._line_in_file < self.line:
                    self._file.readline()
                    self._line_in_file += 1
                self._line_in_file += 1
                line = self._file.readline()
            rows.append((self.line, _as_row(read_json_line(line))))
            self.line += 1
        return rows

    def close(self) -> None:
        self._file.close()


class Superseded:
    """The rows that a resumed run replaced."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._spans = [range(row["rewind"]["line"], line) for line, row in enumerate(rows) if "rewind" in row]

    def has(self, line: int, *, since: int = 0) -> bool:
        """Return whether the row in line `line` is superseded, by a rewind in line `since` or later."""
        return any(line in span and span.stop >= since for span in self._spans)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield one row per line, so that indices are line numbers; an invalid line gives an empty row.

    A last line that is incomplete after a crash is omitted.
    """
    bad: list[int] = []
    for line, content in enumerate(read_json_lines(path)):
        row = _as_row(content)
        if not row:
            bad.append(line + 1)
        yield row
    if bad:
        lines = "line" if len(bad) == 1 else "lines"
        what = f"{path}: skipping {len(bad)} invalid {lines}"
        warn_once(f"{what} (the first is line {bad[0]})", about=what)


_KINDS: Mapping[str, type] = {"values": dict, "media": dict, "config": dict, "rewind": dict, "status": str}
"""What a line of each kind holds under its name."""


def _as_row(content: Any) -> dict[str, Any]:
    """Return the content of a line if it is a row of one of the five kinds, else an empty dict."""
    if not isinstance(content, dict) or not isinstance(content.get("time"), int | float):
        return {}
    for kind, content_type in _KINDS.items():
        if isinstance(content.get(kind), content_type):
            # A line that was edited by hand, or by another tool.
            if kind in ("values", "media") and type(content.get("step")) is not int:
                return {}
            return content
    return {}


def read_history(folder: Path, *, include_superseded: bool = False) -> list[dict[str, Any]]:
    """Read the rows of a run in the order in which they were written.

    Rows of checkpoints and models that `accmt evaluate` evaluated beside the run are inserted by their step.

    Invalid lines are skipped with a warning that counts them. A last line that is incomplete after a crash is skipped.

    Args:
        folder: The folder of a finished or running run.
        include_superseded: Whether to include rows that a killed attempt logged after the checkpoint from which the
            run was resumed.

    Raises:
        FileNotFoundError: There is no `history.jsonl` in `folder`.
    """
    rows = _without_superseded(folder / HISTORY_FILE, include_superseded=include_superseded)
    evaluations = folder / EVALUATIONS_FOLDER / HISTORY_FILE
    if not evaluations.is_file():
        return rows
    evaluated = []
    for row in _without_superseded(evaluations, include_superseded=False):
        if "media" in row:  # its path from the run folder
            row["media"]["path"] = f"{EVALUATIONS_FOLDER}/{row['media']['path']}"
        if "step" in row:
            evaluated.append(row)
    # Each follows the rows of its step, and precedes the status of the run.
    pending, merged = deque(sorted(evaluated, key=lambda row: row["step"])), []
    for row in rows:
        while pending and row.get("step", -1) > pending[0]["step"]:
            merged.append(pending.popleft())
        merged.append(row)
    end = len(merged) - bool(merged and "status" in merged[-1])
    return [*merged[:end], *pending, *merged[end:]]


def _without_superseded(path: Path, *, include_superseded: bool) -> list[dict[str, Any]]:
    rows = list(read_rows(path))
    superseded = Superseded(rows)
    valid: list[dict[str, Any]] = []
    for line, row in enumerate(rows):
        is_current = include_superseded or "step" not in row or not superseded.has(line)
        if row and is_current:
            valid.append(row)
    return valid


def count_attempts(path: Path) -> int:
    """Return how often a run was started or resumed, by its history; 0 if there is none."""
    attempts = 0
    if not path.is_file():
        return 0
    for row in read_rows(path):
        attempts = max(attempts, row.get("rewind", {}).get("attempt", 1))
    return attempts


def _measure(path: Path) -> tuple[int, int]:
    """Return the size and number of a file's complete lines; the last line may be incomplete after a crash."""
    size = lines = 0
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                size += len(line)
                lines += 1
    return size, lines


# ---- Name, folder and URL of a run


DEFAULT_LOGGING_DIR = "logs"

_MAX_BYTES = 180  # file systems allow 255; file names are derived from it, too
_HOST = re.compile(r"localhost|[\w.-]+:\d{1,5}", re.ASCII)


def default_run_name() -> str:
    """Return a readable name that starts with the time, so that names sort: `2026-11-21_10-24-31-kqtz`.

    Processes: letters are random; one process must draw them and send them to the others.
    """
    letters = "".join(secrets.choice(string.ascii_lowercase) for _ in range(4))  # a sweep starts several a second
    return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{letters}"


def default_track_name(model_path: str | os.PathLike[str]) -> str:
    """Return the base name of `model_path`, ignoring a trailing slash or `.`."""
    return Path(os.path.normpath(Path(model_path).absolute())).name or "accmt"


def is_url(logging_dir: str | os.PathLike[str]) -> bool:
    """Return whether `logging_dir` is a tracker's server or database rather than a folder.

    Args:
        logging_dir: Anything with a scheme (`https://...`, `sqlite:///...`, but not `file:`), `databricks`,
            `localhost` and `host:port`, with or without a path, are URLs; everything else is a folder.
    """
    place = os.fspath(logging_dir)
    if place.startswith("file:"):
        return False
    host = place.split("/", maxsplit=1)[0]
    return "://" in place or place == "databricks" or _HOST.fullmatch(host) is not None


@dataclass(frozen=True)
class RunPlace:
    """The location of one run's records.

    Args:
        logging_dir: The logging folder, or a URL; see `is_url`.
        folder: The run folder, if it does not follow from the other arguments.
        home: The folder to which a relative logging folder refers.
    """

    logging_dir: str
    track_name: str
    run_name: str
    folder: Path | None = None
    home: Path = Path()

    @property
    def url(self) -> str | None:
        """The server or database with its scheme (default `http://`), or None for a folder."""
        if not is_url(self.logging_dir):
            return None
        has_scheme = "://" in self.logging_dir or self.logging_dir == "databricks"
        return self.logging_dir if has_scheme else f"http://{self.logging_dir}"

    @property
    def base_folder(self) -> Path:
        """The folder of all runs' logs; `logs` when `logging_dir` is a URL."""
        if is_url(self.logging_dir):
            return self.home / DEFAULT_LOGGING_DIR
        folder = self.logging_dir
        if folder.startswith("file:"):
            folder = unquote(urlsplit(folder).path)
        return self.home / folder

    @property
    def run_folder(self) -> Path:
        """`<base_folder>/<track_name>/<run_name>`, with names that are valid in a file system."""
        return self.folder or self.base_folder / folder_name(self.track_name) / folder_name(self.run_name)

    @property
    def shown_folder(self) -> Path:
        """The run folder for messages: as the user wrote it, unless the working folder has changed."""
        if is_current(self.home) and not Path(self.logging_dir).is_absolute() and self.folder is None:
            return replace(self, home=Path()).run_folder
        return self.run_folder


def folder_name(name: str) -> str:
    """Return a valid folder name: other characters become `_`, and a long name is cut and gets a digest."""
    valid = re.sub(r"[^\w.\- ]", "_", name).strip(" .") or "_"
    if len(valid.encode()) <= _MAX_BYTES:
        return valid
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    # Ignored: a character of several bytes at the cut.
    beginning = valid.encode()[: _MAX_BYTES - len(digest) - 1].decode(errors="ignore")
    return f"{beginning}-{digest}"
