"""What the comparison of replicas says of buffers that each process changes by its own batches."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from accmt.addons import replicas


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("table", torch.zeros(2))


@pytest.mark.parametrize("changed", ["mean", "norm.running_mean", ""])
def test_buffers_that_differ_between_processes_are_named_once_except_those_of_batch_norm(changed, monkeypatch, caplog):
    model = Codebook()
    twin = copy.deepcopy(model)
    if changed:
        twin.get_buffer(changed).add_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = replicas.Replicas(twin, torch.optim.SGD(twin.parameters(), lr=0.1))
    sent: list[object] = []
    monkeypatch.setattr(replicas, "num_data_processes", lambda: 2)
    monkeypatch.setattr(replicas, "_compare", lambda replica: sent.append(replica) or {})
    others.require_equal(1)
    of_twin = iter(sent.copy())
    monkeypatch.setattr(replicas, "_compare", lambda replica: replicas._find_differences([replica, next(of_twin)]))
    replicas.Replicas(model, optimizer).require_equal(1)
    assert ("buffers differ between processes after a training step: mean. " in caplog.text) == (changed == "mean")
    assert "norm" not in caplog.text
    assert "table" not in caplog.text
