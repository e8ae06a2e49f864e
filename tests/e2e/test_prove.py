"""Proofs of modules: planted mistakes are named, and correct programs pass."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, normalize
from torch.utils.data import Dataset, get_worker_info

from accmt import AcceleratorModule, Callback, ChainedOptimizer, ExtendedAcceleratorModule
from accmt.addons.digests import digest
from accmt.addons.prove import Proof
from accmt.cli.main import main
from accmt.processes import process_index
from tests.faults.prove_examples import prove_example
from tests.toys import Linear, make_points, make_trainer


class Points(Dataset[Any]):
    """Inputs and targets, which a test may spoil."""

    def __init__(self) -> None:
        self.inputs, self.targets = make_points(64).tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


class Texts(Dataset[Any]):
    """Token ids of different lengths."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        length = 2 + index * 7 % 9
        return {"input_ids": torch.randint(1, 12, (length,), generator=generator)}


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    mask = (ids != 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}


class Tokens(AcceleratorModule):
    """Predicts each token from itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(12, 8), nn.Dropout(0.3), nn.Linear(8, 12))

    def compute(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.compute(batch), "weight": (batch["labels"] != -100).sum()}

    validation_step = training_step


def prove(module: AcceleratorModule, folder: Path, train: Any = None, val: Any = None, **settings: Any) -> Proof:
    hps = {"batch_size": 8, "optim": {"type": "Adam" if isinstance(module, Attends) else "SGD", "lr": 0.1}}
    trainer = make_trainer(hps, str(folder / "model"), logging_dir=str(folder / "logs"), **settings)
    return trainer.prove(module, train if train is not None else Points(), val)


# ---- Planted mistakes


class Contrastive(Linear):
    def step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        scores = normalize(inputs + self.model(inputs)) @ normalize(inputs - targets).T
        return cross_entropy(scores / 0.1, torch.arange(len(inputs)))


class Standardized(Linear):
    def step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return mse_loss(self.model((inputs - inputs.mean(0)) / (inputs.std(0, correction=0) + 1)), targets)


class Normed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Unweighted(Tokens):
    def training_step(self, batch: Any) -> Any:
        return self.compute(batch)


class WrongWeight(Tokens):
    def training_step(self, batch: Any) -> Any:
        return {"loss": self.compute(batch), "weight": batch["labels"].numel()}


class WrongCount(Linear):
    def get_batch_size(self, batch: Any) -> int:
        return int((batch[0][:, 0] > 0).sum()) + 1


class Summed(Linear):
    def step(self, batch: Any) -> torch.Tensor:
        return super().step(batch) * len(batch[0])


class SeesPadding(Tokens):
    def compute(self, batch: Any) -> torch.Tensor:
        hidden = self.model[0](batch["input_ids"]).mean(1)  # also of the padding
        return mse_loss(self.model[2](hidden).sum(1), batch["attention_mask"].sum(1).float())

    def training_step(self, batch: Any) -> Any:
        return self.compute(batch)

    validation_step = training_step


class UnseededStep(Linear):
    def step(self, batch: Any) -> torch.Tensor:
        return super().step(batch) * (1 + random.SystemRandom().random())


class UnseededData(Points):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + time.perf_counter_ns() % 1000 / 1000, self.targets[index]


class CountingData(Points):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.inputs[index] * (1 + self.calls % 7), self.targets[index]


class InPlaceData(Points):
    def __getitem__(self, index: int) -> Any:
        self.inputs[index] *= 1.1
        return self.inputs[index].clone(), self.targets[index]


class WorkerData(Points):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] * (1 if get_worker_info() is None else 2), self.targets[index]


class RankData(Points):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + (torch.randn(3) if process_index() else 0), self.targets[index]


class CallsStep(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        return self.step(batch) * (1 + self.calls)


class Momentum(Linear):
    """Scales its loss by an average over steps, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.average = 0.0

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.step(batch) * (1 + self.average)

    def on_after_optimizer_step(self) -> None:
        self.average = 0.9 * self.average + 1


class HiddenMomentum(Linear):
    """Has that average in an object that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = SimpleNamespace(average=0.0)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.step(batch) * (1 + self.meter.average)

    def on_after_optimizer_step(self) -> None:
        self.meter.average = 0.9 * self.meter.average + 1


class RankStep(Linear):
    def training_step(self, batch: Any) -> torch.Tensor:
        loss = self.step(batch)
        return loss * 2 if process_index() == 0 and torch.distributed.is_initialized() else loss


class Scaled(Linear):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.step(batch) / self.state.grad_accum_steps


class ScaledByProcesses(Linear):
    def training_step(self, batch: Any) -> torch.Tensor:
        return self.step(batch) * self.state.num_processes


class ClipsEachBatch(Callback):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_value_(self.module.model.parameters(), 0.05)


class Harmless(Callback):
    def on_after_backward(self) -> None:
        pass


class BatchMetric(Linear):
    def validation_step(self, batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        error = self.model(inputs) - targets
        return {"loss": error.square().mean(), "rmse": error.square().mean().sqrt().item()}


class TokenLoss(Tokens):
    def validation_step(self, batch: Any) -> Any:
        return self.compute(batch)


def scale_by_largest(samples: list[Any]) -> list[torch.Tensor]:
    inputs = torch.stack([sample[0] for sample in samples])
    return [inputs / inputs.abs().max(), torch.stack([sample[1] for sample in samples])]


TEXTS: dict[str, Any] = {"train": Texts, "collate_fn": pad}

MISTAKES: dict[str, tuple[Callable[[], AcceleratorModule], dict[str, Any], str]] = {
    "contrastive": (Contrastive, {}, "a loss that compares samples"),
    "standardized": (Standardized, {}, "a loss that compares samples"),
    "batch norm": (Normed, {}, "batch norm"),
    "no token weight": (Unweighted, TEXTS, "a missing weight"),
    "wrong token weight": (WrongWeight, TEXTS, "a missing weight"),
    "wrong get_batch_size": (WrongCount, {}, "a missing weight"),
    "sum": (Summed, {}, "a loss that is a sum"),
    "padding": (SeesPadding, TEXTS, "a loss that depends on padding"),
    "unseeded step": (UnseededStep, {}, "a random step without a seed"),
    "unseeded data": (Linear, {"train": UnseededData}, "random data without a seed"),
    "counting data": (Linear, {"train": CountingData}, "state in the dataset"),
    "data in place": (Linear, {"train": InPlaceData}, "state in the dataset"),
    "worker data": (Linear, {"train": WorkerData}, "a dataset that behaves differently in a loader worker"),
    "rank data": (Linear, {"train": RankData}, "a branch on the rank in the data"),
    "counting step": (CallsStep, {}, "state in the module"),
    "state not saved": (HiddenMomentum, {}, "state that no checkpoint contains"),
    "rank step": (RankStep, {}, "a branch on the rank"),
    "divided by accumulation": (Scaled, {}, "a loss that is scaled by hand"),
    "multiplied by processes": (ScaledByProcesses, {}, "a loss that is scaled by hand"),
    "callback": (Linear, {"callbacks": lambda: [Harmless(), ClipsEachBatch()]}, "a callback"),
    "metric of batches": (BatchMetric, {"val": Points}, "a metric that averages means"),
    "validation weight": (TokenLoss, {**TEXTS, "val": Texts}, "a missing weight in validation"),
    "collate": (Linear, {"collate_fn": scale_by_largest}, "a collate function that mixes samples"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(name: str, tmp_path: Path) -> None:
    make, made, expected = MISTAKES[name]
    settings = {key: value() if key in ("train", "val", "callbacks") else value for key, value in made.items()}
    proof = prove(make(), tmp_path, **settings)
    assert not proof.is_right
    assert expected in [cause.name for cause in proof.causes], str(proof)
    assert not list(tmp_path.iterdir()), "a proof leaves nothing on the disk"


class Dropped(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        noise = torch.randn_like(inputs) * random.random()  # noqa: S311 - as a user draws
        return mse_loss(self.model(dropout(inputs + noise, 0.2)), targets)


class Augmented(Points):
    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + torch.randn(3) * random.random(), self.targets[index]  # noqa: S311


class DropsInEvaluation(Linear):
    def validation_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.model(dropout(batch[0], 0.5)), batch[1])


class Attends(Linear):
    """The gradient of its keys' bias is 0 but for rounding, of which Adam makes whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.queries = nn.Linear(1, 4), nn.Linear(1, 4)
        self.model = nn.ModuleList([self.keys, self.queries, nn.Linear(1, 1)])

    def step(self, batch: Any) -> torch.Tensor:
        inputs = batch[0].unsqueeze(2)  # [samples, 3, 1]
        scores = (self.queries(inputs) @ self.keys(inputs).mT).softmax(2)
        return mse_loss(self.model[2](scores @ inputs).mean(1), batch[1])


class BuiltInFit(Linear):
    def __init__(self) -> None:
        """Leave the model to `configure_model`."""

    def configure_model(self) -> None:
        self.model = nn.Linear(3, 1)


class Adversarial(ExtendedAcceleratorModule):
    """Two optimizers, and noise in training and validation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"maker": nn.Linear(3, 3), "judge": nn.Linear(3, 1)})

    def get_optimizer(self) -> ChainedOptimizer:
        return ChainedOptimizer([torch.optim.SGD(part.parameters(), lr=0.1) for part in self.model.values()])

    def compute(self, batch: Any) -> torch.Tensor:
        made = self.model["maker"](torch.randn_like(batch[0]))
        return mse_loss(self.model["judge"](made), batch[1])

    def training_step(self, batch: Any) -> torch.Tensor:
        for optimizer, sign in zip(self.optimizers(), (1, -1), strict=True):
            with self.toggled_optimizer(optimizer):
                loss = sign * self.compute(batch)
                self.backward(loss)
                self.step_optimizer(optimizer)
                self.zero_grad()
        return loss

    def validation_step(self, batch: Any) -> torch.Tensor:
        return self.compute(batch)


CORRECT: dict[str, tuple[Callable[[], AcceleratorModule], dict[str, Any]]] = {
    "plain": (Linear, {"val": Points}),
    "state in an attribute": (Momentum, {}),
    "random": (Dropped, {"train": Augmented, "val": Points}),
    "tokens": (Tokens, {**TEXTS, "val": Texts}),
    "dropout in evaluation": (DropsInEvaluation, {"val": Points}),
    "attention": (Attends, {}),
    "model built in fit": (BuiltInFit, {}),
    "two optimizers": (Adversarial, {"val": Points}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_passes(name: str, tmp_path: Path) -> None:
    make, made = CORRECT[name]
    module = make()
    before = digest(vars(module))
    settings = {key: value() if key in ("train", "val") else value for key, value in made.items()}
    proof = prove(module, tmp_path, **settings)
    assert proof.is_right, str(proof)
    assert not proof.causes
    assert digest(vars(module)) == before
    assert not list(tmp_path.iterdir()), "a proof leaves nothing on the disk"


@pytest.mark.slow
def test_an_example_is_proven(tmp_path: Path) -> None:
    assert not prove_example("gan", tmp_path)


def test_a_script_is_proven_up_to_its_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys
from tests.toys import Linear, make_points, make_trainer

class Summed(Linear):
    def step(self, batch):
        return super().step(batch) * len(batch[0])

trainer = make_trainer({"batch_size": 8}, sys.argv[1])
trainer.fit(Summed() if "--sum" in sys.argv else Linear(), make_points(64))
raise AssertionError("another fit comes after it")
"""
    )
    folder = str(tmp_path / "model")
    assert main(["prove", "--steps", "2", "--samples", "16", str(script), "--", folder]) == 0
    assert main(["prove", "--steps", "2", "--samples", "16", str(script), "--", folder, "--sum"]) == 1
    printed = capsys.readouterr().out
    assert f"the first trainer.fit, {script}:10" in printed
    assert "a loss that is a sum" in printed
    assert list(tmp_path.iterdir()) == [script]
    script.write_text("print('nothing to train')")
    assert main(["prove", str(script)]) == 2
    assert "ended without trainer.fit" in capsys.readouterr().err
    assert main(["prove", str(tmp_path / "none.py")]) == 2
    with pytest.raises(SystemExit):  # a flag after the script is one of accmt's, too
        main(["prove", str(script), "--steps", "0"])
