"""A run whose steps are replayed.

replayed_run.py <folder> <mode: "" or "bf16" or "tokens">
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Trainer

SCALE = 1.0


class Small(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 1))

    def step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return SCALE * nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def length_of(self, sample: tuple[torch.Tensor, torch.Tensor]) -> int:
        return 3 + int(1000 * sample[0].abs().sum()) % 5


def main(folder: str, mode: str = "", epochs: int = 2, *, resume: bool = False) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(40, 5, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    optimizer = {"type": "AdamW", "lr": 0.01}
    hps = {"epochs": epochs, "batch_size": 2, "optim": optimizer, "max_tokens": 8 if mode else None}
    trainer = Trainer(
        hps,
        f"{folder}/model",
        logging_dir=f"{folder}/logs",
        run_name="run",
        seed=3,
        verbose=False,
        checkpoint_every="3 steps",
        checkpoint_options={"max_checkpoints": 2},
        ledger=True,
        resume=resume,
        grad_accumulation_steps=2,
        mixed_precision="bf16" if mode == "bf16" else None,
    )
    trainer.fit(Small(), data, data)


if __name__ == "__main__":
    main(*sys.argv[1:])
