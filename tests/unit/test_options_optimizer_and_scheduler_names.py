import torch
from torch.optim import lr_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

from accmt.options.checks import KeyFault
from accmt.options.optimizer_and_scheduler_names import (
    find_optimizer,
    find_scheduler,
    name_of,
    optimizer_names,
    scheduler_names,
)
from tests.tables import each

OPTIMIZERS = [
    "Adam", "Adadelta", "Adagrad", "Adamax", "AdamW", "Adafactor", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    "SparseAdam",
]  # fmt: skip
SCHEDULERS = [
    "StepLR", "LinearLR", "ExponentialLR", "CosineAnnealingLR", "CyclicLR", "OneCycleLR", "CosineAnnealingWarmRestarts",
    "MultiStepLR", "ReduceLROnPlateau", "Constant", "ConstantWithWarmup", "CosineWithWarmup",
    "CosineWithHardRestartsWithWarmup", "InverseSQRT", "LinearWithWarmup", "PolynomialDecayWithWarmup",
]  # fmt: skip


class MyOptimizer(torch.optim.SGD):
    """Found by its import path."""


@each("name", sorted({*OPTIMIZERS, *optimizer_names()}))
def test_every_optimizer_name_leads_to_a_class_and_back(name):
    found = find_optimizer(name)
    assert issubclass(found, torch.optim.Optimizer)
    assert name_of(found) == name


@each("name", sorted({*TYPE_TO_SCHEDULER_FUNCTION} - {"greedy", "cosine_warmup_with_min_lr"}))
def test_what_transformers_calls_a_schedule_is_told_the_name_of_the_same_schedule_here(name):
    advised = find_scheduler(find_scheduler(str(name.value)).do.removeprefix("write ").strip("`"))
    theirs = TYPE_TO_SCHEDULER_FUNCTION[name]
    assert advised is (lr_scheduler.ReduceLROnPlateau if name == "reduce_lr_on_plateau" else theirs)


@each("name", sorted({*SCHEDULERS, *scheduler_names()}))
def test_every_schedule_name_leads_to_a_factory_and_back(name):
    assert name_of(find_scheduler(name)) == name


def test_documented_names_are_offered():
    assert set(OPTIMIZERS) <= set(optimizer_names())
    assert set(SCHEDULERS) <= set(scheduler_names())
    assert not {"Optimizer", "LBFGS"} & set(optimizer_names())
    assert not {"LRScheduler", "_LRScheduler", "LambdaLR"} & set(scheduler_names())


def test_adafactor_is_that_of_transformers():
    assert find_optimizer("Adafactor").__module__ == "transformers.optimization"
    assert name_of(torch.optim.Adafactor) == "torch.optim.Adafactor"
    assert find_optimizer(name_of(torch.optim.Adafactor)) is torch.optim.Adafactor


def test_import_paths_and_classes_are_found():
    assert find_optimizer("torch.optim.AdamW") is torch.optim.AdamW
    assert find_optimizer(MyOptimizer) is MyOptimizer
    assert name_of(MyOptimizer) == f"{__name__}.MyOptimizer"
    assert find_scheduler("torch.optim.lr_scheduler.StepLR") is lr_scheduler.StepLR
    path = "transformers.optimization.get_wsd_schedule"
    assert name_of(find_scheduler(path)) == path


@each(
    ("find", "given", "got", "do"),
    [
        (find_optimizer, "adamw", "'adamw' (str)", "write `AdamW`"),
        (find_optimizer, "LBFGS", "needs a closure", "write `type: AdamW`"),
        (find_optimizer, "torch.optim.AdanW", "torch.optim has no AdanW", "write `AdamW`"),
        (find_optimizer, "no_such_package.AdamW", "No module named 'no_such_package'", "correct the path"),
        (find_optimizer, "torch.nn.Linear", "'torch.nn.Linear' (str)", "write `type: AdamW`"),
        (find_scheduler, "LinearWarmup", "'LinearWarmup' (str)", "write `LinearWithWarmup`"),
        (find_scheduler, "LambdaLR", "takes functions", "get_scheduler"),
        (find_scheduler, torch.nn.Linear, "Linear", "get_scheduler"),
    ],
)
def test_a_wrong_name_is_a_fault_that_says_what_to_write(find, given, got, do):
    fault = find(given)
    assert isinstance(fault, KeyFault)
    assert got in fault.got
    assert do in fault.do
