"""Batch norm over processes: which layers take part, that they stay the user's, and micro-batches without the others.

torch has `SyncBatchNorm` on GPUs only, so what it computes is tried in tests/distributed with arithmetic of their own.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule
from accmt.engine import sync_batchnorm
from accmt.engine.sync_batchnorm import (
    restore_batch_norm,
    synchronize,
    synchronize_if_asked,
    synchronized_layers,
    without_synchronization,
)
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import make_points, make_trainer


def build() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.ModuleDict({"norm": nn.BatchNorm2d(2, affine=False), "other": nn.GroupNorm(1, 2)})
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 1), inner)


def kinds(model: nn.Module) -> list[str]:
    return [type(layer).__name__ for layer in model.modules()]


def test_batch_norm_becomes_synchronized_and_its_own_kind_again():
    model, untouched = build(), build()
    objects, weights, names = list(model.modules()), list(model.parameters()), list(model.state_dict())
    attributes = {name: sorted(vars(layer)) for name, layer in model.named_modules()}
    synchronize(model)
    assert kinds(model) == [
        name.replace("BatchNorm1d", "SyncBatchNorm").replace("BatchNorm2d", "SyncBatchNorm")
        for name in kinds(untouched)
    ]
    assert list(model.state_dict()) == names
    restore_batch_norm(model)
    assert kinds(model) == kinds(untouched)
    assert all(now is before for now, before in zip(model.modules(), objects, strict=True))
    assert all(now is before for now, before in zip(model.parameters(), weights, strict=True))
    assert {name: sorted(vars(layer)) for name, layer in model.named_modules()} == attributes


def test_it_is_what_torch_converts():
    ours, theirs = build(), nn.SyncBatchNorm.convert_sync_batchnorm(build())
    synchronize(ours)
    assert kinds(ours) == kinds(theirs)
    for own, other in zip(ours.modules(), theirs.modules(), strict=True):
        if isinstance(own, nn.SyncBatchNorm):
            plain = {name: value for name, value in vars(other).items() if isinstance(value, int | float | None)}
            assert {name: vars(own)[name] for name in plain} == plain


def test_a_round_apart_is_that_of_plain_batch_norm(monkeypatch):
    model, plain, inputs = build()[:3], build()[:3], torch.randn(5, 3)
    synchronize(model)
    layers = synchronized_layers(model)
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", lambda *_: pytest.fail("it would wait for the others"))
    with without_synchronization(layers):
        outputs = model(inputs)
        model[1].eval()
    assert torch.equal(outputs, plain(inputs))
    assert model.state_dict()["1.num_batches_tracked"] == 1
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert [type(layer) for layer in layers] == [nn.SyncBatchNorm]
    assert not model[1].training


def test_a_layer_that_computes_more_is_refused_before_any_is_changed():
    class NormAndActivation(nn.BatchNorm1d):
        def forward(self, inputs):
            return super().forward(inputs).relu()

    model = nn.Sequential(nn.BatchNorm1d(4), NormAndActivation(4))
    with raises_at(ArgumentError, "Trainer(sync_batchnorm=True)"):
        synchronize(model)
    assert kinds(model) == ["Sequential", "BatchNorm1d", "NormAndActivation"]


def test_a_model_without_batch_norm_is_told_about(caplog):
    synchronize(nn.Linear(3, 1))
    assert "sync_batchnorm=True has no effect: the model has no batch norm" in caplog.text


class Normed(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.kinds: set[type] = set()

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        self.kinds.add(type(self.model[1]))
        return nn.functional.mse_loss(self.model(inputs), targets)


def test_with_one_process_nothing_changes():
    module, plain = Normed(), Normed()
    make_trainer(sync_batchnorm=True).fit(module, make_points())
    make_trainer().fit(plain, make_points())
    assert module.kinds == {nn.BatchNorm1d}
    assert all(map(torch.equal, module.model.state_dict().values(), plain.model.state_dict().values()))


def settings_of(hps: Any = None, **settings: Any) -> Any:
    return make_trainer(hps, **settings).settings


def test_several_processes_synchronize_on_gpus_and_are_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(sync_batchnorm, "num_processes", lambda: 2)
    model, told = build(), settings_of(sync_batchnorm=True)
    with raises_at(ArgumentError, "Trainer(sync_batchnorm=True)"):
        synchronize_if_asked(model, told, torch.device("cpu"))
    synchronize_if_asked(model, settings_of(), torch.device("cuda"))
    assert synchronized_layers(model) == ()
    synchronize_if_asked(model, told, torch.device("cuda"))
    assert len(synchronized_layers(model)) == 2


def test_it_cannot_stand_beside_batches_that_may_run_out_of_memory_alone(monkeypatch):
    monkeypatch.setattr(sync_batchnorm, "num_processes", lambda: 2)
    told = settings_of({"max_micro_batch_size": "auto"})
    synchronize_if_asked(build(), told, torch.device("cuda"))
    with raises_at(ArgumentError, "max_micro_batch_size: auto"):
        synchronize_if_asked(nn.SyncBatchNorm(4), told, torch.device("cuda"))
