# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a small residual network on images, with augmentation, mixup and an average of the weights.

    python examples/vision.py
    python examples/vision.py --plain   # the same network without these

The dataset shifts and rotates images, the collate function applies mixup, and `EMA` evaluates and saves the average of
the weights. Results depend only on the seed, not on the number of workers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from digits import build_datasets
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset, default_collate

from accmt import EMA, AcceleratorModule, Trainer, set_seed
from accmt.metrics import Accuracy

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "vision.yaml"
SEED = 0


class Augmented(Dataset):
    """Images, randomly shifted by up to a pixel, rotated by up to 12 degrees and scaled by up to 10 %."""

    def __init__(self, images: TensorDataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.images[index]
        angle, scale, right, down = (2 * torch.rand(4) - 1) * torch.tensor([0.21, 0.1, 0.25, 0.25])
        turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).reshape(2, 2) * (1 + scale)
        transform = torch.cat([turn, torch.stack([right, down]).unsqueeze(1)], dim=1).unsqueeze(0)
        grid = functional.affine_grid(transform, [1, *image.shape], align_corners=False)
        return functional.grid_sample(image.unsqueeze(0), grid, align_corners=False)[0], label


def mixup(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Build a batch with mixup: each image is mixed with another one, and labels become probabilities.

    Source:
        Zhang et al. 2018, https://arxiv.org/abs/1710.09412
    """
    images, labels = default_collate(samples)
    targets = functional.one_hot(labels, 10).float()
    share = torch.distributions.Beta(0.2, 0.2).sample()
    others = torch.randperm(len(images))
    return torch.lerp(images[others], images, share), torch.lerp(targets[others], targets, share)


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels),
        )
        same = stride == 1 and channels_in == channels
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return feature maps with `channels` channels, downsampled by the stride."""
        return functional.relu(self.layers(images) + self.shortcut(images))


class ResNet(AcceleratorModule):
    """A residual network of three blocks.

    It uses group norm, because batch norm statistics would belong to the last weights, not to their average.
    """

    def __init__(self) -> None:
        stem = nn.Conv2d(1, 16, 3, padding=1)
        blocks = Block(16, 16, stride=1), Block(16, 32, stride=2), Block(32, 64, stride=2)
        self.model = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch: Any) -> Tensor:
        """Return the mean loss of the batch; labels are classes, or probabilities `[samples, 10]`."""
        images, labels = batch
        return functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Return the mean loss and the inputs of the metric `accuracy`."""
        images, labels = batch
        scores = self.model(images)
        return {"loss": functional.cross_entropy(scores, labels), "accuracy": (scores, labels)}


def main() -> None:
    """Train, and print the accuracy of the best model."""
    parser = argparse.ArgumentParser(description="Train a residual network on digits.")
    parser.add_argument("--output", type=Path, default=Path("out/vision"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many images of each part, for a quick try")
    parser.add_argument("--plain", action="store_true", help="no augmentation, no mixup, no average of the weights")
    options = parser.parse_args()

    set_seed(SEED)  # the network starts with random weights
    train, validation = build_datasets(options.limit)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_accuracy",
        metrics=[Accuracy()],
        collate_fn={"train": None if options.plain else mixup},
        callbacks=[] if options.plain else [EMA(decay=0.99)],
        seed=SEED,
    )
    trainer.fit(ResNet(), train if options.plain else Augmented(train), validation)
    if trainer.is_main:
        print(f"best accuracy  {trainer.state.best['best_accuracy']:.1%} of {len(validation)} images")
        print(f"model folder   {options.output}")


if __name__ == "__main__":
    main()
