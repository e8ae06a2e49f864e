"""Trains models whose parts are called one by one, and others that DDP treats apart; writes the weights of each.

torchrun --nproc-per-node 2 containers.py RESULT.json FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss, softplus
from torch.utils.data import TensorDataset

import tests.many_runs  # noqa: F401
from accmt import AcceleratorModule, ExtendedAcceleratorModule, Trainer
from accmt.errors import AccmtError
from accmt.processes import gather_objects, is_main_process, num_processes, process_index
from tests.low_bit import Rounded

BATCH_SIZE, EPOCHS = 2, 2
QUIET = {"model_saving": None, "shuffle_train": False, "verbose": False, "seed": 1}
IGNORED = "_ddp_params_and_buffers_to_ignore"


def make_points(samples: int) -> TensorDataset:
    inputs = torch.randn(samples, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(samples * 2).reshape(samples, 2) % 7)


class Parts(nn.Module):
    """A model without a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = make_body(), nn.Linear(4, 1)


def make_body() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


def make_sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def toggled(model: Any, batch: Any) -> torch.Tensor:
    """Pass a frozen part, as the generator's loss passes the discriminator."""
    model["head"].requires_grad_(False)
    loss = mse_loss(model["head"](model["body"](batch[0])), batch[1])
    model["head"].requires_grad_(True)
    return loss


def penalized(model: Any, batch: Any) -> torch.Tensor:
    """Reach parts of a model that is called as a whole too."""
    return mse_loss(model(batch[0]), batch[1]) + 0.1 * model[0].weight.square().sum() + model.get_submodule("2").bias[0]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Any], torch.Tensor]
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    accumulation: int = 2
    samples: int = 13


CASES = {
    "dict": Case(
        lambda: nn.ModuleDict({"body": make_body(), "head": nn.Linear(4, 1)}),
        lambda model, batch: mse_loss(model["head"](model["body"](batch[0])), batch[1]),
    ),
    "toggled": Case(lambda: nn.ModuleDict({"body": make_body(), "head": nn.Linear(4, 1)}), toggled),
    "list": Case(
        lambda: nn.ModuleList([make_body(), nn.Linear(4, 1)]),
        lambda model, batch: mse_loss(model[1](model[0](batch[0])), batch[1]),
    ),
    "no forward": Case(Parts, lambda model, batch: mse_loss(model.head(model.body(batch[0])), batch[1])),
    "parts of a wrapped model": Case(make_sequence, penalized),
    "static graph": Case(
        make_sequence,
        lambda model, batch: mse_loss(model(batch[0]), batch[1]),
        settings={"parallelism": {"ddp": {"static_graph": True}}},
        accumulation=1,
    ),
    "sparse": Case(
        lambda: nn.Sequential(nn.Embedding(9, 3, sparse=True)),
        lambda model, batch: mse_loss(model(batch[2]).sum(1), batch[0]),
        optimizer="SparseAdam",
    ),
    "sparse parts": Case(
        lambda: nn.ModuleDict({"table": nn.Embedding(9, 3, sparse=True)}),
        lambda model, batch: mse_loss(model["table"](batch[2]).sum(1), batch[0]),
        optimizer="SparseAdam",
    ),
}


class Module(AcceleratorModule):
    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model, self.loss = case.build(), case.loss

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


class Adversarial(ExtendedAcceleratorModule):
    """Two networks, each with an optimizer; one of them is the module's own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict({"generator": nn.Linear(3, 1), "critic": nn.Linear(1, 1)})
        self.optimizer_of_critic = torch.optim.SGD(self.model["critic"].parameters(), lr=0.1)

    def get_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model["generator"].parameters(), lr=0.1)

    def training_step(self, batch: Any) -> None:
        self.zero_grad_of_both()
        for half in (0.5, 1.5):  # two backwards for one step
            self.backward(half * critic_loss(self.model, batch))
        self.optimizer_of_critic.step()
        self.zero_grad_of_both()
        self.backward(generator_loss(self.model, batch))
        self.step_optimizer()

    def zero_grad_of_both(self) -> None:
        self.zero_grad()
        self.optimizer_of_critic.zero_grad()


def critic_loss(model: Any, batch: Any) -> torch.Tensor:
    made = model["generator"](batch[0]).detach()
    return (softplus(-model["critic"](batch[1])) + softplus(model["critic"](made))).mean()


def generator_loss(model: Any, batch: Any) -> torch.Tensor:
    return softplus(-model["critic"](model["generator"](batch[0]))).mean()


class Normalized(Module):
    """Has buffers, which each process sees other batches of."""

    def __init__(self) -> None:
        super().__init__(CASES["dict"])
        self.model["body"].append(nn.BatchNorm1d(4))


class Quantized(nn.Module):
    """A layer behind a frozen one whose weight is made of other tensors, and is another one on each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(process_index())
        self.frozen = nn.Parameter(Rounded.of(torch.randn(3, 3)), requires_grad=False)
        self.trained = nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight: Any = self.frozen
        outputs: torch.Tensor = self.trained(inputs @ weight.dequantize())
        return outputs


class AroundQuantized(AcceleratorModule):
    def __init__(self) -> None:
        self.model = Quantized()

    def training_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self.model(batch[0]), batch[1])


def train_around_quantized(folder: Path) -> list[Any]:
    module = AroundQuantized()
    trainer = Trainer({"epochs": 2, "batch_size": 2, "optim": "AdamW"}, folder / "model", logging_dir=folder, **QUIET)
    trainer.fit(module, make_points(12))
    weight = module.model.frozen
    facts = {"codes": weight.codes.tolist(), "scale": weight.scale.item(), "ignored": vars(module.model).get(IGNORED)}
    return gather_objects({**facts, "trained": module.model.trained.weight.tolist()})


class AroundTheWrapper(ExtendedAcceleratorModule):
    def __init__(self) -> None:
        self.model = make_sequence()

    def training_step(self, batch: Any) -> None:
        self.backward(mse_loss(self.unwrapped_model(batch[0]), batch[1]))
        self.step()


def train(module: Any, folder: Path, case: Case) -> list[Any]:
    trainer = Trainer(
        {"epochs": EPOCHS, "batch_size": BATCH_SIZE, "optim": {"type": case.optimizer, "lr": 0.1}},
        folder / "model",
        grad_accumulation_steps=None if isinstance(module, ExtendedAcceleratorModule) else case.accumulation,
        logging_dir=folder,
        **QUIET,
        **case.settings,
    )
    trainer.fit(module, make_points(case.samples))
    return gather_objects({name: value.tolist() for name, value in module.model.state_dict().items()})


def refusal(module: Any, folder: Path, **settings: Any) -> str:
    try:
        train(module, folder, Case(make_sequence, mse_loss, samples=12, settings=settings))
    except AccmtError as error:
        return str(error)
    return ""


def main(result: str, folder: str) -> None:
    place = Path(folder)
    results: dict[str, Any] = {name: train(Module(case), place / name, case) for name, case in CASES.items()}
    results["adversarial"] = train(Adversarial(), place / "gan", Case(Parts, mse_loss, samples=12 * num_processes()))
    results["normalized"] = train(Normalized(), place / "norm", Case(Parts, mse_loss, samples=12))
    results["around quantized"] = train_around_quantized(place / "quantized")
    by_parts = Case(make_sequence, lambda model, batch: mse_loss(model[2](model[1](model[0](batch[0]))), batch[1]))
    results["refusals"] = [refusal(Module(by_parts), place / "parts"), refusal(AroundTheWrapper(), place / "around")]
    results["static"] = refusal(
        Module(CASES["static graph"]), place / "static", parallelism={"ddp": {"static_graph": True}}
    )
    if is_main_process():
        Path(result).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
