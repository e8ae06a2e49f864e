# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a small convolutional network on scikit-learn's 8x8 digits; takes seconds.

    python examples/digits.py

You can import `build_datasets` and `DigitClassifier` to train the same network from another script.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Trainer, set_seed
from accmt.metrics import Accuracy

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "digits.yaml"
NUM_VALIDATION = 360  # a fifth of the 1,797 images


def build_datasets(limit: int | None = None) -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation data: images `[samples, 1, 8, 8]` from 0 to 1, and labels `[samples]`.

    Images by the same writer are adjacent, so shuffling before the split would overestimate the accuracy.

    Args:
        limit: Maximum number of images in each set; None keeps all.
    """
    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train = TensorDataset(images[:-NUM_VALIDATION][:limit], labels[:-NUM_VALIDATION][:limit])
    return train, TensorDataset(images[-NUM_VALIDATION:][:limit], labels[-NUM_VALIDATION:][:limit])


def build_model() -> nn.Module:
    """Return a network with two convolutions that maps 8x8 images to scores for ten digits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


class DigitClassifier(AcceleratorModule):
    """Classifies the digit in an image."""

    def __init__(self) -> None:
        self.model = build_model()

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss of the batch."""
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss and the inputs of the metric `accuracy`."""
        images, labels = batch
        scores = self.model(images)
        return {"loss": functional.cross_entropy(scores, labels), "accuracy": (scores.argmax(-1), labels)}


def main() -> None:
    """Train, and print the accuracy of the best model."""
    parser = argparse.ArgumentParser(description="Train a small network on digits.")
    parser.add_argument("--output", type=Path, default=Path("out/digits"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many images of each part, for a quick try")
    parser.add_argument("--seed", type=int, default=0, help="two runs with the same seed give equal weights")
    options = parser.parse_args()

    set_seed(options.seed)  # the network starts with random weights
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_accuracy",
        metrics=[Accuracy()],
        seed=options.seed,
    )
    train, validation = build_datasets(options.limit)
    trainer.fit(DigitClassifier(), train, validation)
    if trainer.is_main:
        print(f"best accuracy  {trainer.state.best['best_accuracy']:.1%} of {len(validation)} images")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
