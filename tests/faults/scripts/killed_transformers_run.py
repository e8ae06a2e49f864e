"""The run of `killed_run.py` by transformers' Trainer, continued as its documentation says, for comparison."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tests.faults.scripts.killed_run import HPS, SAMPLES, Noisy, Wide


class Samples(Noisy):
    """The samples as dicts, which transformers' Trainer wants."""

    def __getitem__(self, index: int) -> Any:
        inputs, targets = super().__getitem__(index)
        return {"inputs": inputs, "labels": targets}


class WithLoss(torch.nn.Module):
    """The network, and its loss in the form that transformers' Trainer wants."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Wide().model

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(inputs), labels)}


class Announce(TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        Path("started").write_text("training")


def main(folder: str, workers: str, _is_async: str) -> None:
    arguments = TrainingArguments(
        f"{folder}/checkpoint-model",
        num_train_epochs=HPS["epochs"],
        per_device_train_batch_size=HPS["batch_size"],
        gradient_accumulation_steps=3,
        learning_rate=1e-3,
        warmup_steps=4,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=5,
        dataloader_num_workers=int(workers),
        seed=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(WithLoss(), arguments, train_dataset=Samples(), callbacks=[Announce()])
    output = Path(arguments.output_dir)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
    digest = xxhash.xxh3_64(repr((trainer.state.global_step, SAMPLES)).encode())
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    Path("result").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
