from copy import deepcopy

import pytest
import torch
from torch import nn

from accmt.errors import HyperParameterError, ModuleContractError
from accmt.optimization import build_optimizer
from accmt.optimization.stepper import clip_gradients
from accmt.options import HyperParameters
from accmt.options.optimizer_and_scheduler_names import optimizer_names
from accmt.sharded_tensors import total_norm
from tests.raising import raises_at


class Picky(torch.optim.SGD):
    """Refuses what only the real parameters show."""

    def __init__(self, params, lr=0.1):
        params = list(params)
        if len(params) < 2:
            raise ValueError("one parameter is too few")
        super().__init__(params, lr=lr)


def weights(dtype=torch.float32):
    return torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))


def train(optimizer, weight, steps):
    for step in range(steps):
        gradient = torch.full_like(weight, 0.1 * (step + 1))
        weight.grad = gradient.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else gradient
        optimizer.step()


@pytest.mark.parametrize("name", optimizer_names())
def test_every_optimizer_builds_steps_and_continues_from_its_state(name):
    hps = HyperParameters(optim=name, optim_kwargs={"lr": 0.01})
    weight = weights()
    optimizer = build_optimizer(hps, nn.ParameterList([weight]))
    assert type(optimizer) is hps.optimizer_class
    train(optimizer, weight, 10)
    assert not torch.equal(weight, weights())

    copy = torch.nn.Parameter(weight.detach().clone())
    resumed = build_optimizer(hps, nn.ParameterList([copy]))
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))  # loading shares its tensors
    train(optimizer, weight, 3)
    train(resumed, copy, 3)
    assert torch.equal(weight, copy)


@pytest.mark.parametrize(
    "said", [{"fused": False}, {"fused": None}, {"foreach": True}, {"foreach": False}, {"differentiable": True}]
)
def test_an_implementation_that_the_user_chose_stays(said):
    optimizer = build_optimizer(HyperParameters(optim="AdamW", optim_kwargs=said), nn.ParameterList([weights()]))
    assert not optimizer.defaults["fused"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_every_type_of_weights_is_trained(name, dtype):
    """Torch 2.13's fused SGD does nothing to half-precision weights on a CPU."""
    weight, other = (torch.nn.Parameter(torch.ones(64, dtype=dtype)) for _ in range(2))
    hps = HyperParameters(optim=name, optim_kwargs={"lr": 0.1})
    plain = hps.optimizer_class([other], lr=0.1, fused=False)
    for one, optimizer in ((weight, build_optimizer(hps, nn.ParameterList([weight]))), (other, plain)):
        train(optimizer, one, 3)
    assert (weight < 0.99).all()
    assert torch.allclose(weight, other, rtol=0.02)


@pytest.mark.parametrize("said", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}])
def test_a_weight_may_have_its_first_gradient_after_others(said):
    """Torch 2.13's fused SGD with momentum raises a TypeError then."""
    ours, plain = ([weights(), weights()] for _ in range(2))
    built = build_optimizer(HyperParameters(optim="SGD", optim_kwargs={"lr": 0.1, **said}), nn.ParameterList(ours))
    for both, optimizer in ((ours, built), (plain, torch.optim.SGD(plain, lr=0.1, fused=False, **said))):
        for last in (1, 2, 2):
            for weight in both[:last]:
                weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert all(torch.allclose(*pair) for pair in zip(ours, plain, strict=True))


def test_a_fused_kernel_that_does_nothing_is_not_used():
    class Idle(torch.optim.SGD):
        def step(self, closure=None):
            if not self.defaults["fused"]:
                super().step(closure)

    assert not build_optimizer(HyperParameters(optim=Idle), nn.ParameterList([weights()])).defaults["fused"]


def test_the_fused_trial_does_not_touch_random_numbers_weights_or_the_hyper_parameters():
    hps, weight, before = HyperParameters(optim="AdamW"), weights(), torch.get_rng_state()
    build_optimizer(hps, nn.ParameterList([weight]))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weight, weights())
    assert "optim.fused" not in hps.get_config()


def test_adafactor_with_lr_moves_by_that_lr():
    optimizer = build_optimizer(
        HyperParameters(optim="Adafactor", optim_kwargs={"lr": 0.5, "scale_parameter": False}),
        nn.ParameterList([weights()]),
    )
    assert (optimizer.defaults["relative_step"], optimizer.defaults["scale_parameter"]) == (False, False)
    assert (
        build_optimizer(HyperParameters(optim="Adafactor"), nn.ParameterList([weights()])).defaults["relative_step"]
        is True
    )


@pytest.mark.parametrize("parameters", [[], [weights().requires_grad_(False)]])
def test_nothing_to_train_is_a_contract_error(parameters):
    with raises_at(ModuleContractError, "the parameters to optimize"):
        build_optimizer(HyperParameters(), nn.ParameterList(parameters))


@pytest.mark.parametrize(
    ("optim", "parameter", "got"),
    [("Muon", torch.nn.Parameter(torch.ones(3)), "Muon: Muon only supports 2D"), (Picky, weights(), "Picky: one ")],
)
def test_a_refusal_of_the_real_parameters_names_the_place(optim, parameter, got):
    with raises_at(HyperParameterError, "HyperParameters optim", got):
        build_optimizer(HyperParameters(optim=optim), nn.ParameterList([parameter]))


@pytest.mark.parametrize("kind", ["norm", "value"])
def test_sparse_gradients_are_clipped_and_measured_as_dense_ones(kind):
    norms, gradients = [], []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 2, sparse=is_sparse), nn.Linear(2, 1))
        model(torch.tensor([[1, 1, 3], [3, 3, 0]])).square().sum().backward()
        parameters = list(model.parameters())
        norms.append(total_norm([parameter.grad for parameter in parameters]))
        assert clip_gradients(parameters, 0.01, kind) == (norms[-1] if kind == "norm" else None)
        gradients.append(
            [parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad for parameter in parameters]
        )
    torch.testing.assert_close(norms[1], norms[0])
    for dense, sparse in zip(*gradients, strict=True):
        torch.testing.assert_close(sparse, dense)
