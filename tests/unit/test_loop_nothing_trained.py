"""Runs that train nothing: a collate function without `return`, and windows that are all skipped."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from accmt import DataError, ModuleContractError
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


def collate(samples):
    default_collate(samples)


class Collate:
    def __call__(self, samples):
        collate(samples)


class WithCollate(Linear):
    def collate_fn(self, samples):
        collate(samples)


@pytest.mark.parametrize("val_data", [None, make_points(4)])
@pytest.mark.parametrize("function", [collate, Collate(), partial(collate), [default_collate, lambda batch: None]])
def test_a_collate_function_without_return_is_an_error(function, val_data):
    with raises_at(DataError, "a batch of the ", "the collate function", do="return the batch"):
        make_trainer(collate_fn=function).fit(Linear(), make_points(8), val_data)


def test_so_is_that_of_a_module_and_of_a_dataloader():
    with raises_at(DataError, "a batch of the training data", "the collate function"):
        make_trainer().fit(WithCollate(), make_points(8))
    with raises_at(DataError, "a batch of the training data", "the collate function"):
        make_trainer().fit(Linear(), DataLoader(make_points(8), 2, collate_fn=collate))


class WithoutLoss(Linear):
    def training_step(self, batch):
        if self.model is not None:
            return None
        return super().training_step(batch)


class WithoutWeight(Linear):
    def training_step(self, batch):
        return {"loss": super().training_step(batch), "weight": torch.tensor(0.0)}


@pytest.mark.parametrize("kind", [WithoutLoss, WithoutWeight])
def test_a_run_that_skipped_all_steps_is_an_error(kind):
    trainer = make_trainer({"epochs": 1, "batch_size": 2}, model_saving="last")
    with raises_at(ModuleContractError, "training"):
        trainer.fit(kind(), make_points(8))
    assert trainer.state.status == "failed"
    assert not trainer.settings.model_folder.exists()
