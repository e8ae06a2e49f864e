"""Compares the ledgers of two runs: finds the first step at which they diverge, and possible causes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accmt.addons.flight_recorder.facts import MATTER, find_changes
from accmt.addons.flight_recorder.ledger import Ledger, find_difference, require_ledger
from accmt.errors import ArgumentError, fail

RELATIVE_TOLERANCE = 1e-4
"""For the losses of runs on different numbers of processes, which add in different orders."""
_CALLED = "in A", "in B"
_MACHINE = ("versions", "hardware", "threads", "device", "precision", "weights")
_CAUSES = (*_MACHINE, "program", "hps", "settings", "seed", "processes")
_IN_THE_RUN = ("step", "is_resumed", "run_folder")
_MOST_LINES = 40


@dataclass(frozen=True)
class Parting:
    """Where two runs diverge.

    Attributes:
        num_steps: Common steps.
        is_tolerant: Whether losses are compared to a tolerance, since the numbers of processes differ.
        step: The first step that differs; None if all are the same.
        difference: What differs there first.
        details: Differences at the nearest checksums that both have.
        causes: Differences at the start that may explain it, most likely first.
        others: All other differences at the start: name, value in A, value in B.
    """

    num_steps: int
    is_tolerant: bool
    step: int | None = None
    difference: str | None = None
    details: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    others: list[tuple[str, str, str]] = field(default_factory=list)


def compare_runs(first: Path, second: Path) -> Parting:
    """Compare the ledgers of two run folders.

    Raises:
        ArgumentError: A ledger is missing, was edited, or they have no common step.
    """
    one, other = (_by_step(require_ledger(folder, "accmt diff")) for folder in (first, second))
    common = sorted(key for key in one if key in other)
    steps = {step for step, _ in common if step > 0}
    if not steps:
        made = [[step for step, _ in run if step > 0] for run in (one, other)]
        got = " and ".join(f"steps {min(own)} to {max(own)}" if own else "no steps" for own in made)
        raise fail(
            ArgumentError,
            f"accmt diff {first} {second}",
            got=got,
            expected="at least one common step",
            do="choose runs that overlap",
        )
    is_tolerant = False
    starts: list[dict[str, Any]] = []
    for key in common:
        starts = [one[key][0], other[key][0]]
        before, now = one[key][1], other[key][1]
        names = starts[0].get("tensors", [])
        is_tolerant = is_tolerant or not _have_same_bits(*starts)
        if is_tolerant:  # in all later steps too: the weights differ in their last bits
            if _is_close(before.get("loss"), now.get("loss")):
                continue
            before, now = ({**line, "sums": {}, "content": None} for line in (before, now))
        difference = find_difference(before, now, names, _CALLED)
        if difference is not None:
            details = [] if is_tolerant else list(_find_details(one, other, common, key, names))
            details = [detail for detail in details if not detail.endswith(difference)]
            return Parting(
                len(steps), is_tolerant, key[0], difference, details, _find_causes(*starts), _find_others(*starts)
            )
    return Parting(len(steps), is_tolerant, causes=_find_causes(*starts), others=_find_others(*starts))


def _have_same_bits(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether runs add up in the same order: on as many processes, or with as many units of `same_bits`."""
    units = [start.get("settings", {}).get("same_bits") for start in (first, second)]
    return first.get("processes") == second.get("processes") or (units[0] is not None and units[0] == units[1])


_Steps = dict[tuple[int, int], tuple[dict[str, Any], dict[str, Any]]]


def _by_step(ledger: Ledger) -> _Steps:
    """Return for each window what its process started with, and its line with the checksums after it.

    The key is (step, how many windows before ended without it): a skipped window has the number of the next step.
    Step 0 is the state before the first one.
    """
    found: _Steps = {}
    windows: Counter[int] = Counter()
    start: dict[str, Any] = {}
    for _, line in ledger.effective():
        start = line.get("start", start)
        if "batches" in line:
            found[line["step"], windows[line["step"]]] = start, line
            windows[line["step"]] += 1
        elif "sums" in line:
            key = line["step"], max(0, windows[line["step"]] - 1)
            of_window, before = found.get(key, (start, {}))
            if "sums" not in before:
                found[key] = of_window, {**line, **before}
    return found


def _is_close(one: str | None, other: str | None) -> bool:
    if one is None or other is None or one == other:
        return True
    return math.isclose(float.fromhex(one), float.fromhex(other), rel_tol=RELATIVE_TOLERANCE)


def _find_details(
    one: _Steps, other: _Steps, common: list[tuple[int, int]], at: tuple[int, int], names: list[str]
) -> Iterator[str]:
    """Yield what the checksums nearest to a parting show: when all was still equal, and what differs first."""
    both = [key for key in common if "sums" in one[key][1] and "sums" in other[key][1]]
    before = [key for key in both if key < at]
    if before:
        yield f"weights and optimizer state are equal after step {before[-1][0]}"
    for key in both:
        if key < at:
            continue
        lines = [steps[key][1] for steps in (one, other)]
        before_of, now_of = ({"at": line["at"], "sums": line["sums"]} for line in lines)
        found = find_difference(before_of, now_of, names, _CALLED)
        if found is not None:
            yield f"checksums after step {key[0]}: {found}"
        return


def _find_causes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    one, other = _comparable(before), _comparable(now)
    causes = []
    for name in _CAUSES:
        found = find_changes(one, other, [name])
        if name == "program" and found:
            if one["program"].keys().isdisjoint(other["program"]):
                found = [f"other programs: {' '.join(one['program'])} -> {' '.join(other['program'])}"]
            else:
                found += _find_changed_lines(before.get("git"), now.get("git"))
        causes += found
    return list(dict.fromkeys(causes))  # the seed is a setting too


def _comparable(start: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts in which neither the folder nor the names and the number of the machines count."""
    folder = Path(start.get("cwd", "/"))
    program = {
        str(path.relative_to(folder) if path.is_relative_to(folder) else path): digest
        for path, digest in ((Path(name), digest) for name, digest in start.get("program", {}).items())
    }
    devices = sorted({own["device"] for own in start.get("hardware", [])})
    return {**start, "program": program, "hardware": ", ".join(devices)}


def _find_changed_lines(one: Mapping[str, str] | None, other: Mapping[str, str] | None) -> list[str]:
    """Return the changed lines of two states of a git repository, as far as the ledgers hold them."""
    if not one or not other:
        return []
    if one["commit"] != other["commit"]:
        return [f"code: git diff {one['commit'][:12]} {other['commit'][:12]}"]
    changed = [
        [line for line in git["diff"].splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
        for git in (one, other)
    ]
    own = [f"code: {line}  ({_CALLED[0]} only)" for line in changed[0] if line not in changed[1]]
    own += [f"code: {line}  ({_CALLED[1]} only)" for line in changed[1] if line not in changed[0]]
    return own[:_MOST_LINES]


def _find_others(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    found = []
    one, other = (_flatten(start) for start in (before, now))
    for name in {**one, **other}:
        if one.get(name) != other.get(name):
            found.append((name, str(one.get(name, "-")), str(other.get(name, "-"))))
    return found


def _flatten(start: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: value for name, value in start.items() if name not in MATTER and name not in _IN_THE_RUN}
    tensors, git = facts.pop("tensors", []), facts.pop("git", None) or {}
    facts["environment variable"] = facts.pop("variables", {})
    hosts = sorted({own["host"] for own in start.get("hardware", [])})
    facts |= {"tensors": len(tensors), "git commit": git.get("commit"), "hosts": ", ".join(hosts)}
    flat: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            flat |= {f"{name} {key}": one for key, one in value.items()}
        else:
            flat[name] = " ".join(map(str, value)) if isinstance(value, list) else value
    return flat
