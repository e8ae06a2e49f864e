"""The digits example with a fault: `soaked_digits.py '{"folder": ..., "act": ..., "moment": ..., ...}'`.

    folder      where the run lives; the same folder again continues it
    act         a signal's name, "kill worker", "raise", "exit", "memory", "nan", "full disk", "hang", or "none"
    moment      a hook, or seconds after the first training step
    number      which call of the hook
    process     which process acts
    workers     loader workers

It leaves a digest of its end in the file `result`, and the time at which the fault came in the file `acted`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import xxhash

from accmt import Callback, Trainer
from accmt.metrics import Accuracy
from accmt.processes import is_main_process, num_processes
from examples.digits import DigitClassifier, build_datasets

HPS = {
    "epochs": 3,
    "optim": {"type": "AdamW", "lr": 2e-3},
    "scheduler": {"type": "CosineAnnealingLR"},
}
GLOBAL_BATCH = 64
ROOM_BYTES = 20_000  # too little for any checkpoint


class Fault(Callback):
    """Acts on one process, at one call of a hook, or some time after the first training step."""

    def __init__(self, folder: str, act: str, moment: Any, number: int, process: int, **_: Any) -> None:
        self.folder = Path(folder)
        self.name = act
        self.left = number
        self.is_mine = act != "none" and process == int(os.environ.get("RANK", 0))
        self.makes_loss_nan = False
        self.timer: threading.Timer | None = None
        if isinstance(moment, str):
            setattr(self, moment, self.count)
        else:
            self.timer = threading.Timer(moment, self.act)
            self.on_before_training_step = self.begin

    def begin(self) -> None:
        assert self.timer is not None
        if self.is_mine and not self.timer.is_alive() and not self.timer.finished.is_set():
            self.timer.start()

    def on_fit_end(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0 and self.is_mine:
            self.act()

    def act(self) -> None:
        (self.folder / "acted").write_text(str(time.time()))
        match self.name:
            case "raise":
                raise ValueError("the fault of this test")
            case "exit":
                sys.exit(3)
            case "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "nan":
                self.makes_loss_nan = True
            case "hang":
                time.sleep(1000)
            case "full disk":
                fill_disk()
            case "kill worker":
                kill_worker(self.trainer)
            case _:
                os.kill(os.getpid(), getattr(signal, self.name))


def fill_disk() -> None:
    """Let no file grow any more, and end this process a second later."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, ROOM_BYTES))
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()


def kill_worker(trainer: Trainer) -> None:
    """Kill the first worker that loads training data."""
    os.kill(trainer.train_dataloader._iterator._workers[0].pid, signal.SIGKILL)


class Digits(DigitClassifier):
    """The example's module, whose loss a fault can spoil."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def training_step(self, batch: Any) -> Any:
        loss = super().training_step(batch)
        return loss * float("nan") if self.fault.makes_loss_nan else loss


def digest_of(trainer: Trainer, module: Digits) -> str:
    """Return a digest of weights, optimizer, counters and best values."""
    digest = xxhash.xxh3_64()
    optimizer = trainer.run.stepper.optimizer.state_dict()["state"].values()
    for tensor in [*module.model.state_dict().values(), *(value for state in optimizer for value in state.values())]:
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digest.update(repr((trainer.state.state_dict(), dict(trainer.state.best))).encode())
    return digest.hexdigest()


def main(part: dict[str, Any]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    folder, fault = part["folder"], Fault(**part)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    trainer = Trainer(
        {**HPS, "batch_size": GLOBAL_BATCH // processes},
        f"{folder}/model",
        logging_dir=f"{folder}/logs",
        run_name="soak",
        resume="auto",
        checkpoint_every="7 steps",
        checkpoint_options={"max_checkpoints": 2},
        evaluate_every_n_steps=16,
        grad_accumulation_steps=1,
        dataloader_num_workers=part["workers"],
        handlers="all",
        failures={"hang_timeout_s": 6.0},
        seed=1,
        log_every=5,
        metrics=[Accuracy()],
        model_saving="best_accuracy",
        enable_progress_bar=False,
        callbacks=fault,
    )
    module = Digits(fault)
    trainer.fit(module, *build_datasets())
    digest = digest_of(trainer, module)
    if is_main_process():
        (Path(folder) / "result").write_text(digest)
    if num_processes() > 1:
        torch.distributed.barrier()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
