"""What happens when a device runs out of memory, and that a long run takes no more of it than a short one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from accmt import AcceleratorModule, Callback, Trainer
from tests.gpu.toys import Classifier, make_data, train

MB = 2**20
WIDTH = 2**19  # floats of a sample, 2 MB, of which the backward pass keeps several
LIMIT = 512 * MB
HPS: dict[str, Any] = {"epochs": 1, "batch_size": 128, "optim": {"type": "AdamW", "lr": 1e-3}, "scheduler": None}


class LargestBatch:
    """No state of the run: a number in an attribute would be that before the step that failed."""

    size = 0


class Hungry(AcceleratorModule):
    """Takes some MB of the device for each sample; on a CPU it says that memory ran out instead.

    Args:
        fits: Samples that fit, on a CPU.
    """

    def __init__(self, fits: int, first_batch: int = 0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.fits = fits
        self.first_batch = first_batch
        self.largest = LargestBatch()

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        self.largest.size = max(self.largest.size, len(inputs))
        outputs = self.model(inputs)
        if self.state.batch_iteration >= self.first_batch:
            outputs = self._take_memory(outputs)
        return nn.functional.mse_loss(outputs, targets)

    def _take_memory(self, outputs: torch.Tensor) -> torch.Tensor:
        if outputs.device.type == "cuda":
            wide = outputs.expand(-1, WIDTH).sin().cos()  # each keeps its input for the backward pass
            return outputs + 0 * wide.mean(1, keepdim=True)
        if len(outputs) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return outputs


def make_points(count: int) -> TensorDataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


@pytest.mark.parametrize("first_batch", [0, 3])
def test_a_run_continues_with_smaller_micro_batches_to_the_same_weights(
    first_batch: int, settings: dict[str, Any], limited_memory: Any
) -> None:
    module = Hungry(32, first_batch)
    with limited_memory(LIMIT):
        trainer = train(module, make_points(700), settings, folder="auto", hps={**HPS, "max_micro_batch_size": "auto"})
    found = trainer.train_step_batch_size
    assert found < 128
    assert trainer.state.samples_seen == 700
    assert trainer.state.global_step == 6
    assert module.largest.size == 128
    reference = Hungry(10**6)
    train(reference, make_points(700), settings, folder="fixed", hps={**HPS, "max_micro_batch_size": found})
    for mine, theirs in zip(module.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_without_it_memory_that_runs_out_is_an_error_and_the_next_run_has_it_all(
    settings: dict[str, Any], limited_memory: Any
) -> None:
    with limited_memory(LIMIT):
        with pytest.raises(torch.OutOfMemoryError):
            train(Hungry(32), make_points(256), settings, hps=HPS)
        gc.collect()
        assert train(Hungry(32), make_points(256), settings, hps={**HPS, "batch_size": 16}).state.finished


def test_tune_finds_the_largest_batch_that_fits(settings: dict[str, Any], limited_memory: Any) -> None:
    with limited_memory(LIMIT):
        trainer = Trainer({**HPS, "batch_size": 16}, "run/model", **settings)
        size = trainer.tune(Hungry(45), make_points(2000), batch_size="binsearch").batch_size
        assert size is not None
        assert 16 < size < 128
        assert train(Hungry(45), make_points(size), settings, hps={**HPS, "batch_size": size}).state.finished
        with pytest.raises(torch.OutOfMemoryError):
            train(Hungry(45), make_points(2 * size), settings, hps={**HPS, "batch_size": size + size // 8 + 2})


class Held(Callback):
    """Keeps how much memory is in use at each row of the log."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def on_log(self) -> None:
        gc.collect()
        if self.module.device.type == "cuda":
            self.held.append(torch.cuda.memory_allocated())
        else:
            self.held.append(sum(isinstance(item, torch.Tensor) for item in gc.get_objects()))


@pytest.mark.parametrize("weighs", [None, "device"])
def test_memory_does_not_grow_over_5000_steps(
    weighs: str | None, settings: dict[str, Any], device: torch.device
) -> None:
    held, num_steps = Held(), 5000 if device.type == "cuda" else 400
    hps = {"epochs": 1, "batch_size": 2, "scheduler": None}
    train(Classifier(weighs), make_data(2 * num_steps), settings, hps=hps, log_every=num_steps // 10, callbacks=held)
    assert len(held.held) == 10
    assert max(held.held[1:]) - held.held[1] <= (16 * 1024 if device.type == "cuda" else 8)


def test_a_continued_run_holds_the_state_of_one_optimizer(
    settings: dict[str, Any], device: torch.device, limited_memory: Any
) -> None:
    alive: list[int] = []

    class Look(Callback):
        def on_fit_start(self) -> None:
            alive.append(torch.cuda.memory_allocated() if device.type == "cuda" else _num_of_size(2048 * 2048))

    module = Hungry(32, first_batch=3)
    module.model = nn.Sequential(nn.Linear(8, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 1))
    with limited_memory(LIMIT):
        train(module, make_points(700), settings, hps={**HPS, "max_micro_batch_size": "auto"}, callbacks=Look())
    if device.type != "cuda":
        assert alive == [1, 3, 3], "the weight; then, after each of the restarts, with its two averages"
    else:
        assert len(alive) >= 2
        assert alive[-1] - alive[0] <= 2.2 * 2048 * 2048 * 4


def _num_of_size(numel: int) -> int:
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.numel() == numel]
    return len({tensor.data_ptr() for tensor in tensors})
