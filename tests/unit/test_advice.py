"""Every error has four parts, and who follows its advice gets no second error about the same place.

The advice is read from `do` as a user would read it: code of arguments, a line of YAML, or a name that was meant.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import Dataset

import accmt
from accmt import AcceleratorModule, Callback, HyperParameters, Sweep, Trainer
from accmt.errors import AccmtError, Fault
from accmt.options.checks import read_numbers
from tests.toys import HPS, Linear, Numbers, make_points, make_trainer


class MyCallback(Callback):
    """A callback, as an error names it."""


OWN = {"MyCallback": MyCallback, "my_sampler": [0, 1], "my_function": list}
PUBLIC = ("Accuracy", "Clipping", "Failures", "Handler", "Ledger", "MLFlow", "ParallelismOptions", "PatienceOptions")
NAMES = {**{name: getattr(accmt, name) for name in PUBLIC}, **OWN}
"""What the code in a piece of advice may name."""


def find_faults(call: Callable[[], object]) -> tuple[Fault, ...]:
    """Return the mistakes that a call reports, after checking that each has four parts."""
    try:
        call()
    except AccmtError as error:
        faults = error.faults
    else:
        return ()
    assert faults, "an error without parts"
    for fault in faults:
        assert all(part.strip() for part in fault), fault
    return faults


def keywords_in(advice: str) -> dict[str, Any]:
    """Return the arguments that a piece of advice sets: `seed=3`, `did you mean log_with='wandb'?`."""
    text = re.sub(r"^(for example|did you mean|write|pass) ", "", advice).rstrip("?")
    ends = [len(text), *(match.start() for match in re.finditer(r", |; | too$", text))]
    for end in sorted(ends, reverse=True):
        for code in (f"dict({text[:end]})", text[:end]):
            try:
                call = ast.parse(code, mode="eval").body
            except SyntaxError:
                continue
            if isinstance(call, ast.Call) and call.keywords:
                arguments = ast.Expression(ast.Call(ast.Name("dict", ast.Load()), [], call.keywords))
                return dict(eval(compile(ast.fix_missing_locations(arguments), "advice", "eval"), dict(NAMES)))  # noqa: S307
    return {}


def merge(options: Any, changes: Any, depth: int) -> Any:
    """Return options with some entries changed, down to a depth."""
    if depth == 0 or not isinstance(options, dict):
        return changes
    return {**options, **{key: merge(options.get(key), value, depth - 1) for key, value in changes.items()}}


def without(options: dict[str, Any], key: str) -> dict[str, Any]:
    """Return options without an entry, at any depth."""
    return {k: without(v, key) if isinstance(v, dict) else v for k, v in options.items() if k != key}


def follow(arguments: dict[str, Any], fault: Fault) -> dict[str, Any]:
    """Return the arguments of a call after following the advice of one error about them."""
    changed = dict(arguments)
    name, key = re.fullmatch(r"\w+\((\w+)=(?:\{\"(.+)\": |.*).*\)|.*", fault.where).groups()
    meant = re.match(r"did you mean (\w+)", fault.do)
    left_out = re.search(r"leave (?:[`'](\w+)['`] out|it out)|^remove `?(\w+)", fault.do)
    for_hps = re.match(r"write `(.+?)` in the hyper-parameters", fault.do)
    builtin = re.search(r"""write '(\w+)', with "(\w+)" among metrics""", fault.do)
    literal = re.match(r"(?:did you mean|write) ('.+?')", fault.do)
    code = keywords_in(fault.do)
    if for_hps:
        changed["hps_config"] = {**changed["hps_config"], **read_numbers(yaml.safe_load(for_hps[1]))}
        del changed[name]
    elif builtin:
        changed |= {name: builtin[1], "metrics": [builtin[2]]}
    elif "into the hyper-parameters" in fault.do:
        changed["hps_config"] = {**changed["hps_config"], name: changed.pop(name)}
    elif code and (name is None or set(code) & {name, "metrics"} or name not in NAMED):
        if name not in NAMED:  # an argument of another trainer
            changed.pop(name, None)
        for argument, value in code.items():
            changed[argument] = merge(changed.get(argument), value, depth=fault.where.count('": '))
    elif meant and meant[1] not in NAMED and isinstance(changed.get(name), dict):
        options = dict(changed[name])
        options[meant[1]] = options.pop(key or fault.got.strip("'").split("'")[0])
        changed[name] = options
    elif meant and isinstance(changed.get(name), list):
        changed[name] = [meant[1]]
    elif meant:
        changed[meant[1]] = changed.pop(name)
    elif literal:
        changed[name] = ast.literal_eval(literal[1])
    elif left_out and name in changed:
        changed = without(changed, left_out[1] or left_out[2] or name)
    elif re.match(r"start the program|model\.\w+\(\) before fit", fault.do):
        changed.pop(name)
    else:
        raise AssertionError(f"advice that cannot be followed: {fault}")
    return changed


NAMED = {"hps_config", *(name for group in accmt.options.Settings.GROUPS.values() for name in group.__annotations__)}


def assert_followed(call: Callable[..., object], arguments: dict[str, Any]) -> None:
    """Check that each mistake that a call reports is gone after its advice is followed."""
    faults = find_faults(lambda: call(**arguments))
    assert faults, f"{arguments} raises nothing"
    for fault in faults:
        arguments = follow(arguments, fault)
    left_over = {fault.where for fault in find_faults(lambda: call(**arguments))}
    assert left_over.isdisjoint(fault.where for fault in faults), (faults, arguments)


ARGUMENTS: list[dict[str, Any]] = [
    {"seed": "3"},
    {"seed": -1},
    {"seed": True},
    {"clip_grad": "0.5"},
    {"clip_grad": "much"},
    {"clip_grad": {"norms": 1.0}},
    {"clip_grad": {"norm": 1.0, "value": 1.0}},
    {"grad_accumulation_steps": "4"},
    {"grad_accumulation_steps": {0: 0}},
    {"evaluate_every_n_steps": "3 evals"},
    {"evaluate_every_n_steps": 0},
    {"checkpoint_every": "500 stesp"},
    {"log_every": "2 epochs"},
    {"log_every": 0},
    {"reload_dataloaders_every_n_epochs": -1},
    {"num_sanity_val_steps": -2},
    {"dataloader_num_workers": "2"},
    {"max_shard_size": "10 foos"},
    {"max_time": "10 parsecs"},
    {"min_length": 3},
    {"min_length": ["2 epochs", "3 epochs"]},
    {"shuffle_train": "no"},
    {"verbose": 2},
    {"limit_batches": {"val": "all"}},
    {"limit_batches": {"valid": 3}},
    {"limit_batches": 100.0},
    {"overfit_batches": -1},
    {"sampler": "random"},
    {"sampler": {"test": [0]}},
    {"collate_fn": {"val": "pad"}},
    {"sampler": [0, 1], "data_options": {"batch_sampler": [[0], [1]]}},
    {"data_options": {"group_by_length": True, "batch_sampler": [[0]]}},
    {"data_options": {"drop_lst": True}},
    {"failures": {"on_nonfinite": "skipp"}},
    {"failures": {"on_nonfinit": "skip", "spike_guard": -1, "preflight": "yes"}},
    {"failures": False},
    {"handlers": "everything"},
    {"checkpoint_options": {"max_checkpoints": 0, "keep_every": "0.5 epochs"}},
    {"checkpointer": "a name"},
    {"checkpoint": " "},
    {"resume": "Ture"},
    {"resume": 3},
    {"fork": 3},
    {"metric_options": {"derived": print}},
    {"metric_options": {"averages": {"a/b": ["x"]}}},
    {"metric_options": {"averages": {"a": []}}},
    {"metric_options": {"averages": 3, "gather_chunk_size": "5 G"}},
    {"metrics": "acuracy"},
    {"metrics": 3},
    {"model_saving": True},
    {"model_saving": "valid_loss"},
    {"model_saving": "best_f1"},
    {"model_saving": "best_acc"},
    {"model_saving": "best_val/iou"},
    {"model_saving": "best_val/loss"},
    {"model_saving_below": "low"},
    {"model_saving_below": 1, "model_saving_above": 2},
    {"patience": 0},
    {"patience": "3 epochs"},
    {"patience": {"valid_loss": {"min_delta": -0.1, "patience": 3}}},
    {"patience": {"valid_loss": {"min_delta": 0.1}}},
    {"mixed_precision": "bf-16"},
    {"mixed_precision": 64},
    {"accelerator": "cpu"},
    {"accelerator": 2},
    {"accelerator": {"mixed_precison": "bf16"}},
    {"parallelism": "fsdp"},
    {"parallelism": {"ddp": [1]}},
    {"parallelism": {"ddp": {"devices": 2}}},
    {"parallelism": {"ddp": {}, "shard": 2}},
    {"parallelism": {"engine": "fast"}},
    {"parallelism": {"tp": 0}},
    {"compile": "max-autotune"},
    {"compile": {"backends": "eager"}},
    {"compile": {"buckets": 0}},
    {"gradient_checkpointing": "yes"},
    {"torch_flags": {"deterministic": "no"}},
    {"fast_dev_run": -1},
    {"enable_model_summary": "deep"},
    {"profiler": "Simple"},
    {"callbacks": 3},
    {"log_with": "wandbb"},
    {"log_with": 3},
    {"log_with": ""},
    {"monitor": ["learning_rates"]},
    {"monitor": {"mfu": "fast"}},
    {"monitor": 3},
    {"tracker_options": {"config": ["a"], "flush_s": -1}},
    {"ledger": 3},
    {"ledger": {"every": 0, "on_difference": "stopp"}},
    {"track_name": " "},
    {"lr": 1e-3},
    {"batch_sise": 4},
    {"max_checkpoints": 3},
    {"gpus": 2},
    {"early_stopping": 3},
    {"model_path": None},
    {"model_path": "s3://"},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: str(arguments)[:60])
def test_the_advice_about_an_argument_is_accepted(arguments: dict[str, Any]) -> None:
    assert_followed(Trainer, {"hps_config": HPS, "model_path": "out/model", **arguments})


OPTIONS: list[tuple[type, dict[str, Any]]] = [
    (accmt.CheckpointOptions, {"max_checkpoints": "3"}),
    (accmt.Clipping, {"value": -1}),
    (accmt.DataOptions, {"shard": "no"}),
    (accmt.Failures, {"preempt_exit_code": 256, "machine_timeout_s": "60"}),
    (accmt.Limits, {"train": 0}),
    (accmt.Monitor, {"epoch": "yes", "grad_norm": "two", "price_per_hour": -1}),
    (accmt.ParallelismOptions, {"fsdp": False}),
    (accmt.PatienceOptions, {"stopping_threshold": "high"}),
    (accmt.TorchFlags, {"benchmark": "fast"}),
    (accmt.TrackerOptions, {"offline": "yes"}),
]


@pytest.mark.parametrize(("options", "arguments"), OPTIONS, ids=[options.__name__ for options, _ in OPTIONS])
def test_the_advice_about_an_option_is_accepted(options: type, arguments: dict[str, Any]) -> None:
    assert_followed(options, arguments)


def follow_in_yaml(hps: dict[str, Any], fault: Fault) -> dict[str, Any]:
    """Return hyper-parameters after following the advice of one error about them."""
    changed = copy.deepcopy(hps)
    path = fault.where.split(" ")[-1].split(".")
    section = changed
    for key in path[:-1]:
        if not isinstance(section.get(key), dict):
            section[key] = {"type": section[key]}
        section = section[key]
    removed = re.match(r"(?:keep one: )?remove `(\w+)`", fault.do)
    [text, *_] = re.findall(r"`(.+?)`", fault.do)
    if removed:
        section.pop(removed[1])
        return changed
    lines = read_numbers(yaml.safe_load(text))
    if isinstance(lines, str):  # the name of a key, or the value of this key
        if path[-1] == "type" or fault.got.startswith(("'", "nothing")):
            section[path[-1]] = lines
        else:
            section[lines] = section.pop(path[-1])
    elif set(lines) <= {path[0]} or len(path) == 1:
        if path[0] not in lines and "add" not in fault.do:
            changed.pop(path[0], None)
        changed |= lines
    else:
        section |= lines
    return changed


SGD = {"type": "SGD", "lr": 0.1}
WARMING = {"type": "LinearWithWarmup"}
YAML: list[dict[str, Any]] = [
    {"epochs": 0},
    {"epochs": "three"},
    {"epochs": None},
    {"epoch": 3},
    {"batch_size": 0},
    {"batch_size": [8, 16, 32, 64]},
    {"batch_size": "big"},
    {"batchsize": 8},
    {"max_steps": 1.5},
    {"max_tokens": "many"},
    {"max_micro_batch_size": "automatic"},
    {"packing": True},
    {"packing": "yes please", "max_tokens": 8},
    {"step_scheduler_per_epoch": 3},
    {"optim": 3},
    {"optim": {"lr": 0.1}},
    {"optim": "AdamV"},
    {"optim": "LBFGS"},
    {"optim": "torch.nn.Linear"},
    {"optim": {"type": "SGD", "learning_rate": 0.1}},
    {"optim": {"type": "SGD", "lr": "fast"}},
    {"optim": {"type": "SGD", "lr": True}},
    {"optim": {"type": "SGD", "lr": -1}},
    {"optim": {"type": "SGD", "zzzzzz": 1}},
    {"optim": {"type": "SGD", "nesterov": 1}},
    {"optim": {"type": "AdamW", "betas": [0.9]}},
    {"optim": {"type": "AdamW", "betas": "0.8,0.9"}},
    {"optim": SGD, "optimizer": SGD},
    {"scheduler": {"type": "StepLR"}},
    {"scheduler": {"type": "StepLR", "step_size": 1.5}},
    {"scheduler": {"type": "ReduceLROnPlateau", "mode": "mim"}},
    {"scheduler": {"type": "ReduceLROnPlateau", "monitor": 3}},
    {"scheduler": {"type": "OneCycleLR", "max_lr": 0.1, "total_steps": 10}},
    {"scheduler": {**WARMING, "warmup_ratio": 1.1}},
    {"scheduler": {**WARMING, "num_warmup_steps": -1}},
    {"scheduler": {**WARMING, "num_warmup_steps": 5, "warmup_ratio": 0.1}},
    {"scheduler": "Cosine"},
    {"sft": {"data": "a.jsonl", "max_lenght": 3}},
    {"data": {"mix": 3}},
    {"evaluation": {"generat": {}}},
]


@pytest.mark.parametrize("keys", YAML, ids=lambda keys: str(keys)[:60])
def test_the_advice_about_a_key_is_accepted(keys: dict[str, Any]) -> None:
    hps = {"epochs": 1, "batch_size": 4, **keys}
    faults = find_faults(lambda: HyperParameters.from_config(hps))
    assert faults, f"{keys} raises nothing"
    for fault in faults:
        hps = follow_in_yaml(hps, fault)
    left_over = {fault.where for fault in find_faults(lambda: HyperParameters.from_config(hps))}
    assert left_over.isdisjoint(fault.where for fault in faults), (faults, hps)


SWEEP: list[dict[str, Any]] = [
    {"objective": {"val_loss": "minimise"}},
    {"objective": {"f1": "up"}},
    {"objective": "val_los"},
    {"space": {"optim.lr": {"min": 1e-4, "max": 1e-2}}},
    {"space": {"optim.lr": {"log_uniform": [1, 0]}}},
    {"trials": None},
]


@pytest.mark.parametrize("keys", SWEEP, ids=lambda keys: str(keys)[:60])
def test_the_advice_about_a_sweep_is_accepted(keys: dict[str, Any]) -> None:
    spec: dict[str, Any] = {"space": {"optim.lr": [0.1, 0.2]}, "objective": "val_loss", "trials": 2, **keys}
    (fault,) = find_faults(lambda: Sweep(**spec))
    [text, *_] = re.findall(r"`(.+?)`", fault.do)
    advice = read_numbers(yaml.safe_load(text))
    if isinstance(advice, str):
        advice = {"objective": advice}
    key = fault.where.split(" ")[1].partition(".")[0]
    spec |= advice if key in advice else {key: {"optim.lr": advice}}
    assert find_faults(lambda: Sweep(**spec)) == ()


class Rows(Dataset[Any]):
    """Samples that are held in a list."""

    def __init__(self, *rows: Any) -> None:
        self.rows = rows

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


def with_step(step: Callable[..., Any], name: str = "step") -> AcceleratorModule:
    """Return a module whose step is the given function."""
    return type("Mine", (Linear,), {name: step})()


class Bare(AcceleratorModule):
    """A module without a step."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)


class Measured(Linear):
    """Reports a value without a direction, under a name with a slash."""

    def validation_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.step(batch), "val/iou": torch.tensor(0.5)}


def mean_of(module: Linear, batch: Any) -> torch.Tensor:
    return module.model(batch[0]).mean()


def forget_the_loss(module: Linear, batch: Any) -> None:
    mean_of(module, batch)


FIT: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    ("no module", {"module": 3}, "class MyModule(AcceleratorModule)", {"module": Linear()}),
    ("a class", {"module": Linear}, "trainer.fit(Linear(...)", {"module": Linear()}),
    ("a model", {"module": nn.Linear(3, 1)}, "AcceleratorModule.from_functions", {"module": Linear()}),
    ("no step", {"module": Bare()}, "def training_step", {"module": with_step(mean_of)}),
    (
        "nothing returned",
        {"module": with_step(forget_the_loss)},
        "return loss",
        {"module": with_step(mean_of)},
    ),
    ("a number", {"module": with_step(lambda module, batch: 3.0)}, "not loss.item()", {"module": with_step(mean_of)}),
    (
        "several losses",
        {"module": with_step(lambda module, batch: module.model(batch[0]))},
        "return loss.mean()",
        {"module": with_step(lambda module, batch: module.model(batch[0]).mean())},
    ),
    (
        "no graph",
        {"module": with_step(lambda module, batch: mean_of(module, batch).detach())},
        "do not detach it",
        {"module": with_step(mean_of)},
    ),
    (
        "a dict without loss",
        {"module": with_step(lambda module, batch: {"los": mean_of(module, batch)})},
        'return {"loss": loss, ...}',
        {"module": with_step(lambda module, batch: {"loss": mean_of(module, batch)})},
    ),
    (
        "a misspelled hook",
        {"module": with_step(lambda module: None, "on_epoch_finish")},
        "did you mean on_epoch_end?",
        {"module": with_step(lambda module: None, "on_epoch_end")},
    ),
    (
        "a misspelled step",
        {"module": with_step(mean_of, "trainning_step")},
        "rename it to training_step",
        {"module": with_step(mean_of, "training_step")},
    ),
    ("a path as data", {"data": "train.csv"}, "load it: datasets.load_dataset", {"data": make_points()}),
    ("a class as data", {"data": Numbers}, "pass an object of it", {"data": make_points()}),
    ("a number as data", {"data": 3}, "pass one of these to fit", {"data": make_points()}),
    ("no data", {"data": Rows()}, "check the data's path and filters", {"data": make_points()}),
    (
        "samples of several lengths",
        {"data": Rows((torch.zeros(3), torch.zeros(1)), (torch.zeros(4), torch.zeros(1)))},
        "or your own function",
        {"collate_fn": lambda samples: (torch.zeros(2, 3), torch.zeros(2, 1))},
    ),
    ("a validation path", {"validation": "val.csv"}, "load it: datasets.load_dataset", {"validation": make_points()}),
    (
        "a metric without validation",
        {"metrics": "f1", "model_saving": "best_f1"},
        "or model_saving='best_train_loss'",
        {"model_saving": "best_train_loss"},
    ),
    (
        "a validation step without loss",
        {"module": with_step(lambda module, batch: 3, "validation_step"), "validation": make_points()},
        'return {"loss": loss}',
        {"module": with_step(lambda module, batch: {"loss": mean_of(module, batch)}, "validation_step")},
    ),
    (
        "a value that no step reports",
        {"module": Measured(), "validation": make_points(), "metrics": {"acc": "max"}, "model_saving": "best_acc"},
        "choose one of ['best_train_loss', 'best_valid_loss']",
        {"model_saving": "best_valid_loss"},
    ),
    (
        "a loss that is not finite",
        {"module": with_step(lambda module, batch: mean_of(module, batch) * float("nan"))},
        'failures={"on_nonfinite": "skip"}',
        {"failures": {"on_nonfinite": "skip"}},
    ),
    ("no optimizer", {"hps_config": {"epochs": 1, "batch_size": 2}}, "optim: {type: AdamW", {"hps_config": HPS}),
]


@pytest.mark.parametrize(("call", "advice", "fix"), [row[1:] for row in FIT], ids=[row[0] for row in FIT])
def test_the_advice_about_a_run_is_accepted(call: dict[str, Any], advice: str, fix: dict[str, Any]) -> None:
    def fit(
        module: Any = None, data: Any = None, validation: Any = None, hps_config: Any = HPS, **arguments: Any
    ) -> None:
        trainer = Trainer(hps_config, "out/model", verbose=False, **arguments)
        trainer.fit(module or Linear(), make_points() if data is None else data, validation)

    (fault,) = find_faults(lambda: fit(**call))
    assert advice in fault.do
    fixed = {**call, **fix}
    assert fault.where not in {again.where for again in find_faults(lambda: fit(**fixed))}


def test_the_table_covers_the_public_entrance() -> None:
    assert len(ARGUMENTS) + len(OPTIONS) + len(YAML) + len(SWEEP) + len(FIT) >= 60
    assert make_trainer()  # the call that the rows change is valid
