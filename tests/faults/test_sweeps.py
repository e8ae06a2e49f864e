"""Sweeps that are killed: nothing is lost, nothing runs twice, and what comes out is the unbroken study."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accmt.cli.main import main
from tests.faults.random_sweep_kills import SCRIPT, find_programs, kill_at_random, read_study, start, write_sweep
from tests.launching import ROOT
from tests.postgresql import find_server, running_server

pytestmark = pytest.mark.slow


TRIALS = 4  # the last of which learns from the others


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("unbroken")
    sweep = write_sweep(folder, TRIALS)
    assert start(sweep, functions=True, sleep_s=0).wait(200) == 0, (folder / "worker.log").read_text()
    return read_study(sweep)


def test_a_sweep_killed_at_random_moments_is_the_unbroken_one(unbroken: dict[str, Any], tmp_path: Path):
    killed = write_sweep(tmp_path / "killed", TRIALS)
    done = kill_at_random(killed, 2, seed=5, functions=True, sleep_s=0.05, longest_s=9)
    assert sum(done.values()) == 2
    assert read_study(killed) == unbroken


def wait_for(condition: Any, within_s: float = 100) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def newest_checkpoint(sweep: Path) -> Path | None:
    return next((sweep.parent / "sweep" / "trials" / "0000" / "checkpoints").glob("step-*6"), None)


@pytest.mark.repeats
def test_a_program_whose_worker_was_killed_stops_itself_and_the_next_worker_continues_it(
    unbroken: dict[str, Any], tmp_path: Path
):
    sweep = write_sweep(tmp_path / "killed", 1)
    worker = start(sweep, functions=False, sleep_s=0.3)
    wait_for(lambda: newest_checkpoint(sweep))
    [program] = find_programs(sweep)
    worker.kill()
    worker.wait()
    wait_for(lambda: not Path(f"/proc/{program}").exists())
    assert not (sweep.parent / "sweep" / "trials" / "0000" / "outcome.json").exists()
    worker = start(sweep, functions=False, sleep_s=0.05)
    program = wait_for(lambda: next((one for one in find_programs(sweep) if one != program), None))
    os.kill(program, signal.SIGKILL)  # the worker starts it again
    assert worker.wait(100) == 0
    log = (sweep.parent / "sweep" / "trials" / "0000" / "output.log").read_text()
    assert "the worker of trial 0 is gone" in log
    assert "trial 0 was interrupted (exit code -9); it continues" in (sweep.parent / "worker.log").read_text()
    assert read_study(sweep)["trials"] == unbroken["trials"][:1]


@pytest.mark.repeats
def test_trials_that_run_side_by_side_are_those_that_run_one_by_one_and_can_be_replayed(tmp_path: Path, capsys):
    space = {"optim.lr": {"log_uniform": [1e-3, 1.0]}, "trainer.ledger": True}
    keys = {"space": space, "sampler": "random", "pruner": "none"}
    alone = write_sweep(tmp_path / "alone", 2, **keys)
    assert start(alone, functions=True, sleep_s=0).wait(200) == 0
    together = write_sweep(tmp_path / "together", 2, **keys, parallel=2)
    worker = start(together, functions=False, sleep_s=0.1)
    wait_for(lambda: len(find_programs(together)) == 2)
    assert worker.wait(200) == 0, (together.parent / "worker.log").read_text()
    assert read_study(together) == read_study(alone)
    run = together.parent / "sweep" / "logs" / "net" / "killed-0001"
    assert main(["replay", str(run), "--step", "20"]) == 0
    assert "bit-for-bit identical" in capsys.readouterr().out


@pytest.mark.repeats
@pytest.mark.skipif(find_server() is None, reason="no PostgreSQL: apt-get install postgresql")
def test_workers_that_share_a_database_take_over_the_trials_of_a_killed_one(tmp_path: Path):
    def start_worker(name: str) -> subprocess.Popen[bytes]:
        sweep = write_sweep(tmp_path / name, 4, storage=url, lease_s=4.0, sampler="random", pruner="none")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SWEPT_SLEEP": "0.1"}
        environment["SWEPT_LOG"] = str(tmp_path / "starts.jsonl")
        with (tmp_path / f"{name}.log").open("ab") as log:
            command = [sys.executable, str(SCRIPT), f"--sweep={sweep}"]
            return subprocess.Popen(command, env=environment, cwd=tmp_path / name, stdout=log, stderr=log)

    def starts() -> list[dict[str, Any]]:
        log = tmp_path / "starts.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def running_trial() -> int | None:
        """Return the trial that the first worker is in the middle of, counted from 1; None between two."""
        started = [line["trial"] for line in starts() if line["pid"] == first.pid]
        folder = tmp_path / "one" / "sweep" / "trials"
        is_running = started and not (folder / f"{started[-1]:04d}" / "outcome.json").exists()
        return started[-1] + 1 if is_running else None

    with running_server() as url:
        first, second = start_worker("one"), start_worker("two")  # with a disk of its own each, as on two machines
        killed_in = -1 + wait_for(lambda: running_trial() if second.pid in {line["pid"] for line in starts()} else None)
        first.kill()
        first.wait()
        assert second.wait(150) == 0, (tmp_path / "two.log").read_text()
        study = read_study(tmp_path / "two" / "sweep.json")
    assert [state for _, state, *_ in study["trials"]] == ["COMPLETE"] * 4
    times = [line["trial"] for line in starts()]
    assert sorted(times) == sorted([*range(4), killed_in])
    assert len({json.dumps(params) for params, *_ in study["trials"]}) == 4
