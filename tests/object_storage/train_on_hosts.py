"""Trains on one of several hosts with separate disks: train_on_hosts.py FOLDER URL EPOCHS KILL_AT [KILL_IN].

RANK and the like from `tests.launching`. Each process is a host of its own. Its disk is FOLDER/disk-RANK, which it sees
at FOLDER/disk, where another host sees its own one. Without a URL, the hosts share a disk. Requests name their host.
With KILL_IN, host 1 is killed while it downloads a checkpoint ("download"), or when it would publish it ("publish").
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from accmt import Callback
from accmt.addons import remote_checkpoints
from accmt.addons.remote_checkpoints import RemoteFolder
from accmt.sharded_tensors import make_whole
from tests.disks import use_own_disk
from tests.toys import Linear, make_points, make_trainer

folder, url, epochs, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kill_in = "".join(sys.argv[5:])
rank = os.environ["RANK"]


class Watched(Callback):
    def on_resume(self):
        if self.trainer.is_main:
            (folder / "said").write_text(f"resumed at {self.state.global_step}")
        self.save("resumed.pt")

    def on_update_end(self):
        """Kill the hosts before a step is saved, once the step before has been uploaded."""
        if self.state.global_step != kill_at:
            return
        remote = RemoteFolder(url)
        while not any(one.manifest and one.manifest.step == kill_at - 1 for one in remote.newest_first()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self):
        self.save("weights.pt")

    def save(self, name):
        """Save weights and optimizer state."""
        states = self.trainer.run.stepper.optimizer.state_dict()["state"]
        tensors = {f"{index}.{name}": value for index, state in states.items() for name, value in state.items()}
        tensors |= {name.removeprefix("module."): one for name, one in self.trainer.model.state_dict().items()}
        whole = {name: make_whole(tensor) for name, tensor in tensors.items()}
        if self.trainer.is_main:
            torch.save(whole, folder / name)


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    os.environ["GROUP_RANK"] = rank
    os.environ["AWS_SDK_UA_APP_ID"] = f"host-{rank}"
    if rank == "1" and kill_in == "download":
        remote_checkpoints.fsync_file = die
    if rank == "1" and kill_in == "publish":
        remote_checkpoints.publish = die
    if url:
        use_own_disk(folder / "disk", folder / f"disk-{rank}")
    os.chdir(folder / "disk")
    settings = {"checkpoint": url, "checkpoint_every": "1 step", "resume": "auto"} if url else {}
    settings |= {"checkpoint_options": {"max_checkpoints": 2}}
    trainer = make_trainer(
        {"epochs": epochs, "batch_size": 2, "optim": {"type": "AdamW", "lr": 0.1}},
        f"{url}-models" if url else "out/model",
        model_saving="last",
        seed=0,
        callbacks=Watched(),
        **settings,
    )
    trainer.fit(Linear(), make_points())
