"""Saves small models of every kind on some processes, and loads them on as many or others.

torchrun --nproc-per-node 2 checkpoints.py RESULT.json save FOLDER
torchrun --nproc-per-node 3 checkpoints.py RESULT.json load FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from transformers import Adafactor

from accmt.checkpoint.contents import StateCollector, load_state, write_state
from accmt.checkpoint.state_dicts import model_state, optimizer_state, split_tensors


class TiedModel(nn.Module):
    """Tied weights, a buffer, and sizes that 2 and 3 processes cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.single = nn.Linear(5, 1)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(self.hidden(self.embedding(tokens.flatten())))
        return self.head(hidden) * torch.sigmoid(self.single(hidden))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda parameters: AdamW(parameters, lr=0.05, fused=False),
    "adamw_fused": lambda parameters: AdamW(parameters, lr=0.05, fused=True),
    "sgd": lambda parameters: SGD(parameters, lr=0.05),
    "sgd_momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "adafactor": Adafactor,
}
CASES = [("ddp", name) for name in OPTIMIZERS] + [("sharded", name) for name in OPTIMIZERS if name != "adafactor"]


def build(wrapping: str, name: str, seed: int) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model: nn.Module = TiedModel()
    if wrapping == "ddp":
        model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.hidden, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, OPTIMIZERS[name](model.parameters())


def update(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(0, 7, (4, 6), generator=generator)
    nn.functional.cross_entropy(model(tokens), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def whole_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Gather every tensor of model and optimizer (collective)."""
    tensors, _ = split_tensors({"model": model_state(model), "optimizer": optimizer_state(model, optimizer)})
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
        for name, tensor in tensors.items()
    }


def is_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return got.keys() == expected.keys() and all(
        got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name]) for name in got
    )


def save(case: tuple[str, str], folder: Path) -> list[str]:
    model, optimizer = build(*case, seed=0)
    collector = StateCollector(model, [optimizer])
    for step in range(2):
        collector.collect({})  # plans without the optimizer's state, which the first update creates
        update(model, optimizer, step)
    collector.collect({})
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    others = {"rank": dist.get_rank(), "window": (torch.tensor(0.25), None, 1.5)}
    written = write_state(collector.collect(others), folder)
    for moment in ("saved", "next"):
        state = whole_state(model, optimizer)
        if dist.get_rank() == 0:
            save_file(state, folder.parent / f"{moment}-{folder.name}.safetensors")
        update(model, optimizer, 2)
    return [path.name for path in written]


def load(case: tuple[str, str], folder: Path) -> dict[str, Any]:
    model, optimizer = build(*case, seed=1 + dist.get_rank() if dist.get_world_size() == 1 else 1)
    others = load_state(model, [optimizer], folder)
    state = whole_state(model, optimizer)
    is_restored = is_same(state, load_file(folder.parent / f"saved-{folder.name}.safetensors"))
    update(model, optimizer, 2)
    state = whole_state(model, optimizer)
    return {
        "is_restored": is_restored,
        "is_next_the_same": is_same(state, load_file(folder.parent / f"next-{folder.name}.safetensors")),
        "others": others == {"rank": 0, "window": (torch.tensor(0.25), None, 1.5)},
    }


def main() -> None:
    result, action, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    act = {"save": save, "load": load}[action]
    outcome = {" ".join(case): act(case, folder / "-".join(case)) for case in CASES}
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, outcome)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
