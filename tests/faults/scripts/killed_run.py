"""A run whose checkpoints are large enough to be killed inside.

    killed_run.py <folder> <workers> <async: 0 or 1> [<max_tokens>]

It says "training" in the file `started` when it begins, leaves the number of each step in the file `step`, and a digest
of its end in the file `result`.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import Dataset

from accmt import AcceleratorModule, Callback, Trainer
from accmt.processes import is_main_process
from accmt.sharded_tensors import make_whole
from tests.disks import use_own_disk
from tests.splitting import is_split, split

WIDTH = int(os.environ.get("ACCMT_TEST_WIDTH", "2560"))  # of 2560, a checkpoint has 79 MB with AdamW's state
SAMPLES = 120
SAMPLE_S = float(os.environ.get("ACCMT_TEST_SAMPLE_S", "0"))
"""How long it takes to read a sample, so that steps take time, too."""

HPS = {
    "epochs": 2,
    "batch_size": 2,
    "optim": {"type": "AdamW", "lr": 1e-3},
    "scheduler": {"type": "CosineAnnealingLR"},
}


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SAMPLE_S)
        noise = float(np.random.rand()) + random.random()  # noqa: NPY002 - as users do
        inputs = torch.full((WIDTH,), index / SAMPLES) + noise * torch.rand(WIDTH)
        return inputs, inputs[:1]

    def __len__(self) -> int:
        return SAMPLES


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 1))


class Wide(AcceleratorModule):
    def __init__(self) -> None:
        if not is_split():
            self.model = build_model()

    def configure_model(self) -> None:
        styles = {"0": ColwiseParallel(output_layouts=Replicate()), "3": RowwiseParallel(input_layouts=Replicate())}
        self.model = split(build_model(), styles)

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def length_of(self, sample: Any) -> int:
        """Return 3 or 4, so that a step of 6 samples is cut in two by 12 tokens, never leaving one sample alone."""
        return 3 + int(1000 * sample[0].sum()) % 2


class Announce(Callback):
    def on_fit_start(self) -> None:
        Path("started").write_text("training")

    def on_update_end(self) -> None:
        Path("step").write_text(str(self.state.global_step))


def main(folder: str, workers: str, is_async: str, max_tokens: str | None = None) -> None:
    train(Wide(), Noisy(), HPS | {"max_tokens": max_tokens}, folder, workers, is_async)


def train(
    module: AcceleratorModule, data: Any, hps: dict[str, Any], folder: str, workers: str, is_async: str, **settings: Any
) -> None:
    store = os.environ.get("ACCMT_TEST_STORE")
    url, model_path = f"{store}/{Path.cwd().name}", f"{folder}/model"
    if "ACCMT_TEST_DISKS" in os.environ:  # each process is on a machine of its own
        os.environ["GROUP_RANK"] = rank = os.environ["RANK"]
        own = Path(f"disk-{rank}").absolute()
        own.mkdir(exist_ok=True)
        Path("out").mkdir(exist_ok=True)
        use_own_disk(Path("out").absolute(), own)
        model_path = f"{url}-models/model"
    trainer = Trainer(
        hps,
        model_path,
        checkpoint=url if store else None,
        resume="auto",
        checkpoint_every="step",
        checkpoint_options={"max_checkpoints": 2, "async_checkpointing": bool(int(is_async))},
        grad_accumulation_steps=3,
        dataloader_num_workers=int(workers),
        seed=1,
        log_every=5,
        model_saving=None,
        enable_progress_bar=False,
        logging_dir=f"{folder}/logs",
        callbacks=Announce(),
        **settings,
    )
    trainer.fit(module, data)
    digest = xxhash.xxh3_64()
    optimizer = trainer.run.stepper.optimizer.state_dict()["state"].values()
    for tensor in [*module.model.state_dict().values(), *(value for state in optimizer for value in state.values())]:
        digest.update(make_whole(tensor).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update(repr(trainer.state.state_dict()).encode())
    if is_main_process():
        Path("result").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
