"""Outputs collected over batches, and tensors put together over processes."""

from __future__ import annotations

import pytest
import torch

from accmt import OutputCollector
from accmt.addons.outputs import gather_on_cpu
from accmt.errors import ModuleContractError
from tests.raising import raises_at


def collected(*batches):
    collector = OutputCollector()
    for batch in batches:
        collector.collect(batch)
    return collector.all_outputs


class TestCollector:
    def test_tensors_are_joined(self):
        (joined,) = collected(torch.ones(2, 3), torch.zeros(2, 3))
        assert torch.equal(joined, torch.tensor([[1.0] * 3] * 2 + [[0.0] * 3] * 2))

    def test_scalars_become_a_vector(self):
        (joined,) = collected(*(torch.tensor(float(value)) for value in range(3)))
        assert torch.equal(joined, torch.tensor([0.0, 1.0, 2.0]))

    def test_several_parts_stay_apart(self):
        first, second = collected([torch.zeros(1), torch.ones(2, 2)], [torch.ones(2), torch.zeros(1, 2)])
        assert (first.tolist(), second.shape) == ([0, 1, 1], (3, 2))

    def test_dicts_keep_their_names(self):
        joined = collected({"a": torch.zeros(2), "b": "x"}, {"b": "y", "a": torch.ones(1)})
        assert joined["a"].tolist() == [0, 0, 1]
        assert joined["b"] == ["x", "y"]

    def test_graphs_and_later_changes_do_not_reach_it(self):
        weight = torch.ones(2, requires_grad=True)
        output = weight * 2
        collector = OutputCollector()
        collector.collect(output)
        output.data.zero_()
        (joined,) = collector.all_outputs
        assert not joined.requires_grad
        assert joined.tolist() == [2, 2]
        collector.reset()
        assert collector.all_outputs == []

    @pytest.mark.parametrize("second", [[torch.zeros(1)], {"a": torch.zeros(1)}])
    def test_other_parts_are_rejected(self, second):
        with raises_at(ModuleContractError, "OutputCollector.collect"):
            collected([torch.zeros(1), torch.zeros(1)], second)


@pytest.mark.parametrize("chunk", [None, 1, 2, 100])
def test_one_process_gathers_its_own(chunk):
    tensor = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(gather_on_cpu(tensor, chunk=chunk), tensor)
    assert gather_on_cpu(tensor[:0], chunk=chunk).shape == (0, 2)
