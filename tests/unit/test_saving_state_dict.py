import pytest
import torch

from accmt.saving.weights import find_tied, give_own_memory, plain_names


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
