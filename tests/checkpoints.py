"""Checkpoints for tests: saved, damaged, and looked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash
from torch import nn
from torch.optim import Optimizer

from accmt.addons.crash_loop import FILE_NAME
from accmt.checkpoint.contents import HostSnapshot, StateCollector, write_state
from accmt.checkpoint.store import CheckpointStore
from accmt.files import dumps


def writer_of(content: str) -> Callable[[Path], None]:
    """Return what writes two files that hold `content`."""

    def write(files: Path) -> None:
        (files / "weights.bin").write_text(content)
        (files / "parts").mkdir()
        (files / "parts" / "state.json").write_text(f'"{content}"')

    return write


def save_with(store: CheckpointStore, step: int, write: Callable[[Path], None], info: dict[str, Any]) -> Path:
    """Write a checkpoint and publish it, without another thread."""
    staging = store.begin(step)
    staging.write(write)
    return store.publish(staging, info)


def size_of(snapshot: HostSnapshot) -> int:
    """Return the host memory that a snapshot's buffers hold."""
    return sum(buffer.nbytes for buffer in snapshot._buffers.values())


def clean(store: CheckpointStore) -> None:
    """Let a store remove what killed processes left, as it does before each save."""
    store._run_on_main(store._clean)


def save_state(model: nn.Module, optimizers: list[Optimizer], others: dict[str, Any], folder: Path) -> list[Path]:
    """Collect and write a state at once."""
    return write_state(StateCollector(model, optimizers).collect(others), folder)


def save(folder: Path, step: int, content: str | None = None, *, max_checkpoints: int | None = None) -> Path:
    """Save a checkpoint that holds `content` in its files and in its info."""
    content = f"at {step}" if content is None else content
    store = CheckpointStore(folder, max_checkpoints=max_checkpoints)
    return save_with(store, step, writer_of(content), {"content": content})


def newest_content(folder: Path) -> str | None:
    """Return what the newest checkpoint holds, None where there is none; its files have to agree."""
    found = CheckpointStore(folder).newest()
    if found is None:
        return None
    content: str = found.info["content"]
    assert (found.folder / "weights.bin").read_text() == content
    assert (found.folder / "parts" / "state.json").read_text() == f'"{content}"'
    return content


def names_in(folder: Path) -> list[str]:
    """Return what is in a folder of checkpoints, without the note of the run's starts."""
    return sorted(path.name for path in folder.iterdir() if path.name != FILE_NAME)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path, position: int = 1) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def write_version(folder: Path, version: int, **more: Any) -> None:
    """Rewrite the manifest as one of another version, or with other entries, with a right digest."""
    content = json.loads((folder / "manifest.json").read_text())
    del content["manifest_xxh3_64"]
    content = {**content, "version": version, **more}
    content["manifest_xxh3_64"] = xxhash.xxh3_64_hexdigest(dumps(content).encode())
    (folder / "manifest.json").write_text(dumps(content))
