"""A run with `same_bits` on as many processes as were launched: `same_bits.py <folder> <device> <precision> <engine>`.

Digests of weights, optimizer state and log rows are in result.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at the first matrix product of a process

import torch
import torch.distributed as dist
import xxhash

from accmt import Trainer, read_history
from accmt.sharded_tensors import make_whole
from tests.gpu.toys import HPS, WITHOUT_TRACES, Classifier, make_data


def digest(tensors: list[torch.Tensor]) -> str:
    """Return a digest of tensors, sharded or whole."""
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(make_whole(tensor.detach()).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def main(folder: Path, device: str, precision: str, engine: str) -> None:
    """Train, and write the result."""
    trainer = Trainer(
        {**HPS, "batch_size": 16},
        folder / "model",
        **{**WITHOUT_TRACES, "log_every": 1},
        accelerator={"cpu": device == "cpu"},
        mixed_precision=precision,
        parallelism={"fsdp": True} if engine == "fsdp" else None,
        same_bits=8,
        clip_grad=1.0,
        metrics=["accuracy"],
        logging_dir=folder / "logs",
    )
    module = Classifier("device")
    trainer.fit(module, make_data(60), make_data(24))
    state = trainer.run.stepper.optimizer.state_dict()["state"].values()
    result = {
        "weights": digest(list(module.model.state_dict().values())),
        "optimizer": digest([value for of_weight in state for value in of_weight.values()]),
    }
    if trainer.is_main:
        rows = [(row["step"], row["values"]) for row in read_history(trainer.log_dir) if "values" in row]
        result["rows"] = repr(rows)
        (folder / "result.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
