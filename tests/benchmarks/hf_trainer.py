"""The transformers Trainer as a contestant of the benchmark."""

from __future__ import annotations

import gc
import tempfile
import time

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments


class WithLoss(nn.Module):
    """A network that returns its loss, as the transformers Trainer wants it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the mean loss of the batch."""
        return {"loss": functional.cross_entropy(self.network(inputs), labels)}


class EpochTimer(TrainerCallback):
    """Keeps the seconds of the last epoch."""

    def on_epoch_begin(self, args: TrainingArguments, state: object, control: object, **others: object) -> None:
        """Start the clock."""
        gc.collect()
        self.start = time.perf_counter()

    def on_epoch_end(self, args: TrainingArguments, state: object, control: object, **others: object) -> None:
        """Stop the clock."""
        self.seconds = time.perf_counter() - self.start


def time_trainer(
    network: nn.Module, train: list[tuple[Tensor, Tensor]], *, batch_size: int, lr: float, optim: str
) -> float:
    """Return the seconds of the second epoch, without logging, saving, clipping or a bar.

    Args:
        network: The network.
        train: Samples.
        batch_size: Samples of a batch.
        lr: The learning rate.
        optim: "adamw_torch" or "adamw_torch_fused".
    """
    timer = EpochTimer()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=batch_size,
            learning_rate=lr,
            lr_scheduler_type="constant",
            optim=optim,
            max_grad_norm=0.0,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        samples = [{"inputs": inputs, "labels": labels} for inputs, labels in train]
        trainer = Trainer(WithLoss(network), arguments, train_dataset=samples, callbacks=[timer])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    torch.set_num_threads(1)
    return timer.seconds
