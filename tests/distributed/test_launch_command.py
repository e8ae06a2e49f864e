"""`accmt launch` on two processes: they train together, and how they end is how the command ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from safetensors import safe_open

from accmt.cli.main import main
from tests.launching import ROOT

ACCMT = [sys.executable, "-c", "import sys; from accmt.cli.main import main; sys.exit(main())"]

TRAIN = """
import os
import torch
from accmt.errors import ArgumentError
from tests.toys import Linear, make_points, make_trainer

class Worse(Linear):
    def validation_step(self, batch):
        return torch.tensor(1.0 + self.state.evaluations_done)

best = make_trainer({"epochs": 2}, model_path="out/best", model_saving="best_valid_loss")
best.fit(Worse(), make_points(8), make_points(4))
try:
    best.save_model()
except ArgumentError:
    open("spared-" + os.environ["RANK"], "w").close()
trainer = make_trainer(model_path="out/model", checkpoint_every="epoch")
state = trainer.fit(Linear(), make_points(8))
trainer.save_model("saved")
if trainer.is_main:
    with open("trained", "w") as file:
        file.write(f"{state.num_processes} {trainer.device.type} {state.global_step}")
trainer.close()
try:
    make_trainer().fit(Linear(), make_points(2))
except ArgumentError as error:
    if trainer.is_main:
        with open("refused", "w") as file:
            file.write(str(error))
os._exit(3 if trainer.is_main else 0)
"""

WAIT = """
import os, signal, time
def leave(*_):
    open("told-" + os.environ["RANK"], "w").close()
    os._exit(143)
signal.signal(signal.SIGTERM, leave)
open("ready-" + os.environ["RANK"], "w").close()
time.sleep(60)
"""


def start(script, tmp_path):
    (tmp_path / "train.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*ACCMT, "launch", "--cpu", "-N", "2", "train.py"]
    return subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)


def contents(path):
    """Texts and bytes of a file of weights; not the file, whose texts safetensors writes in any order."""
    with safe_open(path, "pt") as file:
        return file.metadata(), {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.slow
def test_processes_train_together_their_checkpoint_is_had_and_the_exit_code_is_that_of_the_one_that_failed(tmp_path):
    run = start(TRAIN, tmp_path)
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 3, errors[-2000:]
    assert (tmp_path / "trained").read_text() == "2 cpu 2"
    assert all((tmp_path / f"spared-{rank}").exists() for rank in range(2))
    assert "a launched program that has left its process group" in (tmp_path / "refused").read_text()
    assert main(["get", str(tmp_path / "out" / "checkpoint-model"), str(tmp_path / "got")]) == 0
    saved, got = (tmp_path / folder / "model.safetensors" for folder in ("saved", "got"))
    assert contents(got) == contents(saved)


def test_a_signal_reaches_every_process(tmp_path):
    run = start(WAIT, tmp_path)
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
    until = time.monotonic() + 60
    while not all(path.exists() for path in ready) and time.monotonic() < until:
        time.sleep(0.05)
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM
    assert all((tmp_path / f"told-{rank}").exists() for rank in range(2))


def test_the_exit_code_of_a_process_that_was_killed_is_that_of_a_shell(tmp_path):
    run = start("import os; os.kill(os.getpid(), 9)", tmp_path)
    run.communicate(timeout=60)
    assert run.returncode == 128 + 9
