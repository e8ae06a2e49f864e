"""The run of `killed_run.py` by transformers' Trainer, continued as its documentation says, for comparison.

With ACCMT_TEST_HUB, checkpoints are pushed to a repository of the Hub, and a run on an empty disk begins with the last.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import xxhash
from huggingface_hub import HfFileSystem
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
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

    def on_step_end(self, _: Any, state: TrainerState, *args: Any, **kwargs: Any) -> None:
        Path("step").write_text(str(state.global_step))


def download(repository: str, folder: Path) -> Path | None:
    """Download the last checkpoint of a repository; None where there is none."""
    files = HfFileSystem()
    try:
        found = files.find(f"{repository}/last-checkpoint")
    except FileNotFoundError:
        return None
    for file in found:
        target = folder / "last-checkpoint" / Path(file).name
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(file, str(target))
    return folder / "last-checkpoint" if found else None


def main(folder: str, workers: str, _is_async: str) -> None:
    repository = os.environ.get("ACCMT_TEST_HUB")
    pushing = {"push_to_hub": True, "hub_model_id": repository, "hub_strategy": "checkpoint", "hub_token": "hf_token"}
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
        **(pushing if repository else {}),
    )
    trainer = Trainer(WithLoss(), arguments, train_dataset=Samples(), callbacks=[Announce()])
    output = Path(arguments.output_dir)
    last = get_last_checkpoint(output) if output.is_dir() else None
    if repository and last is None:
        last = download(repository, Path("downloaded"))  # in the output folder, it would be pushed again
    trainer.train(resume_from_checkpoint=last)
    digest = xxhash.xxh3_64(repr((trainer.state.global_step, SAMPLES)).encode())
    for tensor in trainer.model.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    Path("result").write_text(digest.hexdigest())


if __name__ == "__main__":
    main(*sys.argv[1:])
