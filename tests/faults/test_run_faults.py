"""Runs whose saves fail anywhere, and whose checkpoints are damaged: what comes out is the run without the fault."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
from pathlib import Path

import pytest

from accmt import Callback
from accmt.errors import CheckpointError
from tests.checkpoints import cut_in_half, delete, empty, flip, names_in, write_version
from tests.faults.injection import SimulatedKill, error_at, error_from, exception_at, injected, simulated_kill_at
from tests.faults.random_kills import main as kill_runs
from tests.resume.unbroken import assert_same, state_of, train

SETTINGS = {"checkpoint_every": "4 steps", "checkpoint_options": {"async_checkpointing": False}, "model_saving": None}
FAULTS = {
    "the disk is full": lambda point: error_at(point, errno.ENOSPC),
    "a disk that stays away": lambda point: error_from(point, errno.EIO),
    "an exception": exception_at,
    "a kill": simulated_kill_at,
}


class FaultySave(Callback):
    """Injects a fault into the save after one update.

    Args:
        fail: Decides about each operation of the file system.
    """

    def __init__(self, fail):
        self.fail = fail
        self.num_operations = 0
        self.stack = contextlib.ExitStack()

    def on_update_end(self):
        if self.state.global_step == 8:
            self.operations = self.stack.enter_context(injected(self.fail))

    def on_before_training_step(self):
        self.stop()

    def on_save_checkpoint(self):
        self.stop()

    def stop(self):
        self.num_operations = max(self.num_operations, len(getattr(self, "operations", self).trace))
        self.stack.close()

    trace = ()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("unbroken")):
        return state_of(*train("out/m", **SETTINGS))


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_save_that_fails_anywhere_changes_no_bit_of_the_run(fault, unbroken):
    outcomes = set()
    for point in itertools.count():
        path = f"out/{point}"
        faulty = FaultySave(fault(point))
        try:
            trainer, module = train(path, callbacks=[faulty], **SETTINGS)
        except SimulatedKill:
            faulty.stop()
            outcomes.update(n for n in names_in(Path(f"out/checkpoint-{point}")) if n.startswith("step"))
            trainer, module = train(path, resume=True, **SETTINGS)
        assert_same(unbroken, state_of(trainer, module))
        assert names_in(trainer.checkpoint_path) == ["step-00000018"]
        if faulty.num_operations <= point:
            break
    assert point > 20
    assert fault is not simulated_kill_at or outcomes == {"step-00000004", "step-00000008"}


@pytest.mark.parametrize("damage", [cut_in_half, flip, empty, delete], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors-00001-of-00001.safetensors"])
def test_a_damaged_checkpoint_is_never_used(name, damage, unbroken, caplog):
    settings = {**SETTINGS, "checkpoint_options": {"max_checkpoints": 2, "async_checkpointing": False}}
    train("out/m", stop=9, **settings)
    damage(Path("out/checkpoint-m/step-00000008") / name)
    Path("out/checkpoint-m/my notes").mkdir()
    with caplog.at_level(logging.WARNING):
        trainer, module = train("out/m", resume=True, **settings)
    assert "step-00000008 is damaged" in caplog.text
    assert_same(unbroken, state_of(trainer, module))
    assert "my notes" in names_in(trainer.checkpoint_path)


def test_a_checkpoint_of_a_future_version_stops_the_run():
    train("out/m", stop=9, **SETTINGS)
    write_version(Path("out/checkpoint-m/step-00000008"), 99)
    with pytest.raises(CheckpointError, match="format 99"):
        train("out/m", resume="auto", **SETTINGS)
    assert names_in(Path("out/checkpoint-m")) == ["step-00000008"]


@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("ACCMT_TEST_WIDTH", "1280")  # saves of 20 MB
        assert kill_runs(runs=1, seed=2026), capsys.readouterr().out


@pytest.mark.slow
def test_a_run_killed_and_started_on_other_processes_ends_with_the_same_bits(capsys):
    assert kill_runs(runs=2, seed=2026, trainer="same_bits", launch="1,2,4"), capsys.readouterr().out
