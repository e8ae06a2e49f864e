"""Mistakes of the first hour: what is said of them, and how much of it."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
from types import SimpleNamespace

import pytest
import torch

import accmt
from accmt import AcceleratorModule, HyperParameters, Metric, MetricError, TrainingState
from accmt.engine import accelerator
from tests.tables import each
from tests.toys import Linear, Numbers, Scripted, make_points, make_trainer


@each("name", ["device", "state", "trainer", "accelerator"])
def test_what_a_run_lends_is_not_there_before_it(name):
    with pytest.raises(AttributeError, match=rf"self\.{name}\n  got: no run has started, for example in __init__"):
        getattr(Linear(), name)
    assert not hasattr(Linear(), name)


def test_a_dataset_that_returns_none_is_told_with_that_sample_alone():
    class Holed(Numbers):
        def __getitem__(self, index):
            return None if index == 5 else super().__getitem__(index)

    with pytest.raises(TypeError) as failure:
        make_trainer({"batch_size": 8}, shuffle_train=False).fit(Scripted(), Holed(8))
    assert "making a batch with sample 5\n  got: None from the dataset" in failure.value.__notes__[0]


def test_a_function_among_the_metrics_is_told_with_what_to_write():
    def compute_metrics(prediction):
        return {"accuracy": 1.0}

    with pytest.raises(MetricError, match=r"the function compute_metrics(.|\n)*class Mine\(Metric\)"):
        make_trainer(metrics=compute_metrics)


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

    with pytest.raises(accmt.ModuleContractError, match=r'return \{"loss": loss\} from the step'):
        make_trainer().fit(Logging(), Numbers(2), Numbers(2))


def test_names_of_optimizers_and_schedulers_are_attributes():
    hps = HyperParameters(optim=accmt.Optimizer.AdamW, scheduler=accmt.Scheduler.LinearWithWarmup)
    assert hps == HyperParameters(optim="AdamW", scheduler="LinearWithWarmup")
    assert {"AdamW", "Adafactor", "SGD"} <= set(dir(accmt.Optimizer))
    with pytest.raises(AttributeError, match="write `AdamW`"):
        accmt.Optimizer.AdmW  # noqa: B018


def test_the_evaluator_of_the_original_is_told():
    with pytest.raises(ImportError, match="validate"):
        from accmt import Evaluator  # noqa: F401


def test_what_fit_returns_is_shown_in_a_line():
    state = TrainingState(epoch=2, global_step=1600, samples_seen=128)
    state.metrics, state.now.status = {"val_loss": 0.5}, "finished"
    assert repr(state) == "<TrainingState: finished, 1,600 steps, 2 epochs, 128 samples, val_loss 0.5>"


class Broken(AcceleratorModule):
    def __init__(self):
        self.model = torch.nn.Linear(3, 1)

    def training_step(self, batch):
        return self.model(batch[0][:, :2])


def files_in(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def test_the_traceback_of_a_step_has_two_frames_of_accmt():
    with pytest.raises(RuntimeError) as failure:
        make_trainer().fit(Broken(), make_points())
    files = files_in(failure.value)
    assert files.count(__file__) == 2
    own = [file for file in files if "/accmt/" in file]
    assert len(own) == 2
    assert files.index(__file__, 1) == 1 + len(own)
    assert "torch/nn" in files[-1]


def test_the_traceback_of_an_error_of_ours_has_its_place():
    with pytest.raises(accmt.DataError) as failure:
        make_trainer().fit(Linear(), Numbers(0))
    assert len([file for file in files_in(failure.value) if "/accmt/" in file]) == 2


def test_a_fault_of_accmt_keeps_its_traceback(monkeypatch):
    def fail(self, run):
        raise ZeroDivisionError

    monkeypatch.setattr(accelerator, "_check_engine", fail)
    with pytest.raises(TypeError) as failure:  # the signature differs
        make_trainer().fit(Linear(), make_points())
    assert len([file for file in files_in(failure.value) if "/accmt/" in file]) > 2


@pytest.mark.parametrize(
    ("command", "is_told"),
    [
        ("accelerate launch --num_processes 2 train.py", True),
        ("accelerate launch --num-processes=2 --cpu train.py", True),
        ("accelerate launch train.py --num_processes 2", False),
        ("accelerate launch --num_processes 1 train.py --num_processes 2", False),
        ("bash run.sh", False),
    ],
)
def test_only_what_stands_before_the_script_is_the_launchers(command, is_told, monkeypatch, caplog):
    parent = SimpleNamespace(cmdline=command.split)
    monkeypatch.setattr(accelerator.psutil, "Process", lambda: SimpleNamespace(parent=lambda: parent))
    environment = {"ACCELERATE_MIXED_PRECISION": "no"}
    monkeypatch.setattr(accelerator, "os", SimpleNamespace(environ=environment))
    monkeypatch.setattr("accmt.messages._said", set())
    accelerator._warn_of_ignored_processes()
    assert ("was asked for 2 processes" in caplog.text) is is_told


SCRIPT = """
from tests.toys import Linear, make_points, make_trainer
make_trainer(verbose=True).fit(Linear(), make_points())
"""


@pytest.mark.parametrize(
    ("number", "cpu"),
    [(2, ["--cpu"]), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, ["--cpu"]), (2, [])))],
)
def test_accelerate_that_ignores_the_number_of_processes_is_told(number, cpu, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *cpu, "--num_machines", "1"]
    launch += ["--num_processes", str(number), "--mixed_precision", "no", "--dynamo_backend", "no"]
    done = subprocess.run([*launch, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert ("was asked for 2 processes but starts one" in done.stderr) is (number == 2)


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


def test_without_any_optimizer_the_run_ends_before_its_first_step():
    trainer = accmt.Trainer({"epochs": 1, "batch_size": 2}, "out/model", verbose=False)
    with pytest.raises(accmt.HyperParameterError, match=r"hps_config optim\n  got: nothing(.|\n)*def get_optimizer"):
        trainer.fit(Linear(), make_points())
    assert trainer.state.train_step == 0
