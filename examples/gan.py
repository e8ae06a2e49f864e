# /// script
# requires-python = ">=3.11"
# dependencies = ["accmt-trainer[examples]"]
#
# [tool.uv.sources]
# accmt-trainer = { path = "..", editable = true }
# ///
"""Train a GAN on scikit-learn's digits: two networks, two optimizers; takes half a minute.

    python examples/gan.py

The generator learns to draw digits that the discriminator classifies as real. A classifier trained on real digits
scores them: `digit_score` is 10 if all digits are equally frequent and classified with certainty, and 1 if all images
look alike. `generated.png` in the model folder shows images of the best generator.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from digits import build_datasets
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.utils.data import TensorDataset

from accmt import ChainedOptimizer, ExtendedAcceleratorModule, Trainer, create_optimizer, set_seed
from accmt.metrics import Metric
from accmt.saving import read_status

HPS_PATH = Path(__file__).resolve().parents[1] / "hps" / "gan.yaml"
NOISE = 32
SEED = 0


class GAN(ExtendedAcceleratorModule):
    """A generator of images, and a discriminator that distinguishes them from real ones."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"generator": build_generator(), "discriminator": build_discriminator()})

    def get_optimizer(self) -> ChainedOptimizer:
        """Return one optimizer per network, with the arguments of the hyper-parameters."""
        hps = self.trainer.hps
        return ChainedOptimizer([create_optimizer(part, hps.optim, **hps.optim_kwargs) for part in self.model.values()])

    def generate(self, count: int) -> Tensor:
        """Return images `[count, 1, 8, 8]` from 0 to 1."""
        return self.model["generator"](torch.randn(count, NOISE, device=self.device))

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Train the discriminator, then the generator; both losses are logged."""
        (real,), discriminate = batch, self.model["discriminator"]
        of_generator, of_discriminator = self.optimizers()

        with self.toggled_optimizer(of_discriminator):
            fake = self.generate(len(real)).detach()
            discriminator_loss = softplus(-discriminate(real)).mean() + softplus(discriminate(fake)).mean()
            self.backward(discriminator_loss)
            self.step_optimizer(of_discriminator)
            self.zero_grad()

        with self.toggled_optimizer(of_generator):
            loss = softplus(-discriminate(self.generate(len(real)))).mean()
            self.backward(loss)
            self.step_optimizer(of_generator)
            self.zero_grad()
        return {"loss": loss, "discriminator_loss": discriminator_loss.detach()}

    def validation_step(self, batch: Any) -> dict[str, Any]:
        """Generate one image per real one; the noise is the same in each evaluation."""
        (real,) = batch
        return {"digit_score": (self.generate(len(real)), real)}

    def on_save_model(self) -> None:
        """Log images of the best generator so far, to the run folder and the trackers."""
        self.log_images({"generated": self.generate(10)})


class DigitScore(Metric):
    """The inception score, with a digit classifier instead of Inception.

    Source:
        Salimans et al. 2016, https://arxiv.org/abs/1606.03498, section 4
    """

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        super().__init__("digit_score")
        self.judge = LogisticRegression(max_iter=1000).fit(images.flatten(1).numpy(), labels.numpy())

    def compute(self, predictions: Tensor, references: Any) -> dict[str, float]:
        """Return the score of the generated images, and the classifier's mean confidence."""
        probabilities = torch.tensor(self.judge.predict_proba(predictions.flatten(1).numpy()))  # [images, 10]
        mean = probabilities.mean(0)
        divergence = (probabilities * (probabilities / mean).log()).nansum(1).mean()
        return {"digit_score": divergence.exp().item(), "confidence": probabilities.max(1).values.mean().item()}


def build_generator() -> nn.Module:
    """Return a network from noise `[images, NOISE]` to images."""
    first = nn.Linear(NOISE, 256), nn.BatchNorm1d(256), nn.ReLU()
    second = nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()
    return nn.Sequential(*first, *second, nn.Linear(256, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8)))


def build_discriminator() -> nn.Module:
    """Return a network that maps images to a number, higher for real images."""
    layers = [nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(256, 128), nn.LeakyReLU(0.2)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Dropout(0.3), nn.Linear(128, 1))


def save_grid(images: Tensor, path: Path) -> None:
    """Write images as a grid, ten per row, enlarged six times."""
    framed = pad(images, (1, 1, 1, 1), value=0.5)
    rows = framed.reshape(-1, 10, 10, 10).transpose(1, 2).reshape(-1, 100)
    picture = Image.fromarray((rows.cpu() * 255).byte().numpy())
    picture.resize((600, 6 * len(rows)), Image.Resampling.NEAREST).save(path)


def main() -> None:
    """Train, then generate images with the best generator."""
    parser = argparse.ArgumentParser(description="Train a GAN on digits.")
    parser.add_argument("--output", type=Path, default=Path("out/gan"), help="folder of the saved model")
    parser.add_argument("--limit", type=int, help="use so many images of each part, for a quick try")
    options = parser.parse_args()

    set_seed(SEED)  # the networks start with random weights
    train, validation = build_datasets(options.limit)
    module, digit_score = GAN(), DigitScore(*build_datasets()[0].tensors)
    trainer = Trainer(
        hps_config=HPS_PATH,
        model_path=options.output,
        model_saving="best_digit_score",
        metrics=[digit_score],
        evaluate_every_n_steps="20 epochs",
        seed=SEED,
    )
    trainer.fit(module, TensorDataset(train.tensors[0]), TensorDataset(validation.tensors[0]))
    if trainer.is_main:
        saved = read_status(options.output)["metrics"]
        real = digit_score.compute(validation.tensors[0], None)
        module.load_weights(options.output)
        module.model.eval()
        with torch.inference_mode():
            set_seed(SEED)
            save_grid(module.generate(40), options.output / "generated.png")
        print(f"digit score   {saved['digit_score']:.2f}; of real images {real['digit_score']:.2f}")
        print(f"confidence    {saved['confidence']:.1%}; of real images {real['confidence']:.1%}")
        print(f"images        {options.output / 'generated.png'}")
        print(f"model folder  {options.output}")


if __name__ == "__main__":
    main()
