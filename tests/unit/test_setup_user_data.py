"""Datamodules: what of them is called when, and that the data they make are those that are trained on and evaluated."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from accmt import Callback
from accmt.addons.datamodule import DataModule
from accmt.errors import ArgumentError, DataError
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer

QUIET = {"num_sanity_val_steps": 0}


class Combined:
    """Begins anew with each `iter`, and is its own iterator."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        self.iterators = [iter(loader) for loader in self.loaders]
        return self

    def __next__(self):
        return [next(iterator) for iterator in self.iterators]

    def __len__(self):
        return min(map(len, self.loaders))


class Both(IterableDataset):
    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        yield from zip(*self.loaders, strict=True)


@pytest.mark.parametrize("kind", [list, tuple, Combined])
def test_two_training_loaders_are_refused_with_what_trains_on_both(kind):
    class Twice(Linear):
        def step(self, batch):
            return sum(super(Twice, self).step(part) for part in batch)

    loaders = [DataLoader(make_points(4), 2), DataLoader(make_points(8), 4)]
    data = Combined(*loaders) if kind is Combined else kind(loaders)
    with raises_at(DataError, "the training data", do="DataLoader(Both(), batch_size=None)"):
        make_trainer({"epochs": 2}).fit(Twice(), data)
    assert make_trainer({"epochs": 2}).fit(Twice(), DataLoader(Both(*loaders), batch_size=None)).global_step == 4


# What matters of lightning.pytorch.core.hooks and .datamodule: methods that are not overridden raise.
LIGHTNING = """
class DataHooks:
    def __init__(self):
        self.prepare_data_per_node = True

    def prepare_data(self): pass
    def setup(self, stage): pass
    def teardown(self, stage): pass

    def train_dataloader(self): raise RuntimeError("`train_dataloader` must be implemented")
    def val_dataloader(self): raise RuntimeError("`val_dataloader` must be implemented")
    def test_dataloader(self): raise RuntimeError("`test_dataloader` must be implemented")
    def predict_dataloader(self): raise RuntimeError("`predict_dataloader` must be implemented")


class LightningDataModule(DataHooks):
    def __init__(self):
        super().__init__()
        self.trainer = None

    @classmethod
    def from_datasets(cls, train):
        datamodule = cls()

        def train_dataloader():
            return train

        datamodule.train_dataloader = train_dataloader
        return datamodule
"""


def lightning_data_module() -> Any:
    module = ModuleType("lightning.pytorch.core.datamodule")
    exec(LIGHTNING, vars(module))  # noqa: S102 - so that its names are those of another package
    return module.LightningDataModule


class Data:
    """A datamodule without a base class, which notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        self.first = {"fit": 0, "validate": 10, "test": 20, "predict": 30}[stage]

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return DataLoader(Numbers([1, 2]), batch_size=2)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return DataLoader(Numbers([self.first + 5]), batch_size=1)

    def test_dataloader(self) -> Any:
        return Numbers([self.first])

    def predict_dataloader(self) -> Any:
        return Numbers([self.first])


class Predicting(Scripted):
    def predict_step(self, batch: Any) -> Any:
        return batch


def test_a_datamodule_is_prepared_set_up_asked_and_torn_down():
    data, module = Data(), Scripted()
    trainer = make_trainer(**QUIET)
    trainer.fit(module, datamodule=data)
    assert data.calls == ["prepare", "setup fit", "train", "val", "teardown fit"]
    assert module.seen == [[1, 2]]
    assert module.validated == [[5]]
    assert data.trainer is trainer


def test_validate_test_and_predict_take_that_of_the_last_fit_or_one_of_their_own():
    data, module = Data(), Predicting()
    trainer = make_trainer(**QUIET)
    trainer.fit(module, datamodule=data)
    data.calls.clear()
    assert trainer.validate()["val_loss"] == 15
    assert data.calls == ["prepare", "setup validate", "val", "teardown validate"]
    assert trainer.test()["test_loss"] == 20
    assert trainer.predict(datamodule=data).tolist() == [30]
    assert trainer.validate(val_dataset=Numbers([7]))["val_loss"] == 7
    assert make_trainer().test(Scripted(), datamodule=Data())["test_loss"] == 20
    assert make_trainer().validate(Scripted(), datamodule=Data())["val_loss"] == 15


def test_the_loaders_of_tests_and_predictions_can_be_looked_at():
    class Looking(Callback):
        def on_evaluation_start(self):
            self.sizes = [len(loader.dataset) for loader in self.trainer.test_dataloaders]

    looking = Looking()
    trainer = make_trainer(callbacks=looking)
    assert trainer.test_dataloaders == trainer.predict_dataloaders == []
    trainer.test(Predicting(), [Numbers(2), Numbers(3)])
    assert looking.sizes == [2, 3]
    trainer.predict(Predicting(), Numbers(4))
    assert [len(loader.dataset) for loader in trainer.predict_dataloaders] == [4]
    assert [type(loader) for loader in trainer.test_dataloaders] == [DataLoader, DataLoader]


def test_inside_a_run_nothing_is_torn_down():
    class Testing(Callback):
        def on_epoch_end(self):
            data.calls.clear()
            self.trainer.test()
            self.calls = list(data.calls)

    data, testing = Data(), Testing()
    make_trainer(callbacks=testing, **QUIET).fit(Scripted(), datamodule=data)
    assert testing.calls == ["setup test"]
    assert data.calls == ["setup test", "teardown fit"]


def test_a_lightning_datamodule_works_as_it_is():
    base = lightning_data_module()

    class Own(base):
        def setup(self, stage):
            self.points = make_points(4)

        def train_dataloader(self):
            return DataLoader(self.points, batch_size=2)

    trainer = make_trainer()
    data = Own()
    assert trainer.fit(Linear(), datamodule=data).global_step == 2
    assert data.trainer is trainer
    assert make_trainer().fit(Linear(), datamodule=base.from_datasets(make_points(6))).global_step == 3
    with raises_at(DataError, "test", "no data"):
        trainer.test()
    with raises_at(ArgumentError, "datamodule"):
        trainer.fit(Linear(), datamodule=base())


def test_reloading_asks_the_datamodule_anew_but_sets_it_up_once():
    data = Data()
    make_trainer({"epochs": 3}, reload_dataloaders_every_n_epochs=2, **QUIET).fit(Scripted(), datamodule=data)
    assert data.calls == ["prepare", "setup fit", "train", "val", "train", "val", "teardown fit"]


def test_only_what_is_there_is_called_and_the_module_comes_first():
    class Bare:
        def train_dataloader(self):
            return Numbers([1, 2])

    class Own(Scripted):
        def get_train_dataloader(self, dataset):
            return Numbers([value + 10 for value in dataset.values])

    module = Own()
    make_trainer().fit(module, datamodule=Bare())
    assert sorted(module.seen[0]) == [11, 12]
    assert module.validated == []


@pytest.mark.parametrize("name", ["train_dataset", "val_dataset"])
def test_data_beside_a_datamodule_are_refused(name):
    with raises_at(ArgumentError, "fit(datamodule=...)"):
        make_trainer().fit(Scripted(), datamodule=Data(), **{name: Numbers(2)})
    with raises_at(ArgumentError, "test(datamodule=...)"):
        make_trainer().test(Scripted(), Numbers(2), datamodule=Data())


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("train_dataloaders", "train_dataloader"),
        ("train_dataloder", "train_dataloader"),
        ("val_dataloaders", "val_dataloader"),
        ("val_data_loader", "val_dataloader"),
        ("prepare_datas", "prepare_data"),
        ("set_up", "setup"),
    ],
)
@pytest.mark.parametrize("base", [object, lightning_data_module()], ids=["own", "lightning"])
def test_a_misspelt_method_of_a_datamodule_is_an_error_with_the_right_name(base, wrong, right):
    methods = {"train_dataloader": lambda self: Numbers(2), "test_dataloader": lambda self: Numbers(2)}
    methods.pop(right, None)
    own = type("Own", (base,), {**methods, wrong: lambda self: None})()
    with raises_at(ArgumentError, "the datamodule Own"):
        DataModule(own)
    setattr(own, right, lambda: None)
    DataModule(own)


def test_methods_of_ones_own_are_not_taken_for_misspelt_ones_and_nothing_is_asked_of_them():
    class Own:
        def train_dataloader(self):
            return Numbers(2)

        def prepare_dataset(self):
            raise AssertionError

        get_test_dataloader = build_test_dataloader = test_loader = prepare_dataloader = prepare_dataset
        predict_data_loader = property(prepare_dataset)

    assert len(DataModule(Own()).load("train")) == 2


def test_a_loader_in_the_place_of_a_method_is_refused():
    own = SimpleNamespace(train_dataloader=DataLoader(Numbers(2)))
    with raises_at(ArgumentError, "SimpleNamespace.train_dataloader"):
        DataModule(own)


def test_a_datamodule_that_forgets_to_return_its_training_data_is_named():
    own = SimpleNamespace(train_dataloader=lambda: None, val_dataloader=lambda: None)
    with raises_at(DataError, "SimpleNamespace.train_dataloader", "None", do="return DataLoader"):
        DataModule(own).load("train")
    assert DataModule(own).load("validate") is None


def test_a_class_is_refused():
    with raises_at(ArgumentError, "datamodule"):
        make_trainer().fit(Scripted(), datamodule=Data)


def test_a_set_up_that_fails_is_torn_down():
    class Failing(Data):
        def setup(self, stage):
            super().setup(stage)
            raise OSError("no such corpus")

    data = Failing()
    with pytest.raises(OSError, match="no such corpus"):
        make_trainer(**QUIET).fit(Scripted(), datamodule=data)
    assert data.calls[-2:] == ["setup fit", "teardown fit"]


def test_a_failed_run_tears_down_and_its_own_error_goes_first(caplog):
    class Failing(Data):
        def teardown(self, stage):
            super().teardown(stage)
            raise OSError("nothing to remove")

    class Broken(Scripted):
        def training_step(self, batch):
            raise ZeroDivisionError("a step")

    data = Failing()
    with pytest.raises(ZeroDivisionError):
        make_trainer(**QUIET).fit(Broken(), datamodule=data)
    assert data.calls[-1] == "teardown fit"
    assert "teardown of the datamodule raised OSError: nothing to remove" in caplog.text
    with pytest.raises(OSError, match="nothing to remove"):
        make_trainer(**QUIET).fit(Scripted(), datamodule=Failing())


def test_a_run_that_recovers_sets_up_once():
    class OutOnce(Scripted):
        def training_step(self, batch):
            if len(batch) > 1:
                raise RuntimeError("CUDA out of memory")
            return super().training_step(batch)

    class Points(Data):
        def train_dataloader(self):
            super().train_dataloader()
            return Numbers([1, 2])

    data = Points()
    make_trainer({"max_micro_batch_size": "auto"}, **QUIET).fit(OutOnce(), datamodule=data)
    assert data.calls == ["prepare", "setup fit", "train", "val", "train", "val", "teardown fit"]


def test_tuning_asks_a_module_that_goes_by_its_state():
    class Own(Linear):
        def get_train_dataloader(self):
            return make_points(4 + self.state.epoch)

    tuned = make_trainer().tune(Own(), lr=True, lr_updates=4)
    assert len(tuned.curve) > 0
