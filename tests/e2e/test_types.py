"""What a user's strict type checker says: nothing about right code, and what is wrong about wrong code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.markdown import ROOT, write_files

RIGHT = """
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import accmt
from accmt import AcceleratorModule, Callback, TrackerOptions, EMA, ExtendedAcceleratorModule, Failures, Handler, MLFlow
from accmt import Monitor, Trainer


class Net(ExtendedAcceleratorModule):
    model: torch.nn.Linear

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 1)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.model(batch[0]).mean()
        self.backward(loss)
        self.step()
        self.zero_grad()
        self.log("rate", self.trainer.global_step, prog_bar=True)
        return loss

    def on_fit_end(self) -> None:
        best: Mapping[str, float] = self.state.best
        folder: Path = self.trainer.log_dir
        print(best, folder, self.device.type, self.trainer.model)


class Watcher(Callback):
    def on_update_end(self) -> None:
        self.trainer.should_stop = self.state.global_step > 3
        self.trainer.get_callback(EMA).state_dict()
        self.trainer.save_checkpoint("kept")


data = TensorDataset(torch.zeros(8, 2))
trainer = Trainer(
    {"epochs": 1, "batch_size": 2, "optim": {"type": "SGD", "lr": 1e-3}},
    Path("out"),
    resume="auto",
    model_saving=["best_valid_loss", "best_f1"],
    evaluate_every_n_steps="0.25 epochs",
    checkpoint_every="2 epochs",
    log_with=[MLFlow, "tensorboard"],
    clip_grad={"value": 0.5},
    sampler=lambda dataset: RandomSampler(dataset),
    collate_fn=torch.stack,
    handlers=[Handler.ANY, "keyboard"],
    monitor=Monitor(grad_norm="inf"),
    compile={"mode": "max-autotune"},
    limit_batches={"train": 10, "val": 0.5},
    min_length=["2 epochs", "100 steps"],
    max_time={"minutes": 5},
    patience={"best_f1": 3},
    metrics={"en": ["f1"], "de": ["f1"]},
    metric_options={"averages": {"mean_f1": lambda name: name.startswith("f1")}},
    torch_flags={"deterministic": "warn"},
    callbacks=[Watcher(), EMA(decay=0.9)],
    failures=Failures(on_nonfinite="rollback", spike_guard=8),
    tracker_options=TrackerOptions(offline=True),
    parallelism={"shard": 2},
    mixed_precision="bf16",
    profiler="simple",
    mlflow={"tags": {"team": "news"}},
)
state: accmt.TrainingState = trainer.fit(Net(), data, {"en": data, "de": DataLoader(data)})
results: dict[str, float] = trainer.validate(val_dataset=data)
found = trainer.tune(Net(), data, batch_size="power", lr=True)
rate: float | None = found.lr
module: AcceleratorModule = AcceleratorModule.from_functions(
    torch.nn.Linear(1, 1), lambda batch, trainer: trainer.model(batch).mean()
)
try:
    trainer.fit("a/folder", data, num_labels=2)
except accmt.WeightsError:
    pass
"""

WRONG = {
    'Trainer({}, "out", failures=Failures(on_nonfinit="skip"))': "on_nonfinit",
    'Trainer({}, "out", failures=Failures(on_nonfinite="skipp"))': "on_nonfinite",
    'Trainer({}, "out", limit_batches=Limits(valid=3))': "valid",
    'Trainer({}, "out", mixed_precision="fp17")': "mixed_precision",
    'Trainer({}, "out", callbacks=3)': "callbacks",
    'Trainer({}, "out", checkpoint_every=[3])': "checkpoint_every",
    'Trainer({}, "out").fit(3)': '"fit"',
    'Trainer({}, "out").state.metrics = 3': "",
    'Trainer({}, "out").bset': "bset",
}


CONFIG = f"""
[mypy]
strict = true
mypy_path = {ROOT}
cache_dir = {ROOT / ".mypy_cache" / "user"}
follow_imports = silent
error_summary = false

# What is checked is the surface of accmt: following torch and numpy too would take a minute.
[mypy-torch.*,numpy.*,sklearn.*,accelerate.*,transformers.*,pydantic.*,yaml.*,tqdm.*]
follow_imports = skip
ignore_missing_imports = true
"""


def check(*files: Path) -> list[str]:
    config = files[0].with_name("mypy.ini")
    config.write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", f"--config-file={config}", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_types_are_shipped() -> None:
    assert (ROOT / "accmt" / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_users_strict_mypy_accepts_right_code_and_finds_each_mistake(tmp_path: Path) -> None:
    write_files(ROOT / "README.md", tmp_path)
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text("from accmt import Failures, Limits, Trainer\n" + "\n".join(WRONG) + "\n")
    said = check(tmp_path / "train.py", right, wrong)
    assert [line for line in said if not line.startswith("wrong.py")] == []
    for number, (line, word) in enumerate(WRONG.items(), 2):
        assert [text for text in said if text.startswith(f"wrong.py:{number}:") and word in text], (line, said)
