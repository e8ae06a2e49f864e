"""Profiles are told and kept, whatever becomes of the run, and change nothing of it."""

from __future__ import annotations

import json
import logging
import pstats
import sys

import pytest
import torch
from accelerate.utils import ProfileKwargs

from accmt import Callback
from tests.toys import Linear, make_points, make_trainer


def fit(profiler, points=16, module=None, **settings):
    trainer = make_trainer(profiler=profiler, **settings)
    trainer.fit(module or Linear(), make_points(points), make_points(4))
    return trainer


def files(trainer):
    return sorted(path.name for path in (trainer.log_dir / "profile").glob("*"))


def updates_in(path):
    """Return the numbers of the updates that a trace is of."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["name"] for event in events if event.get("cat") == "user_annotation"}
    return {int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")}


class Failing(Callback):
    """Raises when some updates are done."""

    def __init__(self, error, updates):
        self.error, self.updates = error, updates

    def on_before_training_step(self):
        if self.state.global_step == self.updates:
            raise self.error


def test_no_profiler_changes_a_bit_of_the_training():
    outcomes = {}
    for kind in (None, "simple", "advanced", "pytorch"):
        module = Linear()
        trainer = make_trainer({"epochs": 2}, profiler=kind, grad_accumulation_steps=2)
        trainer.fit(module, make_points(10), make_points(4))
        outcomes[kind] = [module.model.weight.tolist(), trainer.state.state_dict(), trainer.state.metrics]
    assert all(outcome == outcomes[None] for outcome in outcomes.values())


def test_the_table_is_said_and_kept_as_text_and_numbers(caplog):
    with caplog.at_level(logging.INFO, "accmt"):
        trainer = fit("simple", verbose=True)
    folder = trainer.log_dir / "profile"
    assert files(trainer) == ["phases.json", "phases.txt"]
    assert (folder / "phases.txt").read_text() == f"{trainer.profile}\n"
    written = json.loads((folder / "phases.json").read_text())
    assert written == trainer.profile.to_dict()
    assert written["phases"]["update"]["calls"] == 8
    assert sum(phase["share"] for phase in written["phases"].values()) == pytest.approx(1)
    said = [record.getMessage() for record in caplog.records]
    assert f"time per phase\n{trainer.profile}" in said
    assert f"profile: {folder / 'phases.json'}" in said


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_a_run_that_ends_before_its_time_leaves_its_profile(error):
    for kind, expected in {
        "simple": ["phases.json", "phases.txt"],
        "advanced": ["functions-0.prof", "functions-0.txt"],
        "pytorch": ["trace-0-1.json"],
    }.items():
        trainer = make_trainer(profiler=kind, callbacks=Failing(error, updates=3))
        with pytest.raises(type(error)):
            trainer.fit(Linear(), make_points(16))
        assert files(trainer) == expected
    assert updates_in(trainer.log_dir / "profile" / "trace-0-1.json") == {2, 3}
    assert sys.getprofile() is None


@pytest.mark.parametrize("kind", ["simple", "advanced", "pytorch"])
def test_a_run_that_fails_before_it_begins_raises_its_own_error(kind):
    class Unstarted(Callback):
        def on_fit_start(self):
            raise ValueError("not today")

    trainer = make_trainer(profiler=kind, callbacks=Unstarted())
    with pytest.raises(ValueError, match="not today"):
        trainer.fit(Linear(), make_points())
    assert files(trainer) == []


def test_a_resumed_run_writes_beside_the_profile_of_its_first_part(tmp_path):
    told = {"run_name": "one", "checkpoint_every": "1step", "profiler": "simple"}
    with pytest.raises(RuntimeError, match="broken"):
        fit(callbacks=Failing(RuntimeError("broken"), updates=3), **told)
    resumed = fit(resume=True, **told)
    assert files(resumed) == ["phases-from-3.json", "phases-from-3.txt", "phases.json", "phases.txt"]
    assert resumed.profile.calls["update"] == 5


@pytest.mark.parametrize("kind", ["simple", "advanced", "pytorch"])
def test_a_trial_says_its_profile_and_writes_nothing(kind, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "accmt"):
        fit(kind, fast_dev_run=4, verbose=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    expected = {"simple": "time per phase", "advanced": "functions that took", "pytorch": "step 4"}[kind]
    assert expected in caplog.text


@pytest.mark.parametrize("kind", ["simple", "advanced", "pytorch"])
def test_a_profile_that_cannot_be_written_is_a_warning(kind, caplog):
    class InTheWay(Callback):
        def on_fit_start(self):
            (self.trainer.log_dir / "profile").write_text("a file where the folder should be")

    trainer = fit(kind, callbacks=InTheWay())
    assert trainer.state.finished
    assert "the profile could not be written" in caplog.text


def test_functions_are_told_and_kept_for_pstats(caplog):
    with caplog.at_level(logging.INFO, "accmt"):
        trainer = fit("advanced", verbose=True)
    folder = trainer.log_dir / "profile"
    stats = pstats.Stats(str(folder / "functions-0.prof")).stats
    calls = {(file, name): count for (file, _, name), (_, count, *_) in stats.items()}
    assert calls[Linear.step.__code__.co_filename, "step"] == 8 + 2
    table = (folder / "functions-0.txt").read_text()
    assert "Ordered by: internal time" in table
    assert "Ordered by: cumulative time" in table
    assert "(finish_window)" in table
    assert "functions that took the most time" in caplog.text


def test_a_trace_is_of_three_updates_after_the_first_two():
    trainer = fit("pytorch", points=40, grad_accumulation_steps=2)
    assert files(trainer) == ["trace-0-1.json"]
    trace = trainer.log_dir / "profile" / "trace-0-1.json"
    assert updates_in(trace) == {2, 3, 4}
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names.count("aten::mse_loss") == 3 * 2


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # each cycle is kept in a file of its own
def test_profile_kwargs_say_what_is_traced_and_where(tmp_path):
    seen = []
    schedule = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    trainer = fit(ProfileKwargs(schedule_option=schedule, output_trace_dir=str(tmp_path / "traces")))
    assert [updates_in(path) for path in sorted((tmp_path / "traces").iterdir())] == [{1}, {3}]
    assert files(trainer) == []
    trainer = fit(ProfileKwargs(schedule_option=schedule, on_trace_ready=seen.append))
    assert len(seen) == 2
    assert files(trainer) == []


def test_a_profile_of_torch_is_used_as_it_is_and_given_back():
    given = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    trainer = fit(given)
    assert files(trainer) == ["trace-0-1.json"]
    assert given.on_trace_ready is None
    steps = [event for event in given.key_averages() if event.key == "Optimizer.step#SGD.step"]
    assert steps[0].count == 8
