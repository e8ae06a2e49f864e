"""Parameters in groups, and optimizers that are chained."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
)

from accmt import ChainedOptimizer, HyperParameters, create_optimizer
from accmt.addons.parameter_groups import kinds_of
from accmt.errors import ArgumentError, HyperParameterError
from accmt.optimization import build_optimizer, build_scheduler
from accmt.options.optimizer_and_scheduler_names import scheduler_names
from tests.raising import raises_at

SMALL = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20}


def bert():
    return BertForSequenceClassification(BertConfig(num_hidden_layers=2, **SMALL))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=2, vocab_size=20))


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SMALL, **more))


def t5():
    return T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=16, num_heads=2, num_layers=2, vocab_size=20))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.final = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.head(self.final(x))


def built(model, **optim_kwargs):
    return build_optimizer(HyperParameters(optim="AdamW", optim_kwargs={"lr": 1.0, **optim_kwargs}), model)


def table(model, optimizer):
    """Return for each parameter its rate and its decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        names[parameter]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("make", [bert, gpt2, llama, t5])
def test_no_decay_spares_what_transformers_spares(make, tmp_path):
    model = make()
    decayed = {
        name
        for name, (_, decay) in table(model, built(model, weight_decay=0.1, no_decay=["bias", "norm"])).items()
        if decay
    }
    assert decayed == set(Trainer.get_decay_parameter_names(None, model)) & {n for n, _ in model.named_parameters()}


def test_the_first_group_that_fits_has_a_parameter():
    model = Net()
    optimizer = built(
        model,
        groups=[
            {"match": r"^head\.", "lr": 5.0},
            {"kind": "bias", "weight_decay": 0.0},
            {"match": [r"layers\.0", r"layers\.1"], "kind": "matrix", "lr": 0.5},
        ],
        weight_decay=0.1,
    )
    found = table(model, optimizer)
    assert found["head.weight"] == found["head.bias"] == (5.0, 0.1)
    assert found["layers.0.bias"] == found["final.bias"] == (1.0, 0.0)
    assert found["layers.0.weight"] == found["layers.1.weight"] == (0.5, 0.1)
    assert found["layers.2.weight"] == found["embed.weight"] == found["final.weight"] == (1.0, 0.1)
    assert optimizer.param_groups[0]["lr"] == 1.0  # the default is the one that a progress bar shows


def test_layer_decay_lowers_the_rate_with_each_layer_from_the_head():
    model = Net()
    found = {name: rate for name, (rate, _) in table(model, built(model, layer_decay=0.5)).items()}
    assert found["head.weight"] == found["final.weight"] == 1.0
    assert [found[f"layers.{i}.weight"] for i in range(3)] == [0.125, 0.25, 0.5]
    assert found["embed.weight"] == 0.0625


@pytest.mark.parametrize(("make", "stack"), [(bert, "encoder.layer"), (gpt2, "transformer.h"), (llama, "model.layers")])
def test_layer_decay_finds_the_layers_of_transformers(make, stack):
    model = make()
    found = {name: rate for name, (rate, _) in table(model, built(model, layer_decay=0.5)).items()}
    assert {rate for name, rate in found.items() if f"{stack}.1." in name} == {0.5}
    assert {rate for name, rate in found.items() if f"{stack}.0." in name} == {0.25}
    assert {rate for name, rate in found.items() if "embed" in name or "wte" in name} == {0.125}


@pytest.mark.parametrize(
    ("make", "got"),
    [(t5, "2 lists of layers: encoder.block, decoder.block"), (lambda: nn.Linear(2, 2), "0 lists of layers")],
)
def test_layer_decay_needs_one_list_of_layers(make, got):
    with raises_at(HyperParameterError, "optim.layer_decay", got):
        built(make(), layer_decay=0.5)


def test_kinds_of_parameters():
    model = llama(tie_word_embeddings=False)
    kinds = kinds_of(model)
    of = {name: kinds[parameter] for name, parameter in model.named_parameters()}
    assert of["model.embed_tokens.weight"] == {"embedding"}
    assert of["lm_head.weight"] == set()  # no matrix: Muon is not meant for the output layer
    assert of["model.layers.0.self_attn.q_proj.weight"] == {"matrix"}
    assert of["model.norm.weight"] == of["model.layers.1.input_layernorm.weight"] == {"norm"}
    net = kinds_of(Net())
    assert [sorted(found) for found in net.values()][-4:] == [["norm"], ["bias", "norm"], ["matrix"], ["bias"]]


def test_adapters_of_peft_are_a_kind():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(bert(), LoraConfig(target_modules=["query"], task_type="SEQ_CLS"))
    adapters = {name for name, parameter in model.named_parameters() if "adapter" in kinds_of(model)[parameter]}
    assert adapters == {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("groups", "place", "got", "do"),
    [
        ([{"match": "haed", "lr": 2}], "optim.groups.0.match", "'haed'", "head.weight"),
        ([{"match": "head", "lr": 2}, {"match": r"head\.weight", "lr": 3}], "optim.groups.1", r"head\.weight: ", ""),
        ([{"kind": "adapter", "lr": 2}], "optim.groups.0", "adapter: ", ""),
        ([{"match": "", "type": "SGD", "lr": 2}], "optim", "AdamW: ", ""),
    ],
)
def test_groups_that_do_not_fit_the_model(groups, place, got, do):
    with raises_at(HyperParameterError, place, got, do=do):
        built(Net(), groups=groups)


def test_a_tied_weight_has_one_optimizer():
    model = gpt2()
    groups = [{"match": "wte", "type": "SGD", "lr": 1}, {"match": "lm_head", "type": "Adam", "lr": 1}]
    with raises_at(HyperParameterError, "HyperParameters optim.groups"):
        built(model, groups=groups)
    found = built(model, groups=[{"match": ["wte", "lm_head"], "type": "SGD", "lr": 1}])
    assert [type(one).__name__ for one in found._chained] == ["AdamW", "SGD"]


def test_an_argument_that_cannot_differ_by_group_is_an_error():
    class Fixed(torch.optim.SGD):
        def __init__(self, params, lr=0.1, smoothing=0.5):
            super().__init__(params, lr=lr)

    hps = HyperParameters(optim=Fixed, optim_kwargs={"groups": [{"match": "head", "smoothing": 0.1}]})
    with raises_at(HyperParameterError, "HyperParameters optim"):
        build_optimizer(hps, Net())


MUON = [{"kind": "matrix", "type": "Muon", "lr": 0.05, "weight_decay": 0.1}]


def backward(model, step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(0, 6, (8, 5), generator=generator)
    nn.functional.cross_entropy(model(inputs), inputs[:, 0] % 2).backward()


def test_chained_optimizers_step_as_each_by_itself():
    torch.manual_seed(0)
    model = Net()
    reference = deepcopy(model)
    chained = built(model, groups=MUON, no_decay=["bias"], weight_decay=0.1)
    matrices = [p for n, p in reference.named_parameters() if p.dim() == 2 and not n.startswith("embed")]
    biases = [p for n, p in reference.named_parameters() if "bias" in n]
    rest = [p for n, p in reference.named_parameters() if n in ("embed.weight", "final.weight")]
    adam = torch.optim.AdamW(
        [{"params": rest}, {"params": biases, "weight_decay": 0.0}], lr=1.0, weight_decay=0.1, fused=True
    )
    muon = torch.optim.Muon(matrices, lr=0.05, weight_decay=0.1)
    for step in range(5):
        for one, optimizers in ((model, [chained]), (reference, [adam, muon])):
            backward(one, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_one_scheduler_drives_all_groups():
    hps = HyperParameters(
        optim="AdamW",
        optim_kwargs={"lr": 1.0, "groups": MUON},
        scheduler="LinearWithWarmup",
        scheduler_kwargs={"num_warmup_steps": 2},
    )
    optimizer = build_optimizer(hps, Net())
    scheduler = build_scheduler(hps, optimizer, total_steps=10, steps_per_epoch=10)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.025]
    assert [one.param_groups[0]["lr"] for one in optimizer._chained] == [0.5, 0.025]


@pytest.mark.parametrize("copying", [deepcopy, lambda optimizer: optimizer])
def test_a_state_that_was_loaded_goes_on_with_the_same_bits(copying):
    torch.manual_seed(0)
    model = Net()
    optimizer = built(model, groups=MUON)
    for step in range(3):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    other = Net()
    other.load_state_dict(model.state_dict())
    resumed = built(other, groups=MUON)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for one, its in ((model, optimizer), (other, resumed)):
            backward(one, step)
            its.step()
            its.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert len(copying(resumed).state) == len(list(model.parameters()))


def test_groups_that_are_added_later_go_to_the_first_optimizer():
    late = nn.Linear(3, 3)
    model = Net()
    optimizer = built(model, groups=MUON)
    optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.5})
    before = [parameter.clone() for parameter in late.parameters()]
    late(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(before, late.parameters(), strict=True))
    assert type(optimizer._chained[0]).__name__ == "AdamW"
    assert optimizer._chained[0].param_groups[-1]["lr"] == 0.5


class Remembering(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "more": 1}


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda a, b: [], "[]"),
        (lambda a, b: [torch.optim.SGD([a]), torch.optim.Adam([a, b])], "two optimizers"),
        (lambda a, b: [torch.optim.SGD([a]), Remembering([b])], "Remembering"),
    ],
)
def test_what_cannot_be_chained(make, got):
    with raises_at(ArgumentError, "ChainedOptimizer(optimizers=...)", got):
        ChainedOptimizer(make(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))))


def test_an_optimizer_in_python_is_that_of_the_yaml():
    model, groups = Net(), [{"match": "head", "lr": 5.0}, *MUON]
    rest = {"lr": 1.0, "weight_decay": 0.1, "groups": groups, "no_decay": ["bias"], "layer_decay": 0.5}
    assert table(model, create_optimizer(model, "AdamW", **rest)) == table(model, built(model, **rest))
    with raises_at(HyperParameterError, "HyperParameters optim.weigth_decay"):
        create_optimizer(model, "AdamW", weigth_decay=0.1)


def test_a_new_rate_keeps_the_proportions_of_groups():
    hps = HyperParameters(optim="AdamW", optim_kwargs={"lr": 1.0, "groups": [{"match": "head", "lr": 5.0}, *MUON]})
    hps.set_learning_rate(0.1)
    assert [group["lr"] for group in build_optimizer(hps, Net()).param_groups] == pytest.approx([0.1, 0.5, 0.005])
    standard = HyperParameters(optim="AdamW", optim_kwargs={"groups": [{"kind": "matrix", "type": "Muon"}]})
    standard.set_learning_rate(1e-2)  # tenfold, as that of Muon, which is 1e-3 too
    assert standard.optim_kwargs == {"lr": 1e-2, "groups": [{"kind": "matrix", "type": "Muon", "lr": 1e-2}]}


def test_one_rate_for_all_groups_is_no_schedule_for_groups_with_rates_of_their_own():
    kwargs = {"lr": 1.0, "groups": [{"match": "head", "lr": 5.0}]}
    hps = HyperParameters(optim="AdamW", optim_kwargs=kwargs, scheduler="OneCycleLR", scheduler_kwargs={"max_lr": 0.1})
    optimizer = build_optimizer(hps, Net())
    with raises_at(HyperParameterError, "HyperParameters scheduler.max_lr"):
        build_scheduler(hps, optimizer, total_steps=10, steps_per_epoch=10)


@pytest.mark.parametrize("name", [name for name in scheduler_names() if name not in ("CyclicLR", "OneCycleLR")])
def test_every_scheduler_drives_several_optimizers_in_proportion(name):
    needed = {"CosineAnnealingWarmRestarts": {"T_0": 2}, "ExponentialLR": {"gamma": 0.9}, "StepLR": {"step_size": 2}}
    kwargs = {"MultiStepLR": {"milestones": [2]}, **needed}.get(name, {})
    optim = {"lr": 1e-3, "groups": [{"kind": "matrix", "type": "Muon", "lr": 1e-2}]}
    hps = HyperParameters(optim="AdamW", optim_kwargs=optim, scheduler=name, scheduler_kwargs=kwargs)
    optimizer = build_optimizer(hps, Net())
    scheduler = build_scheduler(hps, optimizer, total_steps=10, steps_per_epoch=10)
    for _ in range(4):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(10 * first, rel=1e-2)  # InverseSQRT rounds its own way


def test_patterns_are_held_against_the_names_of_a_model_before_it_was_compiled():
    model = Net()
    expected = [len(group["params"]) for group in built(model, groups=[{"match": "^head", "lr": 5.0}]).param_groups]
    compiled = built(torch.compile(model, backend="eager"), groups=[{"match": "^head", "lr": 5.0}])
    assert [len(group["params"]) for group in compiled.param_groups] == expected


def two_adams():
    torch.manual_seed(0)
    parts = nn.Linear(2, 1), nn.Linear(2, 1)
    return parts, [torch.optim.Adam(part.parameters(), lr=0.1) for part in parts]


def step_two(parts, step):
    sum(part(torch.ones(1, 2)) for part in parts).pow(2).sum().backward()
    step()


def test_one_of_the_chained_optimizers_saves_and_loads_its_own_state():
    parts, optimizers = two_adams()
    chained = ChainedOptimizer(optimizers)
    step_two(parts, chained.step)
    saved = deepcopy(optimizers[1].state_dict())
    assert list(saved["state"]) == [0, 1]
    saved["param_groups"][0]["lr"] = 0.2
    step_two(parts, chained.step)  # the state is still shared
    assert chained.state is optimizers[0].state

    parts, optimizers = two_adams()
    chained = ChainedOptimizer(optimizers)
    optimizers[1].load_state_dict(saved)
    assert chained.param_groups[1] is optimizers[1].param_groups[0]
    assert chained.param_groups[1]["lr"] == 0.2
    step_two(parts, chained.step)
    assert [chained.state[part.weight]["step"] for part in parts] == [1, 2]
