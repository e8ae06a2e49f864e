import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from accmt.checkpoint.contents import StateCollector, load_state, write_state
from accmt.checkpoint.frozen import FrozenWeights, _sums, digest_of, find_frozen
from accmt.checkpoint.retention import estimate_size
from accmt.errors import CheckpointError
from tests.checkpoints import save_state
from tests.raising import raises_at


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)
        self.head_again = nn.Linear(6, 4, bias=False)
        self.head_again.weight = self.head.weight

    def forward(self, x):
        return self.head(self.norm(self.first(x)))


def build(*adapters, seed=0):
    torch.manual_seed(0)
    base = Base()
    torch.manual_seed(seed)
    first, *others = adapters or ("default",)
    config = LoraConfig(r=2, target_modules=["first"], modules_to_save=["norm"])
    model = get_peft_model(base, config, adapter_name=first)
    for name in others:
        model.add_adapter(name, config)
    return model


def optimizer_of(model):
    return torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])


def update(model, optimizer):
    model(torch.ones(3, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_only_what_an_adapter_is_around_is_left_out():
    prefix = "base_model.model."
    assert set(find_frozen(build())) == {
        *(f"{prefix}first.base_layer.{name}" for name in ("weight", "bias")),
        *(f"{prefix}norm.original_module.{name}" for name in ("weight", "bias")),
        *(f"{prefix}head.{name}" for name in ("weight", "bias")),
        f"{prefix}head_again.weight",
    }


def test_a_weight_that_is_trained_or_changed_after_all_is_no_longer_left_out():
    model = build()
    frozen = FrozenWeights(model)
    head = model.base_model.model.head
    assert len(frozen.digests()) == 7
    head.bias.requires_grad_()
    with torch.no_grad():
        head.weight.mul_(2)
    assert frozen.digests().keys() == {name for name in find_frozen(model) if "head" not in name}


def test_a_weight_that_is_changed_through_its_data_is_no_longer_left_out(tmp_path):
    model = build()
    frozen = FrozenWeights(model)
    layer = model.base_model.model.first
    layer.base_layer.weight.data += layer.get_delta_weight("default") + 1  # as PEFT's merge() does
    model.base_model.model.head.bias.data[0] = 7
    changed = {"base_model.model.first.base_layer.weight", "base_model.model.head.bias"}
    assert find_frozen(model).keys() - frozen.digests().keys() == changed
    layer.base_layer.weight.data -= 1
    assert find_frozen(model).keys() - frozen.digests().keys() == changed


def test_a_changed_base_is_resumed(tmp_path):
    model, restored = build(), build()
    collector = StateCollector(model, [])
    model.base_model.model.first.base_layer.weight.data *= 2
    write_state(collector.collect({}), tmp_path)
    load_state(restored, [], tmp_path)
    assert all(map(torch.equal, model.state_dict().values(), restored.state_dict().values()))


def test_the_checksum_on_a_device_sees_every_bit_and_every_place():
    values = torch.arange(1, 9, dtype=torch.float32)
    others = [values.flip(0), values.clone().index_fill_(0, torch.tensor([3]), -4.0), values.roll(1), values[:7]]
    sums = [_sums(tensor) for tensor in (values, *others)]
    assert len(set(map(tuple, sums))) == len(sums)
    assert _sums(values.clone()) == sums[0]


def test_what_a_module_keeps_with_its_frozen_weight_is_left_out_with_it():
    class Quantized(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}weight.scales"] = self.scales

    base = Base()
    base.head = Quantized(6, 4)
    base.head_again.weight = base.head.weight
    base.head.scales = torch.ones(2)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["first"]))
    frozen, name = FrozenWeights(model), "base_model.model.head.weight.scales"
    assert name in frozen.digests()
    base.head.scales += 1
    assert name not in frozen.digests()


def test_the_digest_tells_values_dtypes_and_shapes_apart():
    tensors = [
        torch.ones(4),
        torch.zeros(4),
        torch.ones(4, dtype=torch.int32),
        torch.ones(2, 2),
        torch.ones(4).bfloat16(),
    ]
    assert len({digest_of(tensor) for tensor in tensors}) == len(tensors)
    assert digest_of(torch.ones(2, 2).t()) == digest_of(torch.ones(2, 2))


def test_a_state_comes_back_without_its_frozen_weights_being_stored(tmp_path):
    model = build()
    optimizer = optimizer_of(model)
    update(model, optimizer)
    save_state(model, [optimizer], {}, tmp_path)
    stored = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    other = build(seed=1)
    restored = optimizer_of(other)
    load_state(other, [restored], tmp_path)
    for target in (model, other):
        update(target, optimizer if target is model else restored)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    assert "lora_A" in (tmp_path / "state.json").read_text()
    whole = tmp_path / "whole"
    whole.mkdir()
    for weight in model.parameters():
        weight.requires_grad_()
    write_state(StateCollector(model, [optimizer]).collect({}), whole)
    assert stored < sum(path.stat().st_size for path in whole.glob("*.safetensors"))


def test_another_model_under_the_adapter_is_refused_by_name(tmp_path):
    save_state(build(), [], {}, tmp_path)
    other = build()
    with torch.no_grad():
        other.base_model.model.head.weight[0, 0] += 1e-6
    with raises_at(CheckpointError, "the frozen weights", "2 of 7 ", "head.weight, ", "head_again.weight"):
        load_state(other, [], tmp_path)


def test_the_estimated_size_is_that_of_what_is_stored(tmp_path):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())  # which holds frozen parameters too
    estimated = estimate_size(model, optimizer)
    update(model, optimizer)
    pieces = StateCollector(model, [optimizer]).collect({}).pieces
    steps = 4 * sum(name.endswith(".step") for name in pieces.tensors)
    assert estimated == sum(tensor.nbytes for tensor in pieces.tensors.values()) - steps
