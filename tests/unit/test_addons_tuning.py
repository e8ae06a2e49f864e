"""Batch size and learning rate, found before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule
from accmt.addons.tuning import find_batch_size, suggest_rate
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import Linear, Recorder, make_points, make_trainer


class Hungry(AcceleratorModule):
    """Runs out of memory with more samples than fit."""

    def __init__(self, fits: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.fits = fits

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        if len(inputs) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return nn.functional.mse_loss(self.model(inputs), targets)


@pytest.mark.parametrize("fits", [1, 2, 3, 6, 7, 8, 9, 31, 32, 40, 999])
@pytest.mark.parametrize("start", [1, 6, 8, 64])
def test_the_search_finds_the_largest_or_a_power_of_two_of_the_first(fits: int, start: int) -> None:
    limit = 40
    tried: list[int] = []

    def try_size(size: int) -> bool:
        tried.append(size)
        return size <= fits

    largest = find_batch_size(try_size, start, limit, "binsearch")
    assert largest == min(fits, limit)
    assert len(tried) == len(set(tried)), "no size is tried twice"
    power = find_batch_size(lambda size: size <= fits, start, limit, "power")
    assert power <= min(fits, limit) <= 2 * power


@pytest.mark.parametrize(("search", "expected"), [("power", 4), ("binsearch", 6)])
def test_a_batch_size_that_fits_is_put_into_the_hyper_parameters(search: Any, expected: int, tmp_path: Path) -> None:
    module, recorder = Hungry(6), Recorder()
    trainer = make_trainer({"batch_size": [2, 3]}, str(tmp_path / "model"), callbacks=recorder)
    before = [parameter.detach().clone() for parameter in module.model.parameters()]
    random_before = torch.get_rng_state()
    found = trainer.tune(module, make_points(64), batch_size=search)
    assert found.batch_size == trainer.hps.train_batch_size == expected
    assert trainer.hps.val_batch_size == 3
    assert all(map(torch.equal, before, module.model.parameters()))
    assert torch.equal(random_before, torch.get_rng_state())
    assert recorder.calls == []
    assert not list(tmp_path.iterdir()), "nothing is left on the disk"
    assert trainer.fit(module, make_points(64)).finished


def test_a_size_that_does_not_fit_is_not_tried_in_smaller_parts(tmp_path: Path) -> None:
    """Batch norm trains on no single sample, which a part of 7 would come to."""

    sizes = set()  # not an attribute, which a step that fails leaves as it was before

    class Normed(Hungry):
        def __init__(self) -> None:
            super().__init__(6)
            self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

        def training_step(self, batch: Any) -> torch.Tensor:
            sizes.add(len(batch[0]))
            return super().training_step(batch)

    module = Normed()
    trainer = make_trainer({"batch_size": 4}, str(tmp_path / "model"))
    assert trainer.tune(module, make_points(64), batch_size="binsearch").batch_size == 6
    assert sizes == {4, 8, 6, 7}


def test_a_single_sample_that_does_not_fit_is_told(tmp_path: Path) -> None:
    with raises_at(ArgumentError, "Trainer.tune(batch_size=...)"):
        make_trainer({}, str(tmp_path / "model")).tune(Hungry(0), make_points(8), batch_size="power")


def test_no_batch_is_larger_than_the_data(tmp_path: Path) -> None:
    found = make_trainer({}, str(tmp_path / "model")).tune(Hungry(999), make_points(22), batch_size="binsearch")
    assert found.batch_size == 22


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "tests.low_bit.TensorRates"])
def test_the_learning_rate_lies_where_the_loss_falls_fastest(optimizer: str, tmp_path: Path) -> None:
    module = Linear()
    hps = {"optim": {"type": optimizer, "lr": 1e-9}, "scheduler": "CosineAnnealingLR", "batch_size": 16}
    trainer = make_trainer(hps, str(tmp_path / "model"))
    before = [parameter.detach().clone() for parameter in module.model.parameters()]
    found = trainer.tune(module, make_points(256), lr=True)
    rates = [rate for rate, _ in found.curve]
    assert rates == sorted(rates)
    assert found.lr is not None
    assert 1e-3 < found.lr < 1.0
    assert trainer.hps.optim_kwargs["lr"] == found.lr
    assert all(map(torch.equal, before, module.model.parameters()))
    assert trainer.hps.scheduler == "CosineAnnealingLR"
    trainer.fit(module, make_points(256))
    fitted = nn.functional.mse_loss(module.model(make_points(256).tensors[0]), make_points(256).tensors[1])
    assert fitted < found.curve[0][1]


def test_the_suggestion_is_the_steepest_place_of_the_curve() -> None:
    rates = torch.logspace(-5, 0, 100).tolist()
    losses = [2.0 - torch.sigmoid(torch.tensor((number - 60) / 3)).item() for number in range(100)]
    lr = suggest_rate(list(zip(rates, losses, strict=True)))
    assert lr is not None
    assert rates[57] <= lr <= rates[63]
    assert suggest_rate([(rate, rate) for rate in rates]) is None
    assert suggest_rate([]) is None


def test_a_diverging_loss_ends_the_search(tmp_path: Path) -> None:
    trainer = make_trainer({"batch_size": 16}, str(tmp_path / "model"))
    found = trainer.tune(Linear(), make_points(64), lr=True, highest_lr=1e6)
    assert len(found.curve) < 100
    assert all(torch.isfinite(torch.tensor(loss)) for _, loss in found.curve)


@pytest.mark.parametrize("mode", [True, False])
def test_the_model_is_in_the_mode_that_it_was_in(mode: bool) -> None:
    module = Linear()
    module.model.train(mode)
    make_trainer().tune(module, make_points(), lr=True)
    assert module.model.training is mode


def test_a_wrong_search_is_refused(tmp_path: Path) -> None:
    with raises_at(ArgumentError, "Trainer.tune(batch_size=...)"):
        make_trainer({}, str(tmp_path / "model")).tune(Linear(), make_points(), batch_size="best")  # type: ignore[arg-type]


def test_a_batch_size_is_not_looked_for_where_documents_are_packed(tmp_path: Path) -> None:
    trainer = make_trainer({"packing": True, "max_tokens": 64}, str(tmp_path / "model"))
    with raises_at(ArgumentError, "Trainer.tune(batch_size=...)"):
        trainer.tune(Linear(), make_points(), batch_size="power")
