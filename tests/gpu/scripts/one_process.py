"""One process, in a group of its own or in none: `one_process.py <folder> <device> <none, group or fsdp2>`.

It trains a run as a whole, and one that is interrupted and resumed; digests of both ends are in result.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product of a process

import torch
import torch.distributed as dist
import xxhash

from accmt import Trainer
from tests.gpu.toys import HPS, WITHOUT_TRACES, AtStep, Classifier, InterruptionError, interrupt, make_data


def join_group(device: str) -> None:
    """Be launched as the only process of a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    if device == "cpu":  # where Accelerate begins no group for one process
        dist.init_process_group("gloo")


def train(folder: Path, **others: Any) -> str:
    """Train and return a digest of the weights."""
    trainer = Trainer(
        HPS,
        folder / "model",
        **{**WITHOUT_TRACES, "checkpoint_every": "2 steps", "model_saving": "best_valid_loss"},
        torch_flags={"deterministic": True},
        logging_dir=folder / "logs",
        metrics=["accuracy"],
        **others,
    )
    module = Classifier()
    trainer.fit(module, make_data(), make_data(24))
    digest = xxhash.xxh3_64()
    for tensor in module.model.state_dict().values():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def main(folder: Path, device: str, kind: str) -> None:
    """Train both runs and write the result."""
    if kind != "none":
        join_group(device)
    how: dict[str, Any] = {"accelerator": {"cpu": device == "cpu"}}
    how |= {"parallelism": {"fsdp": True}} if kind == "fsdp2" else {}
    digest = train(folder / "whole", **how)
    with contextlib.suppress(InterruptionError):
        train(folder / "broken", **how, callbacks=AtStep(21, interrupt))
    resumed = train(folder / "broken", **how, resume=True)
    backend = dist.get_backend() if dist.is_initialized() else None
    (folder / "result.json").write_text(json.dumps({"digest": digest, "resumed": resumed, "backend": backend}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
