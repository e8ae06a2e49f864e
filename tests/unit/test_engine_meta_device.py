"""First values of a model without any: which parts are drawn whole, and what is rejected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from accmt.engine.meta_device import as_wholes, fill
from accmt.errors import ModuleContractError
from tests.raising import raises_at


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Deep(nn.Module):
    """Has a child with a child of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2, 2))


def shard(model: nn.Module) -> nn.Module:
    """Make each parameter a part, of which this process has all."""
    mesh = init_device_mesh("cpu", (1,))
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
    return model


def test_a_part_and_its_children_are_whole_while_they_are_drawn(alone: None) -> None:
    model = shard(nn.Sequential(nn.Linear(2, 2)))
    own = model[0].weight
    before = own.full_tensor()
    with as_wholes(model):
        assert not isinstance(model[0].weight, DTensor)
        assert torch.equal(model[0].weight, before)
        nn.init.ones_(model[0].weight)
    assert model[0].weight is own
    assert own.full_tensor().tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_what_each_process_would_draw_by_itself_is_an_error(alone: None) -> None:
    model = shard(Deep())
    with raises_at(ModuleContractError, "self.model, built on the meta device"), as_wholes(model):
        nn.init.normal_(model.layer[0].weight)


def test_parts_are_drawn_in_the_order_in_which_they_were_built() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.weight = nn.Parameter(torch.empty(3))
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.normal_(self.weight)

    torch.manual_seed(0)
    expected = Outer()
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Outer()
    fill(model, torch.device("cpu"))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), expected.parameters(), strict=True))
