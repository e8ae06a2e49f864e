"""Checkpoints that a thread writes: what they hold, what waits for what, and failures that do not stop training."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from accmt.checkpoint import writer as writer_module
from accmt.checkpoint.contents import StateCollector, load_state, write_state
from accmt.checkpoint.store import CheckpointStore
from accmt.checkpoint.writer import CheckpointWriter
from accmt.errors import CheckpointError
from tests.checkpoints import clean, names_in, size_of


class EveryWeight(torch.optim.Optimizer):
    """Adds 1 to every weight and to a state of the same size, at each step."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("seen", torch.zeros_like(parameter)).add_(1)
            parameter.add_(1)


class Run:
    """A model in training with a writer."""

    def __init__(self, folder, *, is_async=True, num_values=1_000, max_checkpoints=None):
        self.failures = []
        self.threads = []
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(num_values // 4)) for _ in range(4)])
        self.optimizer = EveryWeight(self.model.parameters())
        self.num_updates = 0
        self.store = CheckpointStore(folder, max_checkpoints=max_checkpoints)
        collector = StateCollector(self.model, [self.optimizer])
        self.writer = CheckpointWriter(self.store, collector, is_async=is_async, on_failure=self._keep)

    def _keep(self, error):
        self.failures.append(error)
        self.threads.append(threading.current_thread())

    def update(self):
        self.optimizer.step()
        self.num_updates += 1

    def save(self, others=None, info=None):
        self.writer.save(self.num_updates, {} if others is None else others, {} if info is None else info)


@contextmanager
def closing(run):
    try:
        yield run
    finally:
        run.writer.close()


def values_in(folder):
    """Return the different values of all weights and of all state in a checkpoint, and its other states."""
    model = nn.ParameterList([nn.Parameter(torch.empty_like(p)) for p in Run(folder).model])
    optimizer = EveryWeight(model.parameters())
    others = load_state(model, [optimizer], folder)
    weights = torch.cat([parameter.data for parameter in model]).unique().tolist()
    state = torch.cat([optimizer.state[parameter]["seen"] for parameter in model]).unique().tolist()
    return weights, state, others


class Gate:
    """Holds the writing of files until it is opened."""

    def __init__(self, monkeypatch):
        self.is_reached, self._opened = threading.Event(), threading.Event()

        def write(collected, folder):
            self.is_reached.set()
            assert self._opened.wait(30)
            return write_state(collected, folder)

        monkeypatch.setattr(writer_module, "write_state", write)

    def open(self):
        self._opened.set()


def fail_with(monkeypatch, number):
    def write(collected, folder):
        write_state(collected, folder)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(writer_module, "write_state", write)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_checkpoint_holds_the_moment_of_its_save_though_training_goes_on(is_async, tmp_path):
    with closing(Run(tmp_path, is_async=is_async, max_checkpoints=9)) as run:
        for _ in range(4):
            run.update()
            run.save({"at": run.num_updates})
            for _ in range(50):
                run.update()
        run.writer.wait()
    for checkpoint in sorted(tmp_path.iterdir()):
        step = CheckpointStore(tmp_path).find(checkpoint).step
        assert values_in(checkpoint) == ([step], [step], {"at": step})
    assert len(names_in(tmp_path)) == 4
    assert run.failures == []


def test_what_changes_after_a_save_is_not_in_it(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    best, others, info = {"loss": 0.5}, {"history": [1]}, {}
    info["best"] = best
    with closing(Run(tmp_path)) as run:
        run.save(others, info)
        best["loss"], others["new"] = 0.25, 1
        others["history"].append(2)
        gate.open()
    found = CheckpointStore(tmp_path).newest()
    assert found.info == {"best": {"loss": 0.5}}
    assert load_state(run.model, [run.optimizer], found.folder) == {"history": [1]}


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    at_once = []
    with closing(Run(tmp_path, max_checkpoints=2)) as run:
        run.save()
        assert gate.is_reached.wait(30)
        run.update()
        timer = threading.Timer(0.2, lambda: (at_once.extend(names_in(tmp_path)), gate.open()))
        timer.start()
        run.save()
        timer.join()
        assert [name for name in at_once if name.startswith("step-")] == []
        assert "step-00000000" in names_in(tmp_path)
    assert names_in(tmp_path) == ["step-00000000", "step-00000001"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=os.strerror)
def test_a_failed_write_is_told_at_the_next_save_which_succeeds(number, tmp_path, monkeypatch):
    with closing(Run(tmp_path)) as run:
        run.save()
        run.writer.wait()
        with monkeypatch.context() as patch:
            fail_with(patch, number)
            run.update()
            run.save()
            while run.writer._in_flight and not run.writer._in_flight.done():
                time.sleep(0.01)
        assert run.failures == []
        assert names_in(tmp_path) == ["step-00000000"]
        run.update()
        run.save()
        assert os.strerror(number) in str(run.failures[0])
        assert run.threads == [threading.main_thread()]
    assert names_in(tmp_path) == ["step-00000002"]
    assert values_in(tmp_path / "step-00000002")[0] == [2]
    assert len(run.failures) == 1


@pytest.mark.parametrize("is_async", [True, False])
def test_a_failed_write_is_told_when_waited_for(is_async, tmp_path, monkeypatch):
    fail_with(monkeypatch, errno.ENOSPC)
    with closing(Run(tmp_path, is_async=is_async)) as run:
        run.save()
        assert len(run.failures) == (0 if is_async else 1)
        run.writer.wait()
        assert len(run.failures) == 1
        run.writer.wait()
    assert len(run.failures) == 1
    assert "do: free space there" in str(run.failures[0])
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("is_async", [True, False])
def test_a_folder_that_cannot_be_made_is_told_at_once(is_async, tmp_path):
    (tmp_path / "ck").write_text("a file in the way")
    with closing(Run(tmp_path / "ck", is_async=is_async)) as run:
        run.save()
        assert len(run.failures) == 1
        (tmp_path / "ck").unlink()
        run.save()
    assert len(run.failures) == 1
    assert names_in(tmp_path / "ck") == ["step-00000000"]


@pytest.mark.parametrize("act", ["save", "prepare"])
def test_what_cannot_be_stored_is_raised_for_the_user_to_mend(act, tmp_path):
    with closing(Run(tmp_path)) as run:
        with pytest.raises(CheckpointError, match=r"others\.odd\n  got: a object"):
            run.writer.prepare({"odd": object()}) if act == "prepare" else run.save({"odd": object()})
        run.save()
    assert run.failures == []
    assert names_in(tmp_path) == ["step-00000000"]


def test_memory_is_one_copy_of_the_state_however_many_saves(tmp_path):
    with closing(Run(tmp_path, num_values=2_000_000)) as run:  # 16 MB with its state
        run.update()
        run.writer.prepare({})
        for _ in range(3):
            run.save()
        run.writer.wait()
        before = psutil.Process().memory_info().rss
        for _ in range(97):
            run.update()
            run.save()
        run.writer.wait()
        assert psutil.Process().memory_info().rss - before < 12_000_000  # less than one more copy
        assert size_of(run.writer._snapshot) == 16_000_000
    assert size_of(run.writer._snapshot) == 0


def test_an_error_that_is_none_of_the_storage_is_raised(tmp_path, monkeypatch):
    def publish(*args):
        raise RuntimeError("the connection to a process is lost")

    monkeypatch.setattr(CheckpointStore, "publish", publish)
    run = Run(tmp_path)
    run.save()
    with pytest.raises(RuntimeError, match="connection to a process"):
        run.writer.close()
    assert run.failures == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("accmt")]


SLOW_SAVE = """
import sys, time, torch
from pathlib import Path
from accmt.checkpoint import writer as module
from accmt.checkpoint.contents import StateCollector
from accmt.checkpoint.store import CheckpointStore

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters())
writer = module.CheckpointWriter(
    CheckpointStore(Path(sys.argv[1])), StateCollector(model, [optimizer]), is_async=True, on_failure=print
)
writer.save(1, {}, {})
writer.wait()
write = module.write_state

def write_slowly(collected, folder):
    written = write(collected, folder)
    print("half-way", flush=True)
    time.sleep(float(sys.argv[2]))
    return written

module.write_state = write_slowly
writer.save(2, {}, {})
"""


def start_slow_save(folder: Path, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SLOW_SAVE, str(folder), str(seconds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stdout.readline() == "half-way\n"
    return process


@pytest.mark.slow
def test_a_program_that_ends_first_finishes_the_checkpoint_in_work(tmp_path):
    with start_slow_save(tmp_path, 0.3) as process:
        assert process.wait(60) == 0
    assert names_in(tmp_path) == ["step-00000002"]
    assert CheckpointStore(tmp_path).newest().step == 2


@pytest.mark.slow
def test_a_process_killed_while_the_thread_writes_leaves_the_checkpoint_before(tmp_path):
    with start_slow_save(tmp_path, 60) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    store = CheckpointStore(tmp_path)
    assert store.newest().step == 1
    clean(store)
    assert names_in(tmp_path) == ["step-00000001"]
