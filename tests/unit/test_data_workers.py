import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader

from accmt.data import SourceOptions, build_source, note_dead_worker
from accmt.data.fetching import _wait_at_each_fork, leave_signals_to_parent
from tests.toys import Stream


class Numbers:
    def __init__(self, seconds=0.0, killed_at=None):
        self.seconds = seconds
        self.killed_at = killed_at

    def __getitem__(self, index):
        if index == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return torch.tensor(index)

    def __len__(self):
        return 40


class Scheduled(Numbers):
    def set_epoch(self, epoch):
        pass


def build(data, workers=2):
    return build_source(data, SourceOptions(purpose="train", batch_size=2, num_workers=workers))


def workers_of(micro_batches):
    """Return the processes that load the micro-batches of a generator that is not at its end."""
    frame = micro_batches.gi_frame.f_locals
    batches = frame.get("batches") or frame["self"]._reading
    return batches._workers


@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("part", ["collate_fn", "dataset"])
def test_what_cannot_be_sent_to_workers_that_are_not_forked_is_named(part):
    class Local(Numbers):
        pass

    parts = {"dataset": Local()} if part == "dataset" else {"dataset": Numbers(), "collate_fn": lambda samples: samples}
    loader = DataLoader(**parts, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(Exception, match="pickle") as caught:
        next(build_source(loader, SourceOptions(purpose="train", batch_size=2)).micro_batches(0))
    assert f"the {part}, for loader workers started by 'spawn'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("data", [Numbers(), Scheduled(), Stream(40)], ids=lambda data: type(data).__name__)
def test_workers_end_with_the_run_even_if_a_traceback_holds_their_iterator(data):
    loader = build(data)
    micro_batches = loader.micro_batches(0)
    next(micro_batches)
    workers = workers_of(micro_batches)
    assert any(worker.is_alive() for worker in workers)
    loader.end_workers()
    assert not any(worker.is_alive() for worker in workers)
    micro_batches.close()
    assert len(list(loader.micro_batches(1))) >= 20
    loader.end_workers()


def wait_for_signals(ready):
    leave_signals_to_parent()
    ready.set()
    time.sleep(60)


def test_a_worker_outlives_a_first_request_to_end_and_leaves_at_the_second():
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=wait_for_signals, args=(ready,))
    worker.start()
    assert ready.wait(10)
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        os.kill(worker.pid, number)
    worker.join(0.5)
    assert worker.is_alive()
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(10)
    assert worker.exitcode == -signal.SIGTERM


# Torch's error may come while torch opens files to see whether there are too many, and leave one of them open.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_about_a_killed_worker_says_what_may_have_killed_it():
    loader = build(Numbers(killed_at=12))
    with pytest.raises((RuntimeError, ConnectionError, EOFError)) as caught:
        list(loader.micro_batches(0))
    note_dead_worker(caught.value)
    notes = [note for note in caught.value.__notes__ if note.startswith("a data loader worker")]
    assert len(notes) == 1
    assert "exited without an error message" in notes[0]
    loader.end_workers()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="there a fork waits for no lock that another thread held")
def test_each_fork_waits_for_the_lock_on_the_list_of_threads(monkeypatch):
    registered = []
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: registered.append(hooks))
    _wait_at_each_fork.cache_clear()
    for data in (Numbers(), Stream(40)):
        list(build(data, workers=0).micro_batches(0))
    assert registered == []
    for data in (Numbers(), Stream(40)):
        list(build(data).micro_batches(0))
    assert registered == [{"before": sys._current_frames}]
    _wait_at_each_fork.cache_clear()
