"""What cannot be saved is found when a run starts; what is unusual is saved and loaded as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from accmt.checkpoint.contents import load_state
from accmt.checkpoint.state_dicts import require_complete
from accmt.errors import CheckpointError, ModuleContractError, WeightsError
from tests.checkpoints import save_state
from tests.low_bit import Rounded, RoundedMomentum
from tests.raising import raises_at
from tests.tables import each
from tests.toys import Linear, make_points, make_trainer


class Net(nn.Linear):
    """One layer, into which tests put what a checkpoint has trouble with."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(3, 1)


class Expanded(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(4).expand(2, 4))


class WithoutBias(Net):
    """Its own `state_dict` leaves a weight out."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        del state[f"{kwargs.get('prefix', '')}bias"]
        return state


class TiedWithoutEither(nn.Sequential):
    """Its own `state_dict` leaves a weight out that it has under two names."""

    def __init__(self):
        super().__init__(nn.Linear(2, 2), nn.Linear(2, 2))
        self[1].weight = self[0].weight

    def state_dict(self, *args, **kwargs):
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "weight" not in name}


class Hooked(Net):
    """A hook leaves a buffer out."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_state_dict_post_hook(drop_mean)


def drop_mean(module, state, prefix, metadata):
    del state[f"{prefix}mean"]


class Extra(Net):
    """Has a state besides its tensors."""

    def get_extra_state(self):
        return {"calls": (1, None)}

    def set_extra_state(self, state):
        self.calls = state["calls"]


class Renaming(Net):
    """Has another name for its weight in what it saves, and knows it when it is loaded."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        state["kernel"] = state.pop("weight").t()
        return state

    def load_state_dict(self, state_dict, strict=True, assign=False):
        state = {**state_dict, "weight": state_dict["kernel"].t()}
        return super().load_state_dict({name: state[name] for name in ("weight", "bias")}, strict, assign)


def test_a_frozen_weight_that_a_model_leaves_out_has_to_be_the_same_at_a_resume(tmp_path):
    models = [WithoutBias() for _ in range(3)]
    for model in models:
        model.bias.requires_grad_(requires_grad=False)
    require_complete(models[0])
    save_state(models[0], [], {}, tmp_path)
    load_state(models[1], [], tmp_path)
    models[2].bias.data += 1
    with raises_at(CheckpointError, "the frozen weights", "bias"):
        load_state(models[2], [], tmp_path)


def step(model, optimizer, number=0):
    torch.manual_seed(number)
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Lookahead(SGD):
    """Goes back to slow weights, which it keeps beside its state, every second step."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.steps = 0
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps % 2 == 0:
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))


class SavedLookahead(Lookahead):
    """Saves its slow weights in entries of its own."""

    def state_dict(self):
        return {**super().state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state):
        self.slow, self.steps = [slow.clone() for slow in state["slow"]], state["steps"]
        super().load_state_dict(state)


def with_optimizer(kind):
    class Module(Linear):
        def get_optimizer(self):
            return kind(self.model.parameters())

    return Module()


def test_what_an_optimizer_adds_to_its_state_is_resumed(tmp_path):
    whole, part = with_optimizer(SavedLookahead), with_optimizer(SavedLookahead)
    make_trainer({"epochs": 2}, "out/whole").fit(whole, make_points())
    make_trainer({"epochs": 2, "max_steps": 5}, "out/part", checkpoint_every="1 step").fit(part, make_points())
    part = with_optimizer(SavedLookahead)
    make_trainer({"epochs": 2}, "out/part", resume=True).fit(part, make_points())
    assert torch.equal(whole.model.weight, part.model.weight)


def test_a_quantized_state_comes_back_as_it_was(tmp_path):
    model, restored = Net(), Net()
    optimizer, loaded = RoundedMomentum(model.parameters()), RoundedMomentum(restored.parameters())
    for number in range(2):
        step(model, optimizer, number)
    save_state(model, [optimizer], {}, tmp_path)
    load_state(restored, [loaded], tmp_path)
    momentum = loaded.state[restored.weight]["momentum"]
    assert type(momentum) is Rounded
    assert torch.equal(momentum.codes, optimizer.state[model.weight]["momentum"].codes)
    for number in range(2, 4):
        step(model, optimizer, number)
        step(restored, loaded, number)
    assert all(map(torch.equal, model.parameters(), restored.parameters()))


def test_a_quantized_weight_comes_back_as_it_was(tmp_path):
    model, restored = Net(), Net()
    model.register_buffer("table", Rounded.of(torch.tensor([1.0, 2.0])))
    restored.register_buffer("table", Rounded.of(torch.tensor([3.0, 5.0])))
    save_state(model, [], {}, tmp_path)
    restored.table.dequantize()
    with raises_at(CheckpointError, "the model", "table", "tests.low_bit:Rounded"):
        load_state(Plain(), [], tmp_path)


class Plain(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2))


class Toy(Linear):
    def __init__(self, model):
        self.model = model


@each(("kind", "name"), [(WithoutBias, "bias"), (Hooked, "mean"), (TiedWithoutEither, "0.weight, 1.weight")])
def test_a_model_that_leaves_out_what_it_trains_is_refused_before_the_first_step(kind, name, tmp_path):
    class Never(Toy):
        def training_step(self, batch):
            raise AssertionError

    with raises_at(CheckpointError, "self.model", name):
        make_trainer(checkpoint_every="epoch").fit(Never(kind()), make_points())


def test_a_run_may_leave_the_trial_out(tmp_path):
    make_trainer(checkpoint_every="epoch", failures={"preflight": False}).fit(Toy(Hooked()), make_points())
    assert list(tmp_path.rglob("step-*"))


def test_a_module_whose_state_cannot_be_stored_is_refused_before_the_first_step(tmp_path):
    class Odd(Linear):
        def state_dict(self):
            return {"seen": object()}

        def training_step(self, batch):
            raise AssertionError

    with raises_at(CheckpointError, "parts.module.seen"):
        make_trainer(checkpoint_every="epoch").fit(Odd(), make_points())


def test_a_growing_buffer_is_found_at_the_save_where_it_grew(tmp_path):
    class Growing(Toy):
        def training_step(self, batch):
            if self.state.global_step == 2:
                self.unwrapped_model.ids = torch.arange(9)
            return self.step(batch)

    trainer = make_trainer(checkpoint_every="1 step")
    with raises_at(CheckpointError, "the state of the model", "ids is (9,)"):
        trainer.fit(Growing(Expanded()), make_points())
    assert trainer.state.global_step == 3
    assert {path.name for path in tmp_path.rglob("step-*")} == {"step-00000002"}


def test_a_layer_added_during_a_run_is_refused_with_where_to_add_it(tmp_path):
    class Adding(Toy):
        def on_epoch_start(self):
            self.model.more = nn.Linear(1, 1).requires_grad_(False)

    with raises_at(CheckpointError, "the state of the model", "more.weight", do="before fit"):
        make_trainer(checkpoint_every="1 step").fit(Adding(Net()), make_points())


def test_an_expanded_buffer_an_extra_state_and_other_names_are_resumed(tmp_path):
    for kind in (Expanded, Extra, Renaming):
        folder = f"out/{kind.__name__}"
        make_trainer(model_path=folder, checkpoint_every="epoch").fit(Toy(kind()), make_points())
        again = make_trainer({"epochs": 2}, folder, checkpoint_every="epoch", resume=True)
        again.fit(Toy(kind()), make_points())
        assert again.state.epoch == 2


def test_lazy_layers_are_refused_with_what_to_do(tmp_path):
    with raises_at(ModuleContractError, "Toy", "lazy layers", "(weight, bias)", do="self.model(torch"):
        make_trainer().fit(Toy(nn.LazyLinear(1)), make_points(), make_points())


def test_what_a_model_folder_cannot_hold_is_refused_before_the_first_step(tmp_path):
    class Complex(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("rotation", torch.ones(2, dtype=torch.complex128))

    for model, where, name in ((Extra(), "weights to save", "_extra_state"), (Complex(), "rotation", "complex128")):
        trainer = make_trainer(checkpoint_every=None, model_saving="best_valid_loss")
        with raises_at(WeightsError, where, name):
            trainer.fit(Toy(model), make_points(), make_points())
        assert trainer.state.global_step == 0


VIEWS = {
    "the same tensor": lambda scale: scale,
    "a view": lambda scale: scale[1:],
    "expanded": lambda scale: scale.expand(4, 3),
    "one number, expanded": lambda scale: scale[:1].expand(5),
}


class Views(Net):
    """A forward pass changes one buffer, and reads another that shares its memory."""

    def __init__(self, view):
        super().__init__()
        self.register_buffer("scale", torch.zeros(3))
        self.register_buffer("view", view(self.scale))

    def forward(self, x):
        if self.training:
            self.scale.add_(x.detach().mean(0))
        return super().forward(x) * (1 + self.view.mean())


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("preflight", [True, False], ids=["tried", "not tried"])
def test_buffers_that_share_memory_stay_so_in_a_run_and_after_a_resume(view, preflight, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(path, epochs, **settings):
        module = Linear()
        module.model = Views(VIEWS[view])
        failures = {"preflight": preflight}
        trainer = make_trainer({"epochs": epochs, "batch_size": 4}, path, failures=failures, **settings)
        trainer.fit(module, make_points())
        return module.model

    whole = run("out/a", 2, checkpoint_every="epoch")
    run("out/b", 1, checkpoint_every="epoch")
    resumed = run("out/b", 2, checkpoint_every="epoch", resume=True)
    for model in (whole, resumed):
        assert model.scale.any()
        assert torch.equal(model.view, VIEWS[view](model.scale))
        assert model.view.untyped_storage().data_ptr() == model.scale.untyped_storage().data_ptr()
    assert all(map(torch.equal, whole.state_dict().values(), resumed.state_dict().values()))
