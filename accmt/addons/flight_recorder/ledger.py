"""`ledger.jsonl`: what each optimizer step of a run computed, one JSON object per line.

There are six kinds of lines:

- `{"start": {...}}` when a run starts or resumes: how it was launched, versions, hardware, settings, code, data.
- `{"step", "epoch", "batches", "samples", "loss"}` for each accumulation window: batches [first, last) of its epoch,
  a digest of the sample indices of all processes, and the bits of the weighted mean loss as a hexadecimal float.
  `"skipped": true` where it ended without an optimizer step.
- `{"sums": {...}, "step", "at"}`: checksums of weights, gradients and optimizer state after a step, `"at"` a "step", a
  "checkpoint" or the "start"; and a digest of the content of the step's batches.
- `{"rewind": {"line", "step"}}` when a resumed run returns to its checkpoint: all lines from `line` (counted from 0) on
  were written after the checkpoint, and are superseded.
- `{"differs": {...}}` where a step that was made again has another result, after a change that explains it.
- `{"operations": [...]}`: those of a step that have no deterministic implementation on the device, before a comparison.

Lines are never removed. Each ends with `"chain"`, a digest of the line and of the chain before it, so that a line that
was edited or removed shows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from accmt.errors import ArgumentError, explain, fail
from accmt.files import dumps, read_json_line
from accmt.messages import warn

LEDGER_FILE = "ledger.jsonl"
KINDS = ("weights", "gradients", "optimizer")
_MOST_UNWRITTEN = 2**20
_CHAIN = ',"chain":"'


class LedgerFile:
    """Appends lines to a ledger. A full disk or an unwritable folder causes one warning, never an error.

    Args:
        folder: The run folder.

    Attributes:
        lines: The number of lines.
        chain: The chain of the last one.
        before: What an earlier process has written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER_FILE
        self._pending: list[str] = []
        self._is_failing = False
        self._descriptor: int | None = None
        self.before = Ledger([], [], None)
        try:
            if self.path.exists():
                self.before = read_ledger(self.path)
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            os.ftruncate(self._descriptor, self.before.size)  # a line that a crash left incomplete
        except OSError as error:
            self._warn(error)
        self.lines = len(self.before.lines)
        self.chain = self.before.chains[-1] if self.before.chains else ""

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line; `flush` writes it."""
        self.add_text(dumps(line)[:-1])

    def add_text(self, body: str) -> None:
        """Append a line that is JSON already, without its closing brace."""
        self.chain = xxhash.xxh3_64_hexdigest((self.chain + body).encode())
        self._pending.append(f'{body}{_CHAIN}{self.chain}"}}\n')
        self.lines += 1

    def flush(self) -> None:
        """Pass the lines to the operating system."""
        if self._descriptor is None or not self._pending:
            self._pending = []
            return
        content = "".join(self._pending).encode()
        try:
            written = os.write(self._descriptor, content)
            if written < len(content):
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError(f"only {written} of {len(content)} bytes could be written")
        except OSError as error:
            self._warn(error)
            if len(content) > _MOST_UNWRITTEN:  # a ledger with a gap would be useless
                self.close()
            return
        self._pending, self._is_failing = [], False

    def close(self) -> None:
        """Close the file; nothing more is written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _warn(self, error: OSError) -> None:
        if not self._is_failing:
            expected = "a writable file; training continues without it"
            warn(explain(str(self.path), str(error), expected, "free disk space, or make the run folder writable"))
        self._is_failing = True


@dataclass(frozen=True)
class Ledger:
    """The lines of a ledger.

    Attributes:
        lines: All lines.
        chains: The chain of each.
        fault: The first line, counted from 1, that was edited or before which one is missing, and how that shows; None
            if the ledger is whole.
        size: Bytes of the complete lines.
    """

    lines: list[dict[str, Any]]
    chains: list[str]
    fault: tuple[int, str] | None
    size: int = 0

    def effective(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the lines that no resumed run has superseded, with their numbers from 0."""
        spans = [range(line["rewind"]["line"], number) for number, line in enumerate(self.lines) if "rewind" in line]
        for number, line in enumerate(self.lines):
            if "start" in line or not any(number in span for span in spans):
                yield number, line

    def starts(self) -> list[dict[str, Any]]:
        """Return what the lines about starts hold."""
        return [line["start"] for line in self.lines if "start" in line]

    def start_of(self, number: int) -> dict[str, Any]:
        """Return the start of the process that wrote a line."""
        starts = [line["start"] for line in self.lines[: number + 1] if "start" in line]
        return starts[-1] if starts else {}


def read_ledger(path: Path) -> Ledger:
    """Read a ledger as far as it is well-formed; an incomplete last line is left out.

    Raises:
        FileNotFoundError: There is none.
    """
    lines: list[dict[str, Any]] = []
    chains: list[str] = []
    fault, size, before = None, 0, ""
    for number, raw in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not raw.endswith(b"\n"):
            break
        text = raw.decode(errors="replace")
        body, _, end = text.rpartition(_CHAIN)
        content = read_json_line(raw)
        if not isinstance(content, dict):
            content, fault = {}, fault or (number, "it is not a JSON object")
        elif xxhash.xxh3_64_hexdigest((before + body).encode()) != end[:-3]:
            fault = fault or (
                number,
                "its content does not match its chain: it was edited, or a line before it removed",
            )
        lines.append(content)
        chains.append(end[:-3])
        before, size = end[:-3], size + len(raw)
    return Ledger(lines, chains, fault, size)


def require_ledger(folder: Path, where: str) -> Ledger:
    """Return the ledger of a run folder.

    Args:
        where: What needs it, for the message.

    Raises:
        ArgumentError: There is none, or a line of it was edited or removed.
    """
    where = f"{where} {folder}"
    try:
        ledger = read_ledger(folder / LEDGER_FILE)
    except OSError as error:
        do = "train with Trainer(ledger=True), and pass logs/<track>/<run>"
        got = f"no {LEDGER_FILE} in it" if folder.is_dir() else f"no such folder; the working directory is {Path.cwd()}"
        raise fail(ArgumentError, where, got=got, expected="a run with a ledger", do=do) from error
    if ledger.fault is not None:
        number, what = ledger.fault
        got = f"line {number} of {LEDGER_FILE}: {what}"
        raise fail(ArgumentError, where, got=got, expected="an unmodified ledger", do="restore the file")
    return ledger


def keep(entries: dict[tuple[Any, ...], dict[str, Any]], line: dict[str, Any]) -> None:
    """Add a line to lines by what they are about, so that a step that is made again finds its earlier line."""
    key = key_of(line)
    if key is not None:
        entries[key] = line


def key_of(line: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what a line is about: a window or the checksums at a step; None for other lines."""
    if "sums" in line:
        return "sums", line["step"], line["at"]
    return ("window", line["epoch"], line["batches"][0]) if "batches" in line else None


def find_difference(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    names: Sequence[str],
    called: tuple[str, str] = ("before", "now"),
) -> str | None:
    """Return the first difference between two lines about the same thing, in the order in which one causes the next.

    Args:
        names: The names of the tensors whose checksums the lines hold.
        called: How the message calls the two.
    """
    for name, said in (("batches", "batches"), ("samples", "order of samples"), ("content", "content of the batches")):
        if differ(before, now, name):
            return f"the {said}: {_shown(before[name])} {called[0]}, {_shown(now[name])} {called[1]}"
    if differ(before, now, "loss"):
        first, second = (float.fromhex(line["loss"]) for line in (before, now))
        return f"the loss: {first!r} ({before['loss']}) {called[0]}, {second!r} ({now['loss']}) {called[1]}"
    if before.get("skipped", False) != now.get("skipped", False):
        how = ("an optimizer step", "no optimizer step")
        return f"{how[before.get('skipped', False)]} {called[0]}, {how[now.get('skipped', False)]} {called[1]}"
    for kind in ("gradients", "weights", "optimizer") if now.get("at") == "step" else KINDS:
        one, other = before.get("sums", {}).get(kind), now.get("sums", {}).get(kind)
        if one and other and one != other:
            what = "the optimizer state" if kind == "optimizer" else f"the {kind}"
            pairs = zip(names, _split(one["each"]), _split(other["each"]), strict=False)
            found = [name for name, mine, theirs in pairs if mine != theirs]
            if len(one["each"]) != len(other["each"]) or not found:
                return f"{what}, of other parameters"
            more = f" and {len(found) - 1} more of {len(names)} tensors" if len(found) > 1 else ""
            return f"{what} of {found[0]}{more}"
    return None


def differ(before: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """Return whether two lines both have a value, and not the same."""
    return before.get(name) is not None and now.get(name) is not None and before[name] != now[name]


def _split(each: str) -> list[str]:
    return [each[at : at + 16] for at in range(0, len(each), 16)]


def _shown(value: Any) -> str:
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)


def compare_steps(
    ledger: Ledger, again: Ledger, names: Sequence[str], last: int, tolerance: float = 0.0
) -> tuple[int, str | None]:
    """Compare the lines that both ledgers have, in order; to a tolerance, only samples, batches and losses."""
    recorded = {key: line for _, line in ledger.effective() if (key := step_of(line)) is not None}
    num_compared = 0
    for _, line in again.effective():
        before = recorded.get(step_of(line) or ()) if line.get("step", last + 1) <= last else None
        if before is None:
            continue
        num_compared += 1
        if tolerance:
            before, line = ({**one, "sums": {}} for one in (before, line))
            line["loss"] = before.get("loss") if _is_close(before, line, tolerance) else line.get("loss")
        found = find_difference(before, line, names, ("recorded", "now"))
        if found is not None:
            return num_compared, f"step {line['step']}: {found}"
    return num_compared, None


def _is_close(before: Mapping[str, Any], now: Mapping[str, Any], tolerance: float) -> bool:
    one, other = before.get("loss"), now.get("loss")
    return one is None or other is None or math.isclose(float.fromhex(one), float.fromhex(other), rel_tol=tolerance)


def step_of(line: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Return what a line is about, wherever its checksums were due; None for other lines."""
    if "sums" in line:
        return "sums", line["step"]
    return ("window", line["epoch"], line["batches"][0]) if "batches" in line else None
