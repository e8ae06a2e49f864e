"""Which processes hold one model together, and what concerns parameters of several kinds, on faked processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from accmt.addons import tensor_parallel
from accmt.addons.bad_samples import without_bad_samples
from accmt.addons.tensor_parallel import beginning_anew
from accmt.data import BadSample, MicroBatch, SourceOptions
from accmt.engine.shards import as_shard, untie
from accmt.engine.tensor_parallel import ranks_of_batch
from accmt.errors import DataError, ModuleContractError
from accmt.optimization import ChainedOptimizer, build_optimizer
from accmt.optimization.optimizers import mesh_by_mesh
from accmt.options import HyperParameters
from accmt.processes import data_index, each_once, is_counted, num_data_processes, share_batches, sum_over_data
from tests.raising import raises_at


@pytest.fixture(params=[0, 3])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """Let this be one of four processes, whose communication does nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=4)
    yield request.param
    share_batches(1)
    dist.destroy_process_group()


def make_split(shape: Sequence[int], names: Sequence[str] | None) -> nn.Module:
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=None if names is None else tuple(names))
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
    return parallelize_module(model, mesh if names is None else mesh["tp"], {"0": ColwiseParallel()})


@pytest.mark.parametrize(
    ("shape", "names", "size"), [((2, 2), ("dp", "tp"), 2), ((4,), None, 4), ((1, 4), ("dp", "tp"), 4)]
)
def test_a_split_model_shows_which_processes_share_a_batch(
    rank: int, shape: Sequence[int], names: Sequence[str] | None, size: int
) -> None:
    model = make_split(shape, names)
    assert ranks_of_batch(model, 1) == ranks_of_batch(model, size) == size
    share_batches(size)
    assert (num_data_processes(), data_index(), is_counted()) == (4 // size, rank // size, rank == 0)
    assert each_once(list(range(4))) == list(range(0, 4, size))


def test_processes_of_a_split_that_are_not_neighbours_are_an_error(rank: int) -> None:
    with raises_at(ModuleContractError, "self.model") as raised:
        ranks_of_batch(make_split((2, 2), ("tp", "dp")), 1)
    assert "init_device_mesh(device, (shard, tp)" in str(raised.value)


def test_another_size_than_the_model_comes_with_is_an_error(rank: int) -> None:
    with raises_at(ModuleContractError, 'Trainer(parallelism={"tp": ...})'):
        ranks_of_batch(make_split((2, 2), ("dp", "tp")), 4)


def test_a_sum_over_the_data_takes_what_is_shared_once(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    share_batches(2)
    monkeypatch.setattr("accmt.processes.sum_over_processes", lambda values: values)
    assert sum_over_data((3.0, 1.0)) == ((3.0, 1.0) if rank == 0 else [0.0, 0.0])


@pytest.mark.parametrize("is_chained", [False, True])
def test_tensors_of_several_kinds_take_fused_steps_one_after_the_other(rank: int, is_chained: bool) -> None:
    stepped = []
    for written in ({}, {"fused": False}):
        model = make_split((4,), None)
        for parameter in model.parameters():  # nothing was sent
            nn.init.constant_(parameter, 0.25)
        hps = HyperParameters(optim="AdamW", optim_kwargs={"lr": 0.1, **written})
        optimizer = build_optimizer(hps, model, as_trained=as_shard)
        assert optimizer.defaults["fused"] is (written == {})
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        groups = optimizer.param_groups
        if is_chained:
            chained = ChainedOptimizer([optimizer])
            chained.is_mixed = True
            chained.step()
        else:
            with mesh_by_mesh(optimizer):
                optimizer.step()
            assert optimizer.param_groups is groups
        assert len(optimizer.param_groups[0]["params"]) == len(optimizer.state) == 4
        stepped.append([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()])
    assert all(torch.allclose(*pair, rtol=1e-6) for pair in zip(*stepped, strict=True))


def test_a_backward_pass_adds_what_was_there_before(rank: int) -> None:
    first, second, unused = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    first.grad = torch.ones(1)
    unused.grad = torch.ones(1)
    with beginning_anew([first, second, unused]):
        assert first.grad is None
        first.grad, second.grad = torch.full((1,), 2.0), torch.full((1,), 5.0)
    assert [float(one.grad) for one in (first, second, unused) if one.grad is not None] == [3, 5, 1]


def test_tied_weights_that_a_plan_splits_in_two_ways_are_an_error(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    model = nn.ModuleDict({"first": nn.Linear(4, 4, bias=False), "second": nn.Linear(4, 4, bias=False)})
    model["second"].weight = model["first"].weight
    tied = untie(model)
    assert model["second"].weight is not model["first"].weight
    tensor_parallel._tie_again(model, tied)
    assert model["second"].weight is model["first"].weight
    tied = untie(model)
    parallelize_module(model, mesh, {"second": ColwiseParallel()})
    with raises_at(ModuleContractError, 'Trainer(parallelism={"tp": ...})'):
        tensor_parallel._tie_again(model, tied)


def test_samples_that_one_process_of_a_group_could_read_are_an_error(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_batches(2)

    def read() -> list[MicroBatch]:
        own = MicroBatch(0, (None, [BadSample(7, "gone")]), own_samples=1)
        options = SourceOptions(purpose="validate", batch_size=1)
        return list(without_bad_samples(iter([own]), options, is_whole_epoch=True))

    monkeypatch.setattr("accmt.addons.bad_samples.gather_objects", lambda value: [[], [], value, value])
    assert [micro_batch.num_bad for micro_batch in read()] == [1]
    monkeypatch.setattr("accmt.addons.bad_samples.gather_objects", lambda value: [[], [], [], value])
    with raises_at(DataError, "the data", "[7] on process 3"):
        read()
