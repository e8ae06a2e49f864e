"""The Accelerator of a run: which device it takes."""

from __future__ import annotations

import pytest
import torch
from accelerate.state import AcceleratorState

from accmt import create_optimizer
from accmt.setup.accelerator import current_accelerator
from tests.toys import Linear, make_points, make_trainer


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is used")
@pytest.mark.parametrize(
    ("cuda", "settings", "said"),
    [
        (None, {}, "this torch is built without CUDA"),
        ("13.0", {}, "update the driver"),
        (None, {"accelerator": {"cpu": True}}, ""),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_named_unless_the_cpu_was_asked_for(
    cuda, settings, said, monkeypatch, caplog, tmp_path
):
    for name in (
        "ACCELERATE_USE_CPU",
        "CUDA_VISIBLE_DEVICES",
    ):  # which Accelerate sets, too, when a run asks for the CPU
        monkeypatch.delenv(name, raising=False)
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr("accmt.setup.accelerator._DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    make_trainer(**settings, verbose=True).fit(Linear(), make_points())
    assert ("the machine has an NVIDIA GPU" in caplog.text) == bool(said)
    assert said in caplog.text


def test_an_optimizer_is_made_after_a_run_whose_state_was_reset():
    trainer = make_trainer()
    trainer.fit(Linear(), make_points())
    kept = trainer.run.accelerator
    AcceleratorState._reset_state(reset_partial_state=True)
    assert current_accelerator() is None
    assert kept is not None
    assert create_optimizer(torch.nn.Linear(1, 1), "AdamW", lr=1e-3).param_groups[0]["lr"] == 1e-3
