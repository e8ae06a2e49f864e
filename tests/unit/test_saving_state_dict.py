import pytest
import torch
from torch import nn

from accmt.errors import WeightsError
from accmt.saving.weights import find_tied, give_own_memory, plain_names, require_complete, require_dense_tensors


@pytest.mark.feature("A38")
@pytest.mark.parametrize(
    ("names", "plain"),
    [
        (["weight", "a.bias"], ["weight", "a.bias"]),
        (["_orig_mod.weight", "_orig_mod.a.bias"], ["weight", "a.bias"]),
        (["a._orig_mod.weight", "b.weight"], ["a.weight", "b.weight"]),
        (["module.weight", "module.a.bias"], ["weight", "a.bias"]),
        (["_orig_mod.module.a._orig_mod.weight", "_orig_mod.module.b"], ["a.weight", "b"]),
        (["module._orig_mod.weight", "module._orig_mod.bias"], ["weight", "bias"]),
        (["module.module.weight"], ["weight"]),
        (["module.weight", "num_averaged"], ["module.weight", "num_averaged"]),
        (["a.module.weight", "my_orig_mod.weight"], ["a.module.weight", "my_orig_mod.weight"]),
        ([], []),
    ],
)
def test_only_wrappers_are_taken_out_of_names(names, plain):
    assert plain_names(names) == dict(zip(names, plain, strict=True))


def test_names_that_would_become_one_are_refused():
    with pytest.raises(WeightsError, match=r"called a\.weight after"):
        plain_names(["a._orig_mod.weight", "a.weight"])


def test_only_identical_views_are_tied():
    memory = torch.zeros(4, 4)
    tensors = {
        "whole": memory,
        "same": memory.detach(),
        "part": memory[1:3],
        "same_part": memory[1:3],
        "transposed": memory.t(),
        "bits": memory.view(torch.int32),
        "equal": memory.clone(),
    }
    assert find_tied(tensors) == {"same": "whole", "same_part": "part"}


def test_tensors_without_memory_are_never_tied():
    assert find_tied({"a": torch.empty(0), "b": torch.empty(0), "c": torch.empty(2, device="meta")}) == {}


def test_own_memory_copies_only_what_shares_or_wastes_memory():
    memory = torch.arange(16.0).reshape(4, 4)
    alone = torch.ones(3)
    given = {
        "whole": memory,
        "part": memory[1:3],
        "transposed": memory.t(),
        "reshaped": memory.view(16),
        "alone": alone,
    }
    separate = give_own_memory(given)
    assert separate["alone"].data_ptr() == alone.data_ptr()
    assert separate["whole"].data_ptr() == memory.data_ptr()
    assert len({tensor.data_ptr() for tensor in separate.values()}) == len(given)
    for name, tensor in given.items():
        assert torch.equal(separate[name], tensor)
        assert separate[name].is_contiguous()
        assert separate[name].untyped_storage().nbytes() == tensor.nbytes


def test_parameters_lose_their_gradients_history():
    assert not give_own_memory({"weight": torch.nn.Parameter(torch.ones(2))})["weight"].requires_grad


def is_accepted(check, *arguments):
    """Return whether a check finds no fault."""
    try:
        check(*arguments)
    except WeightsError:
        return False
    return True


def test_dense_tensors_are_accepted_whatever_their_shape():
    dense = {"scalar": torch.tensor(1), "empty": torch.empty(0), "strided": torch.ones(4, 4).t()}
    assert is_accepted(require_dense_tensors, dense)
    assert not is_accepted(require_dense_tensors, {**dense, "meta": torch.ones(1, device="meta")})


class Norm(nn.Module):
    """Parameters of 6 values, buffers of 5."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.weight = nn.Parameter(torch.ones(2))


def test_a_state_dict_with_every_parameter_is_complete():
    model = Norm()
    wrapped = {f"module._orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    halves = {
        name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in Norm().state_dict().items()
    }
    assert all(is_accepted(require_complete, given, model) for given in (model.state_dict(), wrapped, halves))


def test_a_tied_weight_may_stand_under_one_name():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    once = {name: tensor for name, tensor in model.state_dict().items() if name != "b.weight"}
    twice = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert is_accepted(require_complete, once, model)
    assert is_accepted(require_complete, twice, model)
    assert not is_accepted(require_complete, {name: once[name] for name in once if name != "a.weight"}, model)


@pytest.mark.feature("D22")
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"weight": torch.empty(0)}, "4 values in 6 tensors, none in weight"),
        ({"weight": torch.ones(1)}, "5 values in 6 tensors"),
        ({"weight": None}, "4 values in 5 tensors"),
    ],
)
def test_a_state_dict_with_less_than_the_parameters_is_refused(change, got):
    model = Norm()
    state_dict = {name: tensor for name, tensor in (model.state_dict() | change).items() if tensor is not None}
    with pytest.raises(WeightsError, match=f"the weights of Norm\n  got: {got}\n  expected: at least 6, "):
        require_complete(state_dict, model)


def test_buffers_do_not_make_up_for_parameters():
    model = Norm()
    buffers = dict(model.named_buffers())
    with pytest.raises(WeightsError, match="0 values in 3 tensors"):
        require_complete(buffers, model)


def test_a_model_whose_own_state_dict_leaves_weights_out_is_not_checked():
    class Partial(Norm):
        def state_dict(self, *args, **kwargs):
            return {"weight": self.weight}

    assert is_accepted(require_complete, Partial().state_dict(), Partial())
    assert not is_accepted(require_complete, Partial().state_dict(), Norm())


def test_the_size_that_deepspeed_keeps_of_a_partitioned_parameter_counts():
    model = nn.Linear(4, 4, bias=False)
    weight = model.weight.detach()
    model.weight.data = torch.empty(0)
    model.weight.ds_numel = 16
    with pytest.raises(WeightsError, match="at least 16"):
        require_complete(model.state_dict(), model)
    assert is_accepted(require_complete, {"weight": weight}, model)
