"""Saving and loading a state in one process; several processes: tests/distributed/test_checkpoints.py."""

from __future__ import annotations

import copy
import errno
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader, load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, AdamW
from transformers import Adafactor

from accmt.checkpoint.contents import STATE_FILE, StateCollector, load_state, require_numbers, write_state
from accmt.checkpoint.state_dicts import split_tensors
from accmt.errors import CheckpointCorruptError, CheckpointError, ModuleContractError
from tests.checkpoints import save_state
from tests.raising import raises_at

OPTIMIZERS = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.05, fused=False),
    "AdamW fused": lambda parameters: AdamW(parameters, lr=0.05, fused=True),
    "AdamW amsgrad": lambda parameters: AdamW(parameters, lr=torch.tensor(0.05), amsgrad=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.05),
    "SGD momentum": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "Adafactor": lambda parameters: Adafactor(parameters, weight_decay=0.1),
    "LBFGS": lambda parameters: LBFGS(parameters, lr=0.05, max_iter=2),
}


class Model(nn.Module):
    """Weights, a scalar weight, buffers that training changes, one that is not kept."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, inputs):
        return self.layers(inputs) * self.scale


def build(make_optimizer=OPTIMIZERS["AdamW"], seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    model = Model().to(dtype)
    return model, make_optimizer(model.parameters())


def update(model, optimizer, step):
    parameter = next(model.parameters())
    inputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(parameter.dtype)

    @torch.enable_grad()  # Adafactor of transformers calls it without
    def closure():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()


def content(model, optimizer):
    """Return copies of all tensors and the rest of both."""
    tensors, rest = split_tensors({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()})
    return {name: tensor.clone() for name, tensor in tensors.items()}, copy.deepcopy(rest)


def assert_same(got, expected):
    assert got[1] == expected[1]
    assert got[0].keys() == expected[0].keys()
    for name, tensor in expected[0].items():
        assert got[0][name].dtype == tensor.dtype, name
        assert torch.equal(got[0][name], tensor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_all_later_updates_are_bit_for_bit_those_of_the_unbroken_run(name, dtype, tmp_path):
    model, optimizer = build(OPTIMIZERS[name], dtype=dtype)
    for step in range(3):
        update(model, optimizer, step)
    save_state(model, [optimizer], {}, tmp_path)
    restored, its_optimizer = build(OPTIMIZERS[name], seed=1, dtype=dtype)
    load_state(restored, [its_optimizer], tmp_path)
    assert_same(content(restored, its_optimizer), content(model, optimizer))
    for step in range(3, 6):
        update(model, optimizer, step)
        update(restored, its_optimizer, step)
    assert_same(content(restored, its_optimizer), content(model, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_saving_and_loading_leave_a_fresh_optimizer_fresh(name, tmp_path):
    model, optimizer = build(OPTIMIZERS[name])
    steps = []
    optimizer.register_step_pre_hook(lambda *args: steps.append("before"))
    optimizer.register_step_post_hook(lambda *args: steps.append("after"))
    before = content(model, optimizer)
    save_state(model, [optimizer], {}, tmp_path)
    load_state(model, [optimizer], tmp_path)
    assert steps == []
    assert not optimizer.state
    assert_same(content(model, optimizer), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_fresh_state_replaces_that_of_an_optimizer_that_has_stepped(tmp_path):
    model, optimizer = build()
    before = content(model, optimizer)
    save_state(model, [optimizer], {}, tmp_path)
    update(model, optimizer, 0)
    load_state(model, [optimizer], tmp_path)
    assert_same(content(model, optimizer), before)


def test_parameters_that_never_had_a_gradient_and_frozen_ones_have_no_state(tmp_path):
    def build_partly(seed):
        model, _ = build(seed=seed)
        model.layers[0].weight.requires_grad_(False)
        model.unused = nn.Linear(2, 2)
        return model, AdamW(model.parameters())

    model, optimizer = build_partly(0)
    update(model, optimizer, 0)
    save_state(model, [optimizer], {}, tmp_path)
    restored, its_optimizer = build_partly(1)
    load_state(restored, [its_optimizer], tmp_path)
    assert_same(content(restored, its_optimizer), content(model, optimizer))


def test_several_optimizers_with_groups_are_restored_each(tmp_path):
    def build_two(seed, rates):
        model, _ = build(seed=seed)
        groups = [
            {"params": list(layer.parameters()), "lr": rate} for layer, rate in zip(model.layers, rates, strict=True)
        ]
        return model, [AdamW(groups[:2]), SGD([groups[2], {"params": [model.scale], "momentum": 0.9}], lr=0.1)]

    model, optimizers = build_two(0, (0.1, 0.2, 0.3))
    for optimizer in optimizers:
        update(model, optimizer, 0)
    save_state(model, optimizers, {}, tmp_path)
    restored, theirs = build_two(1, (0.7, 0.8, 0.9))
    load_state(restored, theirs, tmp_path)
    for optimizer, its in zip(optimizers, theirs, strict=True):
        assert_same(content(restored, its), content(model, optimizer))


class Stateful(Model):
    """A model with a state beside its tensors."""

    def __init__(self):
        super().__init__()
        self.extra = {}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_a_modules_extra_state_is_kept(tmp_path):
    model, restored = Stateful(), Stateful()
    model.extra = {"scale": (1.5, None), "amax": torch.tensor([3.0])}
    save_state(model, [], {}, tmp_path)
    load_state(restored, [], tmp_path)
    assert restored.extra["scale"] == (1.5, None)
    assert torch.equal(restored.extra["amax"], torch.tensor([3.0]))


class Shared(nn.Module):
    """One module under two names, and tied weights."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = self.first
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, inputs):
        return self.tied(self.second(self.first(inputs)))


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "plain": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "DDP of compiled": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("loaded_as", WRAPPERS)
@pytest.mark.parametrize("saved_as", WRAPPERS)
@pytest.mark.usefixtures("process_group")
def test_wrappers_leave_no_trace_in_the_names_and_shared_weights_are_stored_once(saved_as, loaded_as, tmp_path):
    folder = tmp_path / "state"
    folder.mkdir()
    model, restored = WRAPPERS[saved_as](Shared()), WRAPPERS[loaded_as](Shared())
    optimizer, its_optimizer = AdamW(model.parameters()), AdamW(restored.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    save_state(model, [optimizer], {}, folder)
    (file,) = folder.glob("*.safetensors")
    names = {name for name in load_file(file) if name.startswith("model.")}
    assert names == {"model.first.weight", "model.first.bias"}
    load_state(restored, [its_optimizer], folder)
    for got, expected in zip(restored.parameters(), model.parameters(), strict=True):
        assert torch.equal(got, expected)
    assert_same(content(nn.Module(), its_optimizer), content(nn.Module(), optimizer))
    assert restored.tied.weight is restored.first.weight if loaded_as == "plain" else True


def test_torchs_own_reader_loads_the_tensors(tmp_path):
    model, optimizer = build()
    update(model, optimizer, 0)
    save_state(model, [optimizer], {}, tmp_path)
    got = {"model.scale": torch.zeros(()), "optimizers.0.state.layers.0.weight.exp_avg": torch.zeros(6, 4)}
    with pytest.warns(UserWarning, match="single process"):
        load(got, storage_reader=HuggingFaceStorageReader(str(tmp_path)), planner=DefaultLoadPlanner())
    assert torch.equal(got["model.scale"], model.scale)
    moment = optimizer.state[model.layers[0].weight]["exp_avg"]
    assert torch.equal(got["optimizers.0.state.layers.0.weight.exp_avg"], moment)


def test_an_optimizer_of_parameters_outside_the_model_is_refused(tmp_path):
    model, _ = build()
    optimizer = SGD([*model.parameters(), nn.Parameter(torch.ones(2, 3))], lr=0.1)
    with raises_at(ModuleContractError, "SGD (optimizer 0), param_groups[0]"):
        save_state(model, [optimizer], {}, tmp_path)


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_sharding_without_names_for_the_parameters_is_refused():
    model = FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    with raises_at(CheckpointError, "FullyShardedDataParallel", do="fsdp_version: 2"):
        StateCollector(model, [])


@pytest.mark.usefixtures("process_group")
def test_a_sharded_tensor_outside_the_model_comes_back_whole(tmp_path):
    mesh = init_device_mesh("cpu", (1,))
    others = {"module": {"average": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])}}
    model = nn.Linear(2, 2)
    write_state(StateCollector(model, []).collect(others), tmp_path)
    assert load_state(model, [], tmp_path)["module"]["average"].tolist() == [0, 1, 2, 3]


class TestLoadingIntoSomethingElse:
    @pytest.fixture
    def folder(self, tmp_path):
        model, optimizer = build()
        update(model, optimizer, 0)
        save_state(model, [optimizer], {}, tmp_path)
        return tmp_path

    def test_other_layers_are_named(self, folder):
        model, optimizer = build()
        model.layers[2] = nn.Linear(6, 4)
        del model.layers[0]._parameters["bias"]
        model.head = nn.Linear(1, 1, bias=False)
        weights = copy.deepcopy(model.state_dict())
        with raises_at(CheckpointError, "the model", "4 differences") as caught:
            load_state(model, [AdamW(model.parameters())], folder)
        assert "layers.2.weight is (4, 6) torch.float32 in the model, (3, 6) torch.float32 in the c" in str(
            caught.value
        )
        assert "head.weight is not in the checkpoint" in str(caught.value)
        assert "layers.0.bias is not in the model" in str(caught.value)
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())

    def test_another_number_of_optimizers_is_refused(self, folder):
        model, optimizer = build()
        with raises_at(CheckpointError, "the optimizers", "0", expected="1"):
            load_state(model, [], folder)

    def test_another_number_of_groups_is_refused(self, folder):
        model, _ = build()
        optimizer = AdamW([{"params": model.layers.parameters()}, {"params": [model.scale]}])
        with raises_at(CheckpointError, "AdamW", "group 0: scale"):
            load_state(model, [optimizer], folder)
        with raises_at(CheckpointError, "AdamW", "2 parameter groups"):
            load_state(model, [AdamW([{"params": model.parameters()}, {"params": []}])], folder)


class TestDamage:
    @pytest.fixture
    def folder(self, tmp_path):
        model, optimizer = build()
        update(model, optimizer, 0)
        save_state(model, [optimizer], {}, tmp_path)
        return tmp_path

    def load(self, folder):
        model, optimizer = build(seed=1)
        load_state(model, [optimizer], folder)

    def test_a_missing_file_of_tensors_is_named(self, folder):
        next(folder.glob("*.safetensors")).unlink()
        with raises_at(CheckpointCorruptError, str(folder), "missing: tensors-00001-of-00001.safetensors"):
            self.load(folder)

    def test_a_file_of_another_save_is_named(self, folder):
        save_file({"model.scale": torch.tensor(9.0)}, folder / "tensors-00002-of-00002.safetensors")
        with raises_at(CheckpointCorruptError, str(folder), "unexpected: tensors-00002-of-00002.safetensors"):
            self.load(folder)

    def test_a_file_without_some_tensors_is_named(self, folder):
        save_file({"model.layers.0.weight": torch.zeros(6, 4)}, next(folder.glob("*.safetensors")))
        with raises_at(CheckpointCorruptError, str(folder), "buffers.cache", "model.layers.0.bias"):
            self.load(folder)

    def test_a_truncated_file_is_a_damaged_checkpoint(self, folder):
        file = next(folder.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-10])
        with raises_at(CheckpointCorruptError, str(folder), "header"):
            self.load(folder)

    def test_a_truncated_state_is_a_damaged_checkpoint(self, folder):
        (folder / STATE_FILE).write_text("{")
        with raises_at(CheckpointCorruptError, "a checkpoint's state", "JSON"):
            self.load(folder)


def test_an_error_of_the_disk_keeps_its_number(tmp_path):
    model, optimizer = build()
    with pytest.raises(FileNotFoundError) as caught:
        save_state(model, [optimizer], {}, tmp_path / "absent")
    assert caught.value.errno == errno.ENOENT


def test_nan_in_a_weight_or_in_an_optimizers_state_is_refused_and_infinity_is_not():
    model, optimizer = build()
    update(model, optimizer, 0)
    collector = StateCollector(model, [optimizer])
    optimizer.state[model.layers[0].weight]["exp_avg"][1, 1] = math.inf
    require_numbers(collector.collect({"parts": {"module": torch.full((3,), math.nan)}, "metrics": {"loss": math.nan}}))
    for tensor, name in (
        (optimizer.state[model.layers[2].weight]["exp_avg_sq"], "layers.2.weight.exp_avg_sq"),
        (model.layers[0].weight.data, "model.layers.0.weight"),
    ):
        before = tensor[0, 2].item()
        tensor[0, 2] = math.nan
        with raises_at(CheckpointError, name):
            require_numbers(collector.collect({}))
        tensor[0, 2] = before


@pytest.mark.usefixtures("process_group")
def test_communication_hooks_of_torch_with_a_state_are_rejected():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    def collect(state, hook):
        model = DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook(state, hook)
        return StateCollector(model, [SGD(model.parameters(), lr=0.1)]).collect({})

    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    with raises_at(CheckpointError, "checkpoints", "PowerSGDState"):
        collect(power, powerSGD_hook.powerSGD_hook)
    collect(None, default_hooks.fp16_compress_hook)
