"""Signals that arrive where much is still to be done, or twice: the run is left soon, and at a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from accmt import Callback
from accmt.errors import Preempted
from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer


class SignalIn(Scripted):
    """Gets a signal in the third batch of its first evaluation."""

    def validation_step(self, batch):
        loss = super().validation_step(batch)
        if len(self.validated) == 3:
            signal.raise_signal(signal.SIGTERM)
        return loss


def test_an_evaluation_is_given_up_when_a_signal_arrives() -> None:
    module = SignalIn()
    trainer = make_trainer(checkpoint_every="epoch", num_sanity_val_steps=0, evaluate_every_n_steps=2)
    with pytest.raises(Preempted):
        trainer.fit(module, Numbers(8), Numbers(100))
    assert len(module.validated) == 3
    assert trainer.state.global_step == 2


class CtrlC(Callback):
    """Sends Ctrl-C as often as told, at once, after the first backward."""

    def __init__(self, times):
        self.times = times

    def on_after_backward(self):
        for _ in range(self.times if self.state.global_step == 0 else 0):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_one_ctrl_c_that_a_launcher_sends_on_is_one(times: int) -> None:
    trainer = make_trainer(checkpoint_every="epoch", callbacks=CtrlC(times))
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Linear(), make_points())
    assert [folder.name for folder in Path("out/checkpoint-model").glob("step-*")] == ["step-00000001"]


INTERRUPTED = """
import os
import signal
import subprocess
import sys
import torch
from tests.toys import Linear, make_points, make_trainer

class Interrupted(Linear):
    def on_update_end(self):
        signal.raise_signal(signal.SIGINT)

torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # loads what torch prints statistics of at exit
make_trainer({"batch_size": 2}, "m").fit(Interrupted(), make_points(8))
"""


@pytest.mark.slow
def test_a_run_that_ctrl_c_ends_has_its_exit_code(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode in (-signal.SIGINT, 128 + signal.SIGINT), done.stderr
    assert "KeyboardInterrupt" in done.stderr
