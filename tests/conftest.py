"""Guards that every test stands under, and what many tests share."""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slow import Ticks

# Before transformers or mlflow is imported: no hub and no usage reports, at no test.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
os.environ["DO_NOT_TRACK"] = "true"

# A shell that starts the tests in the background has them ignore Ctrl-C, which tests send, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

if sys.version_info >= (3, 14):  # where workers of a DataLoader would come from a fork server, which wants to pickle
    multiprocessing.set_start_method("fork")  # their data, and those of tests are often classes within functions

_FEW_FILES = 10
_LIBRARIES_OWN = (
    "_MLFLOW",
    "MLFLOW_",
    "TOKENIZERS_",
    "ACCELERATE_",
    "KMP_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "TF_",
    "PYTEST_",
)
_THREADS_OF_LIBRARIES = (
    "asyncio",
    "pydev",
    "ThreadPoolExecutor",
    "tqdm",
    "Mlflow",
    "MLflow",
    "mlflow",
    "Telemetry",
    "QueueFeeder",
)


@pytest.fixture
def without_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no sample to compare data: for tests that count what is read."""
    monkeypatch.setattr("accmt.data.planned.read_rows", lambda *_, **__: {})


def pytest_collection_finish(session: pytest.Session) -> None:
    """Import what most tests use where many run; a few files import what they need, which takes seconds less."""
    if len({item.path for item in session.items}) > _FEW_FILES:
        import transformers.optimization  # noqa: F401

        import tests.many_runs  # noqa: F401


def _is_of_library(thread: threading.Thread) -> bool:
    return thread.name.startswith(_THREADS_OF_LIBRARIES) or type(thread).__module__.startswith("tqdm.")


@pytest.fixture(autouse=True)
def _no_leaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run each test in an empty folder, and fail it if it leaves environment, threads or a process group behind."""
    monkeypatch.chdir(tmp_path)
    environment, threads = dict(os.environ), set(threading.enumerate())
    level, handlers = logging.getLogger("accmt").level, list(logging.getLogger("accmt").handlers)
    yield
    if "accmt.secrets" in sys.modules:
        sys.modules["accmt.secrets"]._remembered.clear()
    if "accmt.messages" in sys.modules:
        sys.modules["accmt.messages"]._said.clear()
    changed = {
        name
        for name in set(environment) | set(os.environ)
        if environment.get(name) != os.environ.get(name) and not name.startswith(_LIBRARIES_OWN)
    }
    assert not changed, f"the test left the environment changed: {changed}"
    left = [t.name for t in threading.enumerate() if t not in threads and not _is_of_library(t)]
    assert not left, f"the test left threads behind: {left}"
    torch = sys.modules.get("torch")
    assert torch is None or not torch.distributed.is_initialized(), "the test left a process group behind"
    assert logging.getLogger("accmt").level == level
    assert logging.getLogger("accmt").handlers == handlers


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """Give each test an Accelerate without memory of the one before."""
    yield
    if "accelerate.state" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


@pytest.fixture(autouse=True, scope="module")
def _same_threads_in_shared_fixtures() -> None:
    """Compute with one thread: other numbers of threads give other bits, and the machine is shared."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_threads(_same_threads_in_shared_fixtures: None) -> None:
    """As the fixtures of a module; a test may have changed it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Leave what was imported since, as `tests.many_runs` does, out of the collection that ends each run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test wait for a busy disk: what fsync does shows after a power cut only. Scripts call the real one."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def folders_are_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be moved out of a folder to a `.previous` beside it, as where it is a disk of its own."""
    rename = Path.rename

    def across_disks(self: Path, target: Path) -> Path:
        if ".previous" in str(target):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", across_disks)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    """Let the run measure its time by a clock that the test moves."""
    from tests.slow import Ticks

    ticks = Ticks()
    monkeypatch.setattr("accmt.addons.monitor.perf_counter", ticks)
    return ticks
