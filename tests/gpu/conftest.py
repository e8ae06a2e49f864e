"""The suite that needs a GPU: `make gpu` runs it on one; `pytest tests/gpu --device cpu` as far as a CPU goes, and
with `--device pretend` on a device in host memory, where a tensor in the wrong place and a wait are errors.

It runs from a plain checkout: nothing is installed, and no network is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product of a process

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu import pretended
from tests.gpu.toys import WITHOUT_TRACES

ON_PRETENDED_DEVICE = ("test_waits.py", "test_checkpoints.py", "test_memory.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the device: a GPU; where there is none the CPU, or a device in its memory that finds what is misplaced."""
    parser.addoption("--device", choices=("cuda", "cpu", "pretend"), default="cuda", help="where the suite runs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let warnings of other versions of torch be warnings."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.filterwarnings("default"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what cannot run; pytest folds the skips of one reason into one line, for they are raised in one place."""
    only, device = item.get_closest_marker("cuda_only"), item.config.getoption("--device")
    if device == "pretend" and item.path.name not in ON_PRETENDED_DEVICE:
        pytest.skip("shows nothing on a pretended device")
    if device != "cuda":
        if only is not None:
            pytest.skip(f"needs a CUDA device: {only.args[0]}")
    elif not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device: --device cpu runs what a CPU can")


@pytest.fixture(autouse=True)
def _no_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder; CUDA and compilers leave threads and variables behind, which is theirs."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _same_bits() -> Iterator[None]:
    """Compute in full precision, and give memory back between tests."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device that the suite runs on."""
    name = request.config.getoption("--device")
    return pretended.device() if name == "pretend" else torch.device(name)


@pytest.fixture
def settings(device: torch.device) -> dict[str, Any]:
    """Arguments of a quiet Trainer on that device."""
    is_pretended = device.type == pretended.NAME
    accelerator = pretended.make_accelerator() if is_pretended else {"cpu": device.type == "cpu"}
    return {**WITHOUT_TRACES, "accelerator": accelerator}


class _NoReading(TorchDispatchMode):
    """Rejects what on a GPU would wait for it: `item()`, `float(tensor)` and `if tensor`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("called a synchronizing operation")
        return func(*args, **(kwargs or {}))


@contextmanager
def _error_at_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def without_waits(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """Makes a context in which waiting for the device is an error."""
    return {"cpu": _NoReading, "cuda": _error_at_waits, pretended.NAME: pretended.without_waits}[device.type]


@pytest.fixture
def limited_memory(device: torch.device) -> Callable[[int], AbstractContextManager[Any]]:
    """Makes a context in which torch may hold so many bytes of the device; on a CPU it limits nothing."""

    @contextmanager
    def limit(num_bytes: int) -> Iterator[None]:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    return limit if device.type == "cuda" else lambda num_bytes: nullcontext()
