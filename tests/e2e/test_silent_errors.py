"""Silent errors of other projects, written against accmt: what docs/find-out-what-happened.md says of each."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from accmt import ExtendedAcceleratorModule
from accmt.errors import DataError, ModuleContractError
from tests.raising import raises_at
from tests.toys import Linear, Record, make_points, make_trainer


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_model_without_trained_parameters_is_refused() -> None:  # pytorch-forum-84911
    module = Linear()
    module.model.requires_grad_(requires_grad=False)
    with raises_at(ModuleContractError, "Linear", "no parameter"):
        make_trainer().fit(module, make_points())


class Forgets(ExtendedAcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step_optimizer()
        return loss


def test_a_missing_zero_grad_is_named(caplog: pytest.LogCaptureFixture) -> None:  # stackoverflow-60335387
    with caplog.at_level(logging.WARNING, "accmt"):
        make_trainer().fit(Forgets(), make_points())
    assert "backward adds to gradients that were already used" in caplog.text


class DrawsWithNumpy(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(np.random.rand(3)).float(), torch.zeros(1)  # noqa: NPY002 - as a user draws


class Watches(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = Record()

    def training_step(self, batch: Any) -> torch.Tensor:
        self.seen += batch[0][:, 0].tolist()
        return self.step(batch)


def test_loader_workers_draw_different_numbers() -> None:  # stackoverflow-67180955
    module = Watches()
    make_trainer({"epochs": 2}, dataloader_num_workers=2).fit(module, DrawsWithNumpy())
    assert len(set(module.seen)) == len(module.seen) == 32


def keep_one_row(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {"inputs": samples[0][0][None], "targets": torch.stack([sample[1] for sample in samples])}


class OneRow(Linear):
    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.model(batch["inputs"]) - batch["targets"]).square().mean()


def test_a_batch_of_other_sizes_is_an_error() -> None:  # transformers-34204
    with raises_at(DataError, "the number of samples in a batch", "1, in a batch of 2"):
        make_trainer(collate_fn=keep_one_row).fit(OneRow(), make_points())


class SpectralNorm(Linear):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1))


def test_a_validation_before_the_first_step_changes_no_weight_under_spectral_norm() -> None:  # pytorch-51800
    modules = [SpectralNorm(), SpectralNorm()]
    for module, steps in zip(modules, (0, 2), strict=True):
        make_trainer(num_sanity_val_steps=steps).fit(module, make_points(), make_points(6))
    assert all(torch.equal(*both) for both in zip(*(module.model.parameters() for module in modules), strict=True))


def test_only_training_iterates_the_power_method_of_a_parametrized_layer() -> None:
    module = SpectralNorm()
    torch.manual_seed(0)
    module.model[0] = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    by_hand = copy.deepcopy(module.model)
    points, optimizer = make_points(8), torch.optim.SGD(by_hand.parameters(), lr=0.1)
    hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}, "scheduler": None}
    make_trainer(hps, shuffle_train=False).fit(module, points, make_points(6))
    for begin in (0, 4):
        inputs, targets = torch.utils.data.default_collate([points[index] for index in range(begin, begin + 4)])
        optimizer.zero_grad()
        mse_loss(by_hand(inputs), targets).backward()
        optimizer.step()
    torch.testing.assert_close(module.model.state_dict(), by_hand.state_dict(), rtol=0, atol=0)


class GoesAroundTheWrapper(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.nets = [self.model]

    def step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.nets[0](batch[0]), batch[1])


@pytest.mark.slow
def test_a_model_that_is_not_called_through_its_wrapper_is_refused() -> None:  # x-jxmnop-ddp-out-of-sync
    proof = make_trainer({"batch_size": 8}).prove(GoesAroundTheWrapper(), make_points(32), steps=2, samples=16)
    assert [row.name for row in proof.rows if not row.is_right] == ["2 processes"]
    assert "the gradients of the processes would not be averaged" in str(proof)
