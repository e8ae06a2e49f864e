"""The stages of checks: what is reported together, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from torch.utils.data import DataLoader

from accmt import AcceleratorModule
from accmt.errors import AccmtError, ArgumentError, CombinedError, DataError, ModuleContractError
from tests.raising import raises_at
from tests.toys import make_points, make_trainer


class WithoutStep(AcceleratorModule):
    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)


class WithoutValidation(AcceleratorModule):
    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)

    def training_step(self, batch):
        return self.model(batch[0]).mean()


def test_mistakes_of_module_data_and_saving_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file in the place of the model folder")
    trainer = make_trainer(model_path=tmp_path / "model", model_saving="always", sampler=[0, 1])
    with pytest.raises(CombinedError) as raised:
        trainer.fit(WithoutStep(), DataLoader(make_points(), 2))
    places = [fault.where for fault in raised.value.faults]
    assert places[:2] == ["WithoutStep", "Trainer(sampler=...)"]
    assert places[2].startswith("Trainer(model_path=")
    assert all(all(fault) for fault in raised.value.faults)


def test_an_error_that_is_alone_keeps_its_class(tmp_path: Path) -> None:
    with pytest.raises(ModuleContractError) as raised:
        make_trainer(model_path=tmp_path / "model").fit(WithoutValidation(), make_points(), make_points())
    assert type(raised.value) is ModuleContractError
    with pytest.raises(ArgumentError) as refused:
        make_trainer(model_path=tmp_path / "model", metrics={"a": ["mse"]}).fit(
            WithoutValidation(), make_points(), {"b": make_points()}
        )
    assert len(refused.value.faults) == 2


def test_checks_that_rely_on_a_failed_one_are_left_out(tmp_path: Path) -> None:
    trainer = make_trainer(model_path=tmp_path / "model", metrics={"a": ["mse"]})
    with pytest.raises(AccmtError) as raised:
        trainer.fit(WithoutValidation(), None, {"b": make_points()})
    assert [fault.where for fault in raised.value.faults] == ["fit"]


class WithoutModel(AcceleratorModule):
    def training_step(self, batch):
        return self.model(batch[0]).mean()

    def get_train_dataloader(self):
        return DataLoader(make_points(), self.model.batch_size)


def test_an_error_in_a_method_of_the_user_does_not_hide_the_mistake_behind_it(tmp_path: Path) -> None:
    with raises_at(ModuleContractError, "WithoutModel"):
        make_trainer(model_path=tmp_path / "model").fit(WithoutModel())


class Datamodule:
    def prepare_data(self):
        raise AssertionError("downloads")

    def train_dataloader(self):
        return DataLoader(make_points(), 2)


def test_a_datamodule_downloads_nothing_for_a_module_that_cannot_train(tmp_path: Path) -> None:
    with raises_at(ModuleContractError, "WithoutStep"):
        make_trainer(model_path=tmp_path / "model").fit(WithoutStep(), datamodule=Datamodule())


def test_an_error_that_cannot_be_pickled_is_reported_as_it_is(tmp_path: Path) -> None:
    class OwnError(DataError):
        pass

    class Raises(WithoutValidation):
        def get_train_dataloader(self):
            raise OwnError("no such table")

    with pytest.raises(OwnError, match="no such table"):
        make_trainer(model_path=tmp_path / "model").fit(Raises())


class WithoutLength(DataLoader):
    def __len__(self) -> int:
        raise RuntimeError("not known")


def test_one_process_does_not_ask_for_a_length_that_it_does_not_need(tmp_path: Path) -> None:
    trainer = make_trainer(model_path=tmp_path / "model")
    trainer.fit(WithoutValidation(), WithoutLength(make_points(), 2))
    assert trainer.state.global_step > 0
