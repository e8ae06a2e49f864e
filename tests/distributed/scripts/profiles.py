"""Runs with each profiler and without; writes their weights, the files of profiles, and what each process counted.

torchrun --nproc-per-node 2 profiles.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from accmt import Trainer
from accmt.processes import gather_objects, is_main_process
from tests.toys import HPS, Linear, make_points

KINDS = ("none", "simple", "advanced", "pytorch")


def train(kind: str, folder: Path) -> dict[str, Any]:
    """Train with a profiler, and return what this process has of it."""
    module = Linear()
    trainer = Trainer(
        {**HPS, "epochs": 2},
        folder / "model",
        logging_dir=folder / "logs",
        run_name=kind,
        model_saving="best_valid_loss",
        grad_accumulation_steps=2,
        checkpoint_every=None,
        verbose=False,
        seed=0,
        profiler=None if kind == "none" else kind,
    )
    trainer.fit(module, make_points(17), make_points(5))
    return {
        "weights": module.model.weight.tolist(),
        "calls": None if trainer.profile is None else trainer.profile.calls,
        "folder": str(trainer.log_dir / "profile"),
    }


def main(result: Path, folder: Path) -> None:
    """Train, and write what came of it."""
    outcomes = {kind: gather_objects(train(kind, folder)) for kind in KINDS}
    if is_main_process():
        result.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
