"""Short runs whose checkpoints are in object storage."""

from __future__ import annotations

from typing import Any

from accmt.addons.remote_checkpoints import RemoteFolder
from tests.toys import Linear, make_points, make_trainer

URL = "s3://bucket/run"


def train(module: Linear | None = None, epochs: int = 2, folder: str = "out/model", **settings: Any) -> Linear:
    """Train with two steps an epoch, and a checkpoint after each step."""
    module = module or Linear()
    settings = {
        "checkpoint": URL,
        "checkpoint_every": "1 step",
        "resume": "auto",
        "seed": 0,
        "verbose": True,
    } | settings
    make_trainer({"epochs": epochs, "batch_size": 4}, folder, **settings).fit(module, make_points())
    return module


def steps_in(remote: RemoteFolder) -> list[int]:
    return [one.manifest.step for one in remote.checkpoints() if not one.problem and one.manifest]
