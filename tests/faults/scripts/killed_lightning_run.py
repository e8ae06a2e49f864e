"""The run of `killed_run.py` by Lightning, with checkpoints at a URL, for comparison."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import xxhash
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from tests.faults.scripts.killed_run import HPS, Noisy, build_model


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = build_model()

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, HPS["epochs"])]


class Announce(Callback):
    def on_train_start(self, *args: Any, **kwargs: Any) -> None:
        Path("started").write_text("training")

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        Path("step").write_text(str(trainer.global_step))


def main(_folder: str, workers: str, _is_async: str) -> None:
    lightning.seed_everything(1, workers=True)
    saving = ModelCheckpoint(
        f"{os.environ['ACCMT_TEST_STORE']}/{Path.cwd().name}", every_n_train_steps=1, save_top_k=1, save_last=True
    )
    trainer = lightning.Trainer(
        max_epochs=HPS["epochs"],
        accumulate_grad_batches=3,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, Announce()],
    )
    net, data = Net(), DataLoader(Noisy(), HPS["batch_size"], shuffle=True, num_workers=int(workers))
    trainer.fit(net, data, ckpt_path="last")
    digest = xxhash.xxh3_64(repr(trainer.global_step).encode())
    for tensor in net.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    Path("result").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
