"""Profilers of several processes keep in step, and change nothing."""

from __future__ import annotations

import json
import pstats
from pathlib import Path

import pytest

from tests.launching import SCRIPTS, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    path = folder / "result.json"
    launch(SCRIPTS / "profiles.py", str(path), str(folder), processes=2, result=path)
    return json.loads(path.read_text())


def files(outcome, kind):
    folders = {Path(process["folder"]) for process in outcome[kind]}
    assert len(folders) == 1
    return sorted(folders.pop().glob("*"))


def test_no_profiler_changes_a_bit_on_several_processes(outcome):
    weights = [process["weights"] for processes in outcome.values() for process in processes]
    assert all(each == weights[0] for each in weights)


def test_the_main_process_has_the_phases_and_counts_its_own_batches(outcome):
    main, other = (process["calls"] for process in outcome["simple"])
    assert other is None
    assert [path.name for path in files(outcome, "simple")] == ["phases.json", "phases.txt"]
    # 17 samples in micro-batches of 4 are 5 micro-batches, of which the last has none for the second process
    assert (main["data"], main["backward"], main["update"], main["evaluation"]) == (10, 10, 6, 2)


def test_each_process_has_its_functions_and_its_trace(outcome):
    functions = files(outcome, "advanced")
    assert [path.name for path in functions] == [
        f"functions-{number}.{kind}" for number in (0, 1) for kind in ("prof", "txt")
    ]
    counts = [_calls_of_step(path) for path in functions if path.suffix == ".prof"]
    assert counts == [10 + 2 * 2, 10 + 2 * 2]  # the second one runs batches of the first where it has no samples
    traces = files(outcome, "pytorch")
    assert [path.name for path in traces] == ["trace-0-1.json", "trace-1-1.json"]
    assert all("ProfilerStep#2" in path.read_text() for path in traces)


def _calls_of_step(path):
    stats = pstats.Stats(str(path)).stats
    return sum(count for (file, _, name), (_, count, *_) in stats.items() if name == "step" and "toys" in file)
