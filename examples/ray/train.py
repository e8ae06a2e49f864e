# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]", "ray[train]"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "../..", editable = true }
# ///
"""Train a small network on digits with Ray Train: two workers, restarted from the newest checkpoint if they fail.

    python examples/ray/train.py

Ray starts the workers and their process group, which accmt uses. `storage` must be a folder that all workers see, or
URLs for both folders.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from accmt.saving import read_status

EXAMPLES = Path(__file__).resolve().parents[1]


def train_worker(config: dict[str, Any]) -> None:
    """Train on one worker; Ray calls this on each of them."""
    sys.path.append(str(EXAMPLES))
    from digits import DigitClassifier, build_datasets

    from accmt import Trainer, set_seed

    set_seed(0)  # all workers start with the same weights
    trainer = Trainer(
        config["hps"],
        f"{config['storage']}/model",
        metrics="accuracy",
        model_saving="best_accuracy",
        checkpoint_every="epoch",
        resume="auto",
        seed=0,
    )
    trainer.fit(DigitClassifier(), *build_datasets())


def main() -> None:
    """Train on two workers, and print the result."""
    parser = argparse.ArgumentParser(description="Train a small network on digits with Ray Train.")
    parser.add_argument("--storage", type=Path, default=Path("out/ray"), help="folder that all workers see")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the images")
    options = parser.parse_args()
    storage = str(options.storage.resolve())
    hps = {"epochs": options.epochs, "batch_size": 16, "optim": {"type": "AdamW", "lr": 3e-3}}
    TorchTrainer(
        train_worker,
        train_loop_config={"hps": hps, "storage": storage},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="digits", storage_path=storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"accuracy      {read_status(Path(storage) / 'model')['metrics']['accuracy']:.1%}")
    print(f"model folder  {storage}/model")


if __name__ == "__main__":
    main()
