"""Train a small network on scikit-learn's digits in a SLURM job that may be interrupted and restarted at any time.

    sbatch examples/slurm/train.sbatch
    python examples/slurm/train.py --epochs 2

`resume="auto"` resumes from the newest checkpoint, or starts at step 0 if there is none.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Trainer, set_seed


class DigitClassifier(AcceleratorModule):
    """Classifies the digit in an image `[samples, 1, 8, 8]`."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64 * 8 * 8, 10),
        )

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss of the batch."""
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)


def digest(model: nn.Module) -> str:
    """Return a digest of the weights, which is equal only for bit-for-bit identical weights."""
    weights = [tensor.detach().cpu().contiguous().numpy().tobytes() for tensor in model.state_dict().values()]
    return hashlib.sha256(b"".join(weights)).hexdigest()[:16]


def main() -> None:
    """Train, and print a digest of the weights."""
    parser = argparse.ArgumentParser(description="Train a small network on digits, with interruptions.")
    parser.add_argument("--output", default="out/slurm-digits", help="folder or URL of the saved model")
    parser.add_argument("--checkpoint", help="folder or URL of the checkpoints; default: beside the model")
    parser.add_argument("--epochs", type=int, default=100, help="passes over the 1,797 images")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    set_seed(0)
    trainer = Trainer(
        hps_config={"epochs": options.epochs, "batch_size": 32, "optim": {"type": "AdamW", "lr": 1e-3}},
        model_path=options.output,
        checkpoint=options.checkpoint,
        checkpoint_every="5 epochs",
        resume="auto",
        seed=0,
    )
    module = DigitClassifier()
    trainer.fit(module, TensorDataset(images, torch.tensor(digits.target)))
    if trainer.is_main:
        print(f"finished  {trainer.state.global_step} updates, weights {digest(module.model)}")


if __name__ == "__main__":
    main()
