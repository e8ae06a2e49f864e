"""The Accelerator of a run: which device it takes."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from accmt import create_optimizer
from accmt.engine.accelerator import current_accelerator
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
    monkeypatch.setattr("accmt.engine.accelerator._DRIVER", driver)
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


def train_in(precision, **settings):
    torch.manual_seed(0)
    module = Linear()
    make_trainer({"epochs": 1, "batch_size": 4}, mixed_precision=precision, **settings).fit(module, make_points())
    return module.model.weight.detach().clone()


def test_each_run_of_a_program_has_its_own_precision():
    full = train_in("no")
    half = train_in("bf16")
    assert not torch.equal(full, half)
    for precision, weight in ((None, full), ("bf16", half), (None, full), ("no", full), ("bf16", half)):
        assert torch.equal(train_in(precision), weight)


def test_an_accelerator_of_the_program_keeps_its_precision():
    half = train_in("bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    own = Accelerator(cpu=True, mixed_precision="bf16")
    for _ in range(2):
        assert torch.equal(train_in(None, accelerator=own), half)
        assert torch.equal(train_in(None), half)
    AcceleratorState._reset_state(reset_partial_state=True)
    full = train_in(None)
    later = Accelerator(cpu=True)
    train_in("bf16")
    assert later.mixed_precision == "no"
    assert torch.equal(train_in(None, accelerator=later), full)
