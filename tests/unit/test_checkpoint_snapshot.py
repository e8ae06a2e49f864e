"""The host copy holds the moment it was taken, in memory that is used again and again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from accmt.checkpoint import contents as snapshot_module
from accmt.checkpoint.contents import HostSnapshot


def test_a_copy_holds_the_moment_of_the_take_while_the_source_changes():
    source = torch.zeros(1000)
    snapshot = HostSnapshot()
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            source.add_(1)

    copies = snapshot.take({"w": source})
    moment = copies["w"].clone()
    thread = threading.Thread(target=train)
    thread.start()
    while source[0].item() < 10:
        pass
    stop.set()
    thread.join()
    assert torch.equal(copies["w"], moment)
    assert torch.equal(moment, torch.zeros(1000))
    assert torch.equal(snapshot.take({"w": source})["w"], source)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_helper_copies_half_where_torch_has_one_thread(num_threads, monkeypatch):
    sources = {f"w{index}": torch.full((1 + index,), float(index)) for index in range(9)}
    copied_by = []
    copy = snapshot_module._copy

    def note(pairs):
        copied_by.append((threading.current_thread() is threading.main_thread(), len(pairs)))
        copy(pairs)

    monkeypatch.setattr(snapshot_module, "_copy", note)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    with ThreadPoolExecutor(1) as helper:
        copies = HostSnapshot().take(sources, helper)
    assert all(torch.equal(copies[name], sources[name]) for name in sources)
    assert list(copies) == list(sources)
    assert sorted(copied_by) == ([(False, 5), (True, 4)] if num_threads == 1 else [(True, 9)])


def test_copies_are_contiguous_and_keep_every_kind_of_tensor():
    sources = {
        "turned": torch.arange(6.0).view(2, 3).T,
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "nothing": torch.zeros(0, 3),
    }
    copies = HostSnapshot().take(sources)
    assert all(copy.is_contiguous() and not copy.requires_grad for copy in copies.values())
    assert all(torch.equal(copies[name], sources[name]) for name in sources)
    assert all(copies[name].dtype == sources[name].dtype for name in sources)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is pinned memory")
def test_a_checkpoint_is_copied_through_ordinary_memory_where_there_is_no_pinned_memory(caplog):
    on_device = SimpleNamespace(device=torch.device("cuda"), shape=(2, 3), dtype=torch.float16)
    buffer = HostSnapshot()._buffer_for("w", on_device)
    assert (buffer.shape, buffer.dtype, buffer.device.type) == ((2, 3), torch.float16, "cpu")
    assert "checkpoints are copied through unpinned memory" in caplog.text
