"""Runs that are ended before their time in many ways, and continued; writes how each part ended.

torchrun --nproc-per-node 2 failures.py RESULT.json '[PART, ...]', each part a dict:

    folder      where the run lives; a part with the folder of an earlier one continues its run
    process     which process acts
    moment      a hook, or seconds after the first training step
    number      which call of the hook
    act         "SIGTERM", "SIGINT", "SIGUSR1", "raise", "memory", "exit", "SIGKILL", "hang", or "none"
    settings    of the Trainer
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from accmt import Callback
from accmt.errors import Preempted
from accmt.processes import is_main_process, process_index
from tests.resume.unbroken import Augmented, Fragile, make

SETTINGS = {"checkpoint_every": "100 epochs", "evaluate_every_n_steps": 3, "grad_accumulation_steps": 2}


class Fault(Callback):
    """Acts on one process, at one call of a hook, or some time after training began."""

    def __init__(
        self, act: str, folder: str, moment: Any = "on_fit_start", process: int = 0, number: int = 1, **_: Any
    ) -> None:
        self.folder = Path(folder)
        self.name = act
        self.left = number
        self.is_mine = act != "none" and process == int(os.environ.get("RANK", 0))
        if isinstance(moment, str):
            setattr(self, moment, self.count)
        else:
            self.timer = threading.Timer(moment, self.act)
            self.on_before_training_step = self.begin

    def begin(self) -> None:
        if self.is_mine and not self.timer.is_alive() and not self.timer.finished.is_set():
            self.timer.start()

    def on_fit_end(self) -> None:
        if hasattr(self, "timer"):
            self.timer.cancel()

    def count(self) -> None:
        self.left -= 1
        if self.left == 0 and self.is_mine:
            self.act()

    def act(self) -> None:
        (self.folder / "acted").write_text(str(time.time()))
        if self.name == "raise":
            raise ValueError("the fault of this test")
        if self.name == "memory":
            raise torch.OutOfMemoryError("the fault of this test")
        if self.name == "exit":
            sys.exit(0)
        if self.name == "hang":
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, self.name))


class Slow(Augmented):
    """Takes a while for each sample, so that a moment drawn at random falls into something."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return super().__getitem__(index)


def run(part: dict[str, Any]) -> dict[str, Any]:
    trainer = make(
        f"{part['folder']}/model",
        logging_dir=f"{part['folder']}/logs",
        resume="auto",
        callbacks=[Fault(**part)],
        **{**SETTINGS, **part.get("settings", {})},
    )
    module, ended, began = Fragile(), "finished", time.monotonic()
    try:
        trainer.fit(module, Slow(), Slow(9))
    except (Preempted, KeyboardInterrupt) as error:
        ended = type(error).__name__
    weights = xxhash.xxh3_64()
    for tensor in module.unwrapped_model.state_dict().values():
        weights.update(tensor.contiguous().numpy().data)
    return {
        "ended": ended,
        "status": trainer.state.status,
        "seconds": time.monotonic() - began,
        "counters": trainer.state.state_dict(),
        "weights": weights.hexdigest(),
        "best": dict(trainer.state.best),
    }


def main(result: str, parts: str) -> None:
    torch.set_num_threads(1)
    outcomes = [run(part) for part in json.loads(parts)]
    Path(f"{result}.{process_index()}").write_text(json.dumps(outcomes))
    if dist.is_initialized():
        dist.barrier()
    if is_main_process():
        Path(result).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
