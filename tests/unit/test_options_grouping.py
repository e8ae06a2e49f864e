"""Groups of parameters in the hyper-parameters: what is read, and what is wrong."""

import pytest
import torch

from accmt.addons.parameter_groups import Group, Grouping, read_grouping
from accmt.errors import HyperParameterError
from accmt.optimization import build_optimizer
from accmt.options import HyperParameters
from accmt.setup.model import trains_nothing

YAML = """\
hps:
  epochs: 1
  batch_size: 4
  optim:
    type: AdamW
    lr: 1e-3
    {}
"""


def message_of(tmp_path, line, rate="1e-3"):
    path = tmp_path / "x.yaml"
    path.write_text(YAML.format(line).replace("1e-3", rate))
    with pytest.raises(HyperParameterError) as raised:
        HyperParameters.from_config(path)
    return str(raised.value).removeprefix(f"{path}:")


def test_groups_are_read_in_the_types_of_the_signature(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        YAML.format(
            "groups: [{match: head, lr: '3e-3', betas: [0.8, 0.9]}, {kind: [norm, bias], weight_decay: 0},"
            " {kind: matrix, match: [layers, blocks], type: Muon, lr: 2e-2}]\n    no_decay: bias\n    layer_decay: 0.9"
        )
    )
    hps = HyperParameters.from_config(path)
    grouping, faults = read_grouping(hps.optimizer_class, hps.optim_kwargs)
    assert not faults
    assert grouping == Grouping(
        (
            Group(("head",), (), None, {"lr": 0.003, "betas": (0.8, 0.9)}),
            Group((), ("norm", "bias"), None, {"weight_decay": 0}),
            Group(("layers", "blocks"), ("matrix",), torch.optim.Muon, {"lr": 0.02}),
        ),
        ("bias",),
        0.9,
    )
    assert HyperParameters.from_config(hps.to_dict()) == hps


def test_an_optimizer_may_be_a_class_in_python_and_has_its_name_in_the_dict():
    groups = [{"kind": "matrix", "type": torch.optim.Muon, "lr": 0.02}]
    hps = HyperParameters(optim="AdamW", optim_kwargs={"lr": 1e-3, "groups": groups})
    assert hps.to_dict()["hps"]["optim"]["groups"] == [{"kind": "matrix", "type": "Muon", "lr": 0.02}]
    assert HyperParameters.from_config(hps.to_dict()) == hps


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("groups: norm", "7 optim.groups\n  got: 'norm' (str)\n  expected: a list of groups"),
        ("groups: [{lr: 1}]", "7 optim.groups.0\n  got: {'lr': 1} (dict)\n  expected: a mapping with `match` or"),
        ("groups: [{match: a}]", "7 optim.groups.0\n  got: {'match': 'a'} (dict)\n  expected: an optimizer argument"),
        ("groups: [{match: 'a(', lr: 1}]", "7 optim.groups.0.match\n  got: 'a(': missing ), unterminated subpattern"),
        ("groups: [{kind: norms, lr: 1}]", "7 optim.groups.0.kind\n  got: 'norms' (str)"),
        ("groups: [{kind: norm, weigth_decay: 0}]", "7 optim.groups.0.weigth_decay\n  got: weigth_decay = 0 (int)"),
        (
            "groups: [{kind: norm, lr: -1}]",
            "7 optim.groups.0.lr\n  got: -1 (int)\n  expected: a value that AdamW accepts",
        ),
        ("groups: [{kind: matrix, type: Muon, betas: [0, 1]}]", "7 optim.groups.0.betas"),
        ("no_decay: weights", "7 optim.no_decay\n  got: 'weights' (str)"),
        ("layer_decay: 1.5", "7 optim.layer_decay\n  got: 1.5 (float)\n  expected: a number above 0, up to 1"),
        ("layer_decays: 0.9", "do: write `layer_decay`"),
    ],
)
def test_what_is_wrong_has_its_line_and_what_to_write(tmp_path, line, message):
    assert message in message_of(tmp_path, line)


def learns_nothing(**arguments):
    hps = HyperParameters(**arguments)
    model = torch.nn.ModuleDict({"body": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
    return trains_nothing(hps, build_optimizer(hps, model))


def test_a_rate_of_0_in_every_group_is_no_error_and_is_known():
    groups = [{"kind": "bias", "weight_decay": 0}, {"match": "head", "lr": 0}]
    assert learns_nothing(optim="AdamW", optim_kwargs={"lr": 0, "groups": groups})
    assert not learns_nothing(optim="AdamW", optim_kwargs={"lr": 1e-3, "groups": groups})
    muon = {"kind": "matrix", "type": "Muon"}  # with its default rate
    assert not learns_nothing(optim="AdamW", optim_kwargs={"lr": 0, "groups": [muon]})


@pytest.mark.parametrize(
    "scheduler",
    [
        {"scheduler": "OneCycleLR", "scheduler_kwargs": {"max_lr": 1e-2}},
        {"scheduler": "CosineAnnealingLR", "scheduler_kwargs": {"eta_min": 1e-3}},
    ],
)
def test_a_scheduler_may_raise_a_rate_of_0(scheduler):
    assert not learns_nothing(optim="AdamW", optim_kwargs={"lr": 0}, **scheduler)
    assert learns_nothing(optim="AdamW", optim_kwargs={"lr": 0}, scheduler="CosineAnnealingLR")


class OwnPeak(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, peak):
        self.peak = peak
        super().__init__(optimizer)

    def get_lr(self):
        return [self.peak for _ in self.base_lrs]


def test_a_scheduler_of_ones_own_may_set_the_rate():
    assert not learns_nothing(optim="AdamW", optim_kwargs={"lr": 0}, scheduler=OwnPeak, scheduler_kwargs={"peak": 1e-3})
