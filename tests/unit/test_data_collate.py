import pickle

import pytest
import torch
from torch.utils.data import default_collate

from accmt.data import build_collate
from accmt.errors import ArgumentError


def double(batch):
    return batch * 2


def add_one(batch):
    return batch + 1


@pytest.mark.feature("A33")
def test_none_leaves_the_choice_to_torch_and_a_function_stays_itself():
    assert build_collate(None, "collate_fn") is None
    assert build_collate(double, "collate_fn") is double
    assert build_collate([double], "collate_fn") is double


@pytest.mark.feature("A35")
@pytest.mark.parametrize("kind", [list, tuple])
def test_several_functions_are_applied_one_after_the_other(kind):
    collate = build_collate(kind([default_collate, double, add_one]), "collate_fn")
    assert torch.equal(collate([1, 2, 3]), torch.tensor([3, 5, 7]))


@pytest.mark.feature("A35")
def test_a_chain_does_not_follow_later_changes_of_the_list():
    functions = [default_collate, double]
    collate = build_collate(functions, "collate_fn")
    functions.append(add_one)
    assert torch.equal(collate([1, 2]), torch.tensor([2, 4]))


@pytest.mark.feature("A35")
def test_a_chain_travels_to_loader_workers():
    collate = pickle.loads(pickle.dumps(build_collate([double, add_one], "collate_fn")))
    assert collate(3) == 7


@pytest.mark.feature("A33", "A35")
@pytest.mark.parametrize("value", ["pad", 3, [], (), [double, 3], [double, None]])
def test_what_cannot_be_called_is_refused_by_the_name_of_its_argument(value):
    with pytest.raises(ArgumentError, match=r"Trainer\(collate_fn_train=\.\.\.\)(.|\n)*collate_fn_train=my_function"):
        build_collate(value, "collate_fn_train")
