"""Checkpoints of a device: copied through pinned memory, with one wait, while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accmt import Callback
from accmt.checkpoint.contents import HostSnapshot
from tests.gpu.toys import AtStep, Classifier, InterruptionError, assert_same_bits, interrupt, make_data, train


def test_a_copy_holds_the_moment_of_the_take(device: torch.device) -> None:
    sources = {
        "weights": torch.randn(300, 300, device=device),
        "turned": torch.randn(20, 30, device=device).T,
        "half": torch.randn(50, device=device, dtype=torch.bfloat16),
        "count": torch.tensor(3.0),  # on the host, as torch.optim keeps it
        "flags": torch.tensor([True, False], device=device),
        "nothing": torch.zeros(0, 3, device=device),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in sources.items()}
    snapshot = HostSnapshot()
    snapshot.reserve(sources)
    reserved = {name: buffer.data_ptr() for name, buffer in snapshot._buffers.items()}
    copies = snapshot.take(sources)
    for tensor in sources.values():
        tensor.zero_()
    assert all(torch.equal(copies[name], expected[name]) for name in sources)
    assert {name: buffer.data_ptr() for name, buffer in copies.items()} == reserved
    assert all(copy.device.type == "cpu" and copy.is_contiguous() for copy in copies.values())
    on_device = [name for name, tensor in sources.items() if tensor.device.type == "cuda" and tensor.numel()]
    assert all(copies[name].is_pinned() for name in on_device)


def test_a_copy_waits_for_the_device_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []
    synchronize = torch.accelerator.synchronize
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda one: (waits.append(one), synchronize(one)))
    snapshot, sources = HostSnapshot(), {f"w{index}": torch.randn(1000, device=device) for index in range(50)}
    snapshot.reserve(sources)
    snapshot.take(sources)
    assert len(waits) == (device.type != "cpu")


@pytest.mark.cuda_only("the copies of a device are queued")
def test_the_copies_are_queued_while_the_device_still_works(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = {f"w{index}": torch.randn(1000, device=device) for index in range(50)}
    snapshot = HostSnapshot()
    snapshot.reserve(sources)
    at_wait: list[bool] = []
    is_done = torch.cuda.Event()
    synchronize = torch.accelerator.synchronize
    monkeypatch.setattr(
        torch.accelerator, "synchronize", lambda one: (at_wait.append(is_done.query()), synchronize(one))
    )
    torch.cuda._sleep(2 * 10**9)
    is_done.record()
    copies = snapshot.take(sources)
    assert at_wait == [False]
    assert all(torch.equal(copies[name], source.cpu()) for name, source in sources.items())


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("optim", ["AdamW", "SGD"])
def test_a_checkpoint_that_is_written_during_training_is_that_of_its_step(
    optim: str, is_async: bool, settings: dict[str, Any]
) -> None:
    others = {**settings, "checkpoint_every": "3 steps", "checkpoint_options": {"async_checkpointing": is_async}}
    hps = {"optim": {"type": optim, "lr": 1e-2}}
    unbroken = Classifier()
    train(unbroken, make_data(), others, folder="unbroken", hps=hps)
    with pytest.raises(InterruptionError):
        train(Classifier(), make_data(), others, folder="broken", hps=hps, callbacks=AtStep(17, interrupt))
    resumed, first = Classifier(), First()
    train(resumed, make_data(), others, folder="broken", hps=hps, resume=True, callbacks=first)
    assert first.step >= 15
    assert_same_bits(resumed, unbroken)


class First(Callback):
    """Keeps the step at which training began."""

    step = -1

    def on_fit_start(self) -> None:
        self.step = self.state.global_step


@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizer_has_its_state_where_its_kernels_want_it_after_a_resume(
    fused: bool, settings: dict[str, Any], device: torch.device
) -> None:
    others = {**settings, "checkpoint_every": "3 steps"}
    hps = {"optim": {"type": "AdamW", "lr": 1e-2, "fused": fused}}
    places = []

    class Look(Callback):
        def on_fit_start(self) -> None:
            places.extend(
                (name, value.device.type, value.dtype)
                for state in self.module.optimizer.state.values()
                for name, value in state.items()
            )

    with pytest.raises(InterruptionError):
        train(Classifier(), make_data(), others, hps=hps, callbacks=AtStep(7, interrupt))
    train(Classifier(), make_data(), others, hps=hps, resume=True, callbacks=Look())
    counts = device.type if fused else "cpu"
    assert set(places) == {
        ("step", counts, torch.float32),
        ("exp_avg", device.type, torch.float32),
        ("exp_avg_sq", device.type, torch.float32),
    }


def test_a_saved_model_loads_on_the_host(settings: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    module = Classifier()
    others = {**settings, "model_saving": "best_valid_loss", "metrics": ["accuracy"]}
    trainer = train(module, make_data(), others, val=make_data(24))
    saved = load_file(trainer.settings.model_folder / "model.safetensors")
    assert saved.keys() == module.model.state_dict().keys()
    assert all(tensor.device.type == "cpu" for tensor in saved.values())
    results = trainer.validate(Classifier(), make_data(24))
    assert results["val_loss"] > 0
