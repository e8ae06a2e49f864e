"""Mistakes of the first hour: what is said of them, and how much of it."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

import accmt
from accmt import AcceleratorModule, HyperParameters, Metric, MetricError
from accmt.engine import accelerator
from tests.raising import raises_at
from tests.tables import each
from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer


@each("name", ["device", "state", "trainer", "accelerator"])
def test_what_a_run_lends_is_not_there_before_it(name):
    with pytest.raises(AttributeError, match=rf"self\.{name}\n  got: no run has started, for example in __init__"):
        getattr(Linear(), name)
    assert not hasattr(Linear(), name)


class Classifier(AcceleratorModule):
    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))

    def step(self, batch):
        return torch.nn.functional.cross_entropy(self.model(batch["x"]), batch["label"])


def classes(*labels):
    return [{"x": torch.zeros(4), "label": label, "text": "a secret"} for label in labels]


def test_a_failed_step_is_told_with_its_place_its_batch_and_the_layers():
    settings = {"num_sanity_val_steps": 0}
    with pytest.raises(IndexError) as failure:
        make_trainer({"batch_size": 2}, shuffle_train=False).fit(Classifier(), classes(0, 1, 2, 3))
    note = failure.value.__notes__[0]
    assert note.splitlines() == [
        "This happened in training, after 1 optimizer steps: batch 1 of epoch 1",
        "  batch: dict of 3",
        "  batch['x']: float32[2, 4]",
        "  batch['label']: int64[2], from 2 to 3",
        "  batch['text']: list of 2 str, not a tensor",
        "  first layer of the model, 0: Linear(in_features=4, out_features=8, bias=True)",
        "  last layer of the model, 2: Linear(in_features=8, out_features=3, bias=True)",
    ]
    with pytest.raises(IndexError) as failure:
        make_trainer({"batch_size": 2}, **settings).fit(Classifier(), classes(0, 1), classes(2, 3))
    assert failure.value.__notes__[0].startswith("This happened in validation, after 1 optimizer steps: batch")


def raise_in(name):
    """Return a class whose method raises a KeyError."""

    def fail(*_args, **_keywords):
        raise KeyError(name)

    return type("Failing", (), {name: fail})


PHASES = {
    "the backward pass": {"step": lambda self, _: Doubled.apply(self.model.weight).sum()},
    "the optimizer step": {
        "get_optimizer": lambda self: type("Own", (raise_in("step"), torch.optim.SGD), {})(self.model.parameters(), 0.1)
    },
    "writing a checkpoint": {"state_dict": raise_in("state_dict").state_dict, "load_state_dict": lambda *_: None},
    "computing the metrics": {"validation_step": lambda self, batch: {"mean": (batch[0], batch[1])}},
}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("gradient")


@each("phase", PHASES)
def test_an_error_outside_a_step_names_what_was_being_done(phase, tmp_path):
    module = type("Own", (Linear,), PHASES[phase])()
    metric = type("Own", (raise_in("compute"), Metric), {})("mean")
    settings = {"metrics": [metric] if phase == "computing the metrics" else None, "num_sanity_val_steps": 0}
    with pytest.raises(KeyError) as failure:
        make_trainer(model_path=tmp_path / "model", checkpoint_every=1, **settings).fit(
            module, make_points(), make_points()
        )
    assert any(note.startswith(f"This happened in {phase}, after") for note in failure.value.__notes__)


class Failing(Scripted):
    def training_step(self, batch):
        return 1 / 0

    def get_batch_size(self, batch):
        return 2


def test_a_dataset_that_returns_none_is_told_with_that_sample_alone():
    class Holed(Numbers):
        def __getitem__(self, index):
            return None if index == 5 else super().__getitem__(index)

    with pytest.raises(TypeError) as failure:
        make_trainer({"batch_size": 8}, shuffle_train=False).fit(Scripted(), Holed(8))
    assert "making a batch with sample 5\n  got: None from the dataset" in failure.value.__notes__[0]


def test_what_is_told_of_a_function_among_the_metrics_works():
    def halved(predictions, references):
        return float((predictions - references).abs().mean()) / 2

    with pytest.raises(MetricError) as failure:
        make_trainer(metrics=halved)
    do = str(failure.value).partition("do: ")[2]
    kind, _, made = do.partition("; then pass metrics=")
    names = {"Metric": Metric, "halved": halved}
    exec(re.sub(r"\): def", "):\n    def", kind), names)
    metric = eval(made.partition(" and return")[0], names)

    class Measured(Scripted):
        def validation_step(self, batch):
            return {"loss": batch.mean(), metric.name: (batch, torch.zeros(len(batch)))}

    trainer = make_trainer(metrics=metric)
    trainer.fit(Measured(), Numbers(2), Numbers([1.0, 3.0]))
    assert trainer.state.metrics["halved"] == 1.0


def test_a_logged_loss_is_told_to_be_returned():
    class Logging(Scripted):
        def validation_step(self, batch):
            self.log("val_loss", batch.mean())

    with raises_at(accmt.ModuleContractError, "log('val_loss', ...)"):
        make_trainer().fit(Logging(), Numbers(2), Numbers(2))


class Broken(AcceleratorModule):
    def __init__(self):
        self.model = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return self.model(batch[0][:, :2])


PACKAGE = str(Path(accmt.__file__).parent)


def files_in(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def files_of_accmt(error: BaseException) -> list[str]:
    return [file for file in files_in(error) if file.startswith(PACKAGE)]


def test_the_traceback_of_a_step_has_two_frames_of_accmt():
    with pytest.raises(RuntimeError) as failure:
        make_trainer().fit(Broken(), make_points())
    files = files_in(failure.value)
    assert files.count(__file__) == 2
    assert len(files_of_accmt(failure.value)) == 2
    assert files.index(__file__, 1) == 3
    assert "torch/nn" in files[-1]


def test_a_fault_of_accmt_keeps_its_traceback(monkeypatch):
    def fail(self, run):
        raise ZeroDivisionError

    monkeypatch.setattr(accelerator, "_check_engine", fail)
    with pytest.raises(TypeError) as failure:  # the signature differs
        make_trainer().fit(Linear(), make_points())
    assert len(files_of_accmt(failure.value)) > 2


CELL = """
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell(colors="nocolor").run_cell("from accmt import Trainer\\nTrainer({'epochs': 1}, 'out/model')")
"""


def test_a_notebook_shows_an_error_of_ours_without_the_signature_of_the_trainer():
    done = subprocess.run([sys.executable, "-c", CELL], capture_output=True, text=True, timeout=300, check=True)
    assert "hps_config batch_size\n  got: nothing" in done.stdout
    assert "Trainer({'epochs': 1}, 'out/model')" in done.stdout
    assert "model_saving" not in done.stdout


class OwnOptimizer(Linear):
    def get_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)


def test_a_module_with_an_optimizer_needs_none_in_the_hyper_parameters():
    def fit(epochs, **settings):
        hps = {"epochs": epochs, "batch_size": 2}
        trainer = accmt.Trainer(hps, "out/model", checkpoint_every="epoch", verbose=False, seed=0, **settings)
        return trainer.fit(OwnOptimizer(), make_points(), make_points())

    whole = fit(2)
    assert fit(1).epoch == 1
    assert fit(2, resume=True).metrics == whole.metrics
    again = accmt.Trainer("out/model/hps.yaml", "out/again", verbose=False, seed=0)
    assert again.fit(OwnOptimizer(), make_points(), make_points()).metrics == whole.metrics


@each(
    ("hps", "is_told"),
    [
        ({"optim": "AdamW"}, True),
        ({"optim": {"type": "AdamW", "lr": 1e-3}}, False),
        ({"optim": "SGD", "scheduler": {"type": "OneCycleLR", "max_lr": 0.1}}, False),
    ],
)
def test_a_learning_rate_that_nobody_chose_is_named(hps, is_told, caplog):
    with caplog.at_level("INFO", "accmt"):
        make_trainer(hps).fit(Linear(), make_points())
    assert ("hps_config optim has no lr: the learning rate is AdamW's default, 0.001" in caplog.text) is is_told
    caplog.clear()


@each(
    ("scheduler", "where"),
    [
        ({"type": "StepLR", "step_size": 0}, "hps_config scheduler.step_size"),
        ({"type": "CosineAnnealingLR", "T_max": 0}, "hps_config scheduler.T_max"),
    ],
)
def test_a_scheduler_that_would_divide_by_zero_is_told_before_training(scheduler, where):
    module = Scripted()
    with raises_at(accmt.HyperParameterError, where, scheduler["type"]):
        make_trainer({"scheduler": scheduler}).fit(module, Numbers(4))
    assert not module.seen


@each(
    "scheduler",
    [
        {"type": "StepLR", "step_size": 1},
        {"type": "OneCycleLR", "max_lr": 0.1},
        {"type": "CyclicLR", "base_lr": 0.0, "max_lr": 0.1},
        "CosineWithWarmup",
    ],
)
def test_the_trial_of_a_scheduler_moves_no_learning_rate(scheduler):
    class Watching(Linear):
        def on_fit_start(self):
            self.rate, self.calls = self.optimizer.param_groups[0]["lr"], self.scheduler.last_epoch

    module, same = Watching(), Linear()
    make_trainer({"scheduler": scheduler}).fit(module, make_points())
    assert module.calls == 0
    optimizer = torch.optim.SGD(same.model.parameters(), lr=0.1)
    if isinstance(scheduler, dict):
        arguments = {name: value for name, value in scheduler.items() if name != "type"}
        arguments |= {"total_steps": 4} if scheduler["type"] == "OneCycleLR" else {}
        getattr(torch.optim.lr_scheduler, scheduler["type"])(optimizer, **arguments)
    assert module.rate == optimizer.param_groups[0]["lr"]


def test_keys_that_are_not_indented_below_hps_are_told(tmp_path):
    (tmp_path / "hps.yaml").write_text("\nhps:\nepochs: 2\nbatch_size: 8\n")
    with raises_at(accmt.HyperParameterError, "hps.yaml:2", "`hps:`", "epochs, batch_size"):
        HyperParameters.from_config(tmp_path / "hps.yaml")


def test_a_monitor_that_get_scheduler_sets_is_not_blamed_on_the_hyper_parameters():
    class Watching(Linear):
        def get_scheduler(self, optimizer):
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            scheduler.monitor = "acc"
            return scheduler

    with raises_at(accmt.ArgumentError, "scheduler.monitor, set in get_scheduler"):
        make_trainer().fit(Watching(), make_points(), make_points())


@each("name", ["val_loss", "valid_loss"])
def test_val_loss_and_valid_loss_are_one(name):
    hps = {"epochs": 3, "scheduler": {"type": "ReduceLROnPlateau", "monitor": name, "patience": 0}}
    saving = {"model_saving": f"best_{name}", "model_saving_above": {name: -5}, "patience": {name: 1}}
    state = make_trainer(hps, **saving).fit(Scripted([1, 2, 3]), Numbers(2), Numbers(2))
    assert (state.best, state.epoch) == ({"best_valid_loss": 1.0}, 2)
    assert make_trainer(model_saving=f"best_{name}").fit(Linear(), make_points()).best.keys() == {"best_train_loss"}


class Unlengthed:
    def __getitem__(self, index):
        return 0.0


class Framed:
    """What matters of a pandas DataFrame."""

    iloc = ()

    def to_dict(self, orient):
        raise NotImplementedError

    def __len__(self):
        return 2

    def __getitem__(self, column):
        raise KeyError(column)


@each(
    ("data", "got", "do"),
    [
        (Unlengthed(), "Unlengthed", "def __len__"),
        (Framed(), "a Framed of pandas", 'frame.to_dict("records")'),
    ],
)
def test_what_is_no_dataset_is_told_with_how_to_make_one(data, got, do):
    for train, validation in ((data, None), (Numbers(2), data)):
        with raises_at(accmt.DataError, "data", got, do=do):
            make_trainer().fit(Scripted(), train, validation)
