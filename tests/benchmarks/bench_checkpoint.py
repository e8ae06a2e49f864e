"""What a checkpoint costs training, beside `accelerator.save_state` and `load_state` of the same state.

    make bench

A transformer of the size of MiniLM-L6 (23 M parameters, AdamW: 270 MB of state in 317 tensors) trains on the CPU. Each
round times the same updates without a checkpoint, with one of accmt (written by a thread: fsynced, digested, published,
the one before deleted) and with one of `save_state` (neither fsynced nor digested, nothing deleted); the order
alternates. A fourth kind also uploads accmt's, to a folder that stands for object storage: it must not keep training
waiting longer. The disk is idle at the start of each part. "Still" is the time that a save keeps training from going
on, "whole" what the part took longer than the one without. Ratios are those of the medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from accmt.addons.remote_checkpoints import Lease, RemoteFolder, Uploads
from accmt.checkpoint.contents import StateCollector, load_state
from accmt.checkpoint.store import CheckpointStore
from accmt.checkpoint.writer import CheckpointWriter
from accmt.errors import CheckpointError

Times = dict[str, list[float]]
INFO = {"epoch": 0, "hps": {"lr": 1e-4}}
OTHERS = {"counters": {"epoch": 0, "global_step": 1}, "window": {"loss": torch.tensor(0.5), "count": 3}}


class Job:
    """A model in training, and both ways to save it."""

    def __init__(self, folder: Path) -> None:
        config = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
        self.folder = folder
        self.accelerator = Accelerator(cpu=True)
        model = BertForSequenceClassification(config)
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        self.inputs = torch.randint(config.vocab_size, (2, 32))
        self.update()
        self.store = CheckpointStore(folder / "accmt")
        self.collector = StateCollector(self.model, [self.optimizer.optimizer])
        self.writer = CheckpointWriter(self.store, self.collector, is_async=True, on_failure=raise_it)
        self.num_saved = 0
        self.remote = RemoteFolder(f"file://{folder}/remote")

    def update(self) -> None:
        """Do one update."""
        loss = self.model(input_ids=self.inputs, labels=torch.zeros(2, dtype=torch.long)).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_updates: int, save: Callable[[], None]) -> tuple[float, float]:
        """Return the seconds of a save, and of it with so many updates after it."""
        os.sync()
        start = time.perf_counter()
        save()
        saved = time.perf_counter()
        for _ in range(num_updates):
            self.update()
        self.writer.wait()
        return saved - start, time.perf_counter() - start

    def save(self) -> None:
        """Save with accmt."""
        self.num_saved += 1
        self.writer.save(self.num_saved, OTHERS, INFO)

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Upload what is saved, as a run with a URL does, and wait for it at the end."""
        lease = Lease(self.remote, "bench")
        lease.take()
        uploads = Uploads(self.remote, self.store.folder, 1, lease)
        self.writer.on_published = [uploads.add]
        try:
            yield
        finally:
            self.writer.on_published = []
            uploads.close()

    def save_state(self) -> None:
        """Save with Accelerate, into a fresh folder: faster there than over old files."""
        self.num_saved += 1
        self.accelerator.save_state(str(self.folder / f"accelerate-{self.num_saved}"))

    def keep_last_of_accelerate(self) -> Path:
        """Delete all that `save_state` wrote but the last, and return that."""
        *old, last = sorted(self.folder.glob("accelerate-*"), key=lambda path: path.stat().st_mtime)
        for path in old:
            shutil.rmtree(path)
        return last

    def load(self) -> None:
        """Find the newest checkpoint, verify every file, and load it."""
        found = self.store.newest()
        load_state(self.model, [self.optimizer.optimizer], found.folder)

    @property
    def state(self) -> list[Tensor]:
        """All that is saved."""
        return list(self.collector.collect(OTHERS).pieces.tensors.values())


def raise_it(error: CheckpointError) -> None:
    """A benchmark of failures is none."""
    raise error


def seconds_of(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@contextmanager
def peak_of_memory() -> Iterator[list[int]]:
    """Give a list that ends with the bytes by which this process grew at most."""
    process, grown, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not done.wait(0.002):
            grown.append(max(grown[-1], process.memory_info().rss - before))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield grown
    finally:
        done.set()
        thread.join()


def measure(job: Job, num_updates: int, num_rounds: int) -> Times:
    """Run all rounds and return the seconds of each kind."""
    times: Times = defaultdict(list)
    kinds = {"without": lambda: None, "accmt": job.save, "uploaded": job.save, "save_state": job.save_state}
    for number in range(num_rounds):
        for kind in list(kinds) if number % 2 == 0 else reversed(kinds):
            with job.uploading() if kind == "uploaded" else nullcontext():
                still, whole = job.train(num_updates, kinds[kind])
            times[f"{kind} still"].append(still)
            times[f"{kind} whole"].append(whole)
        last = job.keep_last_of_accelerate()
        times["accmt load"].append(seconds_of(job.load))
        times["load_state load"].append(seconds_of(lambda last=last: job.accelerator.load_state(str(last))))
    return times


def run(num_threads: int, num_updates: int, num_rounds: int) -> None:
    """Measure with so many threads of torch, and print a table."""
    torch.set_num_threads(num_threads)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        state_bytes = sum(tensor.nbytes for tensor in job.state)
        with peak_of_memory() as grown:
            job.writer.prepare(OTHERS)
            job.writer.wait()
            first = seconds_of(job.save)
            for _ in range(3):
                job.save()
            job.writer.wait()
        times = measure(job, num_updates, num_rounds)
        job.writer.close()
    median = {kind: 1e3 * statistics.median(values) for kind, values in times.items()}
    print(f"\n{state_bytes / 1e6:.0f} MB of state, {num_threads} thread(s) of torch, {os.cpu_count()} cores")
    print("| milliseconds | accmt | Accelerate | ratio |\n|---|---|---|---|")
    print_row("training stands still", median["accmt still"], median["save_state still"])
    print_row("training stands still, with uploads", median["uploaded still"], median["save_state still"])
    plain = median["without whole"]
    print_row("whole time of a checkpoint", median["accmt whole"] - plain, median["save_state whole"] - plain)
    print_row("whole time, with uploads", median["uploaded whole"] - plain, median["save_state whole"] - plain)
    print_row("loading (accmt: and verifying)", median["accmt load"], median["load_state load"])
    print(
        f"first save {first * 1e3:.0f} ms; memory while saving: {grown[-1] / state_bytes:.2f} x the state", flush=True
    )


def print_row(title: str, ours: float, theirs: float) -> None:
    print(f"| {title} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |")


def main() -> None:
    """Measure on one thread and on as many as there are cores."""
    parser = argparse.ArgumentParser(description="Time checkpoints beside those of Accelerate.")
    parser.add_argument("--updates", type=int, default=12, help="updates after each save")
    parser.add_argument("--rounds", type=int, default=15, help="rounds, each with both ways and none")
    options = parser.parse_args()
    for num_threads in sorted({1, os.cpu_count() or 1}):
        run(num_threads, options.updates, options.rounds)


if __name__ == "__main__":
    main()
