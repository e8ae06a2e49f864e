"""Whoever comes from the original accmt finds each of its names, or an error with the line to write."""

from __future__ import annotations

import builtins
import importlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, MutableSequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.parallelism_config import ParallelismConfig

import accmt
from accmt import Metric, Trainer, TrainingState
from accmt.addons.hints.original import ATTRIBUTES, HOMES, METRIC_KEYWORDS, NAMES, UTILITIES
from accmt.addons.hints.table import FOREIGN
from accmt.addons.recursive_collators import COLLATORS
from accmt.callbacks import HOOKS
from accmt.cli.main import COMMANDS, main
from accmt.errors import ArgumentError, UnknownArgumentError
from accmt.options import Settings
from accmt.trainer.calls import ALIASES
from tests.tables import each
from tests.toys import HPS, ByHand, Linear, check_module, make_points, make_trainer

EXISTS = ""
ARGUMENTS: dict[str, tuple[Any, str]] = {
    "batch_sampler_train": ([[0]], "data_options={"),
    "batch_sampler_val": ([[0]], "def get_validation_dataloader"),
    "cleanup_cache_every_n_steps": (7, "global_step % 7 == 0: torch.cuda.empty_cache()"),
    "destroy_after_training": (True, "trainer.close()"),
    "disable_model_saving": (True, "Trainer(model_saving=None)"),
    "enable_prepare_logging": (True, "Trainer(enable_model_summary=True)"),
    "module_hooks": (False, "leave on_evaluation_start"),
    "multiple_checkpoints": (True, 'Trainer(checkpoint_options={"max_checkpoints": 3})'),
    "prepare_batch": (True, "leave it out"),
    "reset_optimizer_every_n_steps": (7, "global_step % 7 == 0: self.trainer.reset_optimizer()"),
    "safe_mode": (False, "leave it out"),
    "safe_steps": (True, "`max_micro_batch_size: auto`"),
    "enable_checkpointing": (False, "checkpoint_every=None"),
    "max_checkpoints": (2, 'checkpoint_options={"max_checkpoints": 2}'),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False}, "Trainer(gradient_checkpointing="),
    "sampler_train": ([0], "sampler={"),
    "sampler_val": ([0], "sampler={"),
    "batch_sampler": ([[0]], "data_options={"),
    "collate_fn_train": (list, "collate_fn={"),
    "collate_fn_val": (list, "collate_fn={"),
    "compile_kwargs": ({}, "compile={}"),
    "dataloader_drop_last": (True, 'data_options={"drop_last"'),
    "consolidate_metrics": ({}, 'metric_options={"averages"'),
    "additional_metric_consolidation": (dict, 'metric_options={"derived"'),
    "report_all_metrics": (True, 'metric_options={"report_all"'),
    "additional_tracker_config": ({}, 'tracker_options={"config"'),
    "batch_device_placement": (False, 'data_options={"device_placement"'),
}
SAME_ARGUMENTS = [
    "hps_config", "model_path", "track_name", "resume", "patience", "evaluate_every_n_steps", "checkpoint_every",
    "logging_dir", "log_with", "log_every", "grad_accumulation_steps", "gradient_checkpointing", "clip_grad",
    "set_to_none", "shuffle_train", "sampler", "collate_fn", "max_shard_size", "safe_serialization", "compile",
    "train_loss_metric_name", "val_loss_metric_name", "dataloader_pin_memory", "dataloader_num_workers",
    "eval_when_finish", "eval_when_start", "monitor", "metrics", "callback", "inference_mode",
]  # fmt: skip
OF_MODULE = {
    "register": "accmt.ChainedOptimizer",
    "additional_backward": "self.backward(loss)",
    "additional_optimizer_step": "self.step_optimizer(optimizer)",
    "additional_optimizer_zero_grad": "self.zero_grad()",
    "additional_scheduler_step": "self.step_scheduler(scheduler)",
    "compile": "Trainer(compile={",
    "reset_optimizer": "self.trainer.reset_optimizer()",
    "save_temp_state": "self.trainer.save_checkpoint(",
    "load_temp_state": "Trainer(resume=",
}
OVERRIDES = {
    "compile": "compile={",
}
SAME_OF_MODULE = [
    "forward", "training_step", "validation_step", "test_step", "get_optimizer", "get_scheduler",
    "get_train_dataloader", "get_validation_dataloader", "log", "from_hf", "collate_fn", "collate_fn_train",
    "collate_fn_val", "pad", "free_memory",
]  # fmt: skip
SAME_NAMES = [
    "AcceleratorModule", "Callback", "ExtendedAcceleratorModule", "HyperParameters", "Monitor", "Optimizer",
    "Scheduler", "Trainer", "accelerator", "allow_tf32", "on_last_process", "on_local_main_process",
    "on_local_process", "on_main_process", "on_process", *HOMES,
]  # fmt: skip
SAME_UTILITIES = ("dist_breakpoint", "iterbatch", "set_seed")


@each(("name", "value", "line"), [(name, *row) for name, row in ARGUMENTS.items()])
def test_an_argument_of_the_original_exists_or_its_error_has_the_line(name, value, line):
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(HPS, "out/model", **{name: value})
    (fault,) = caught.value.faults
    assert line in fault.do
    assert "did you mean" not in fault.do


def test_the_other_arguments_of_the_original_are_arguments_here():
    assert set(SAME_ARGUMENTS) <= {"hps_config", *Settings.defaults(), *ALIASES, "model_path"}


@each(("name", "line"), [*OF_MODULE.items(), *[(name, EXISTS) for name in SAME_OF_MODULE]])
def test_a_name_of_the_module_exists_or_its_error_has_the_line(name, line):
    if line == EXISTS:
        getattr(Linear(), name)
        return
    with pytest.raises(AttributeError) as caught:
        getattr(Linear(), name)
    assert line in str(caught.value)


@each(("name", "line"), OVERRIDES.items())
def test_a_method_that_the_original_calls_is_an_error_with_the_line(name, line):
    with pytest.raises(accmt.ModuleContractError) as caught:
        check_module(type("Ported", (Linear,), {name: lambda self: None})())
    assert line in str(caught.value)


def test_attributes_that_have_another_name_here_have_its_value():
    trainer = make_trainer()
    trainer.fit(Linear(), make_points(8), make_points(4))
    state = trainer.state
    assert state.is_end_of_epoch == state.is_last_training_batch
    assert state.additional_metrics == {"0": {"valid_loss": state.metrics["val_loss"]}}
    assert trainer.log_artifact == trainer.run.module.log_artifact
    module, data = trainer.run.module, make_points(4)
    assert trainer.evaluate_on_validation(module, data, "first.json") == trainer.validate(module, data)
    assert trainer.evaluate_on_test(module, data) == trainer.test(module, data)
    assert json.loads(Path("results.json").read_text())
    assert Path("first.json").exists()


@each(("kind", "name"), [(kind, name) for kind, names in ATTRIBUTES.items() for name in names])
def test_an_attribute_of_trainer_and_state_is_an_error_with_the_line(kind, name):
    owner = make_trainer() if kind == "Trainer" else TrainingState()
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    line = ATTRIBUTES[kind][name]
    assert f"do: {line if line.startswith('leave ') else f'write {line}'}" in str(caught.value)
    with pytest.raises(AttributeError, match=f"'{kind}' object has no attribute 'something'"):
        _ = owner.something


def test_an_attribute_error_of_a_property_stays_what_it_is():
    class Mine(Trainer):
        @property
        def broken(self) -> int:
            return self.hps.no_such_key

    with pytest.raises(AttributeError, match="no_such_key"):
        _ = Mine(HPS, "out/model").broken


@each("name", [*SAME_NAMES, *NAMES, "accelerator", "set_seed"])
def test_a_name_of_the_package_exists_or_its_error_has_the_line(name):
    if name not in NAMES:
        getattr(accmt, name)
        return
    with pytest.raises(ImportError) as caught:
        getattr(accmt, name)
    assert f"do: write {NAMES[name]}" in str(caught.value)


@each("name", [*SAME_UTILITIES, *UTILITIES])
def test_a_utility_exists_or_its_error_has_the_line(name):
    utils = importlib.import_module("accmt.utils")
    if name in SAME_UTILITIES:
        assert getattr(utils, name) is getattr(accmt, name)
        return
    for owner in (utils, accmt):
        with pytest.raises(ImportError) as caught:
            getattr(owner, name)
        assert f"do: write {UTILITIES[name]}" in str(caught.value)
    with pytest.raises(AttributeError):
        _ = utils.something


MODULES = {
    "callbacks": "Callback", "collate_fns": "DataCollatorForSeq2Seq", "curriculum": "RatioCurriculum",
    "debug_timings": "DebugTimings", "decorators": "on_process", "evaluator": "Evaluator",
    "hp_search": "HyperParameterSearch", "hyperparameters": "HyperParameters", "metrics": "Metric",
    "modules": "AcceleratorModule", "monitor": "Monitor", "states": "TrainingState", "tqdm": "tqdm",
    "tracker": "MLFlow", "trainer": "Trainer",
}  # fmt: skip


@each(("module", "name"), MODULES.items())
def test_a_module_of_the_original_has_its_names(module, name):
    found = importlib.import_module(f"accmt.{module}")
    if name in NAMES or name in UTILITIES:
        with pytest.raises(ImportError, match="do: write"):
            getattr(found, name)
        return
    assert getattr(found, name) is getattr(accmt, name) or name in COLLATORS
    with pytest.raises(AttributeError):
        _ = found.something


@each("kind", [Metric, accmt.metrics.MetricParallel, accmt.metrics.MetricBatch])
def test_a_keyword_of_a_metric_is_an_error_with_the_line(kind):
    mine = type("Mine", (kind,), {"compute": lambda self, predictions, references: {}})
    with pytest.raises(UnknownArgumentError) as caught:
        mine("x", do_checks=False, cast=None, greater_is_beter=True)
    assert [fault.do for fault in caught.value.faults] == [
        METRIC_KEYWORDS["do_checks"],
        METRIC_KEYWORDS["cast"],
        "did you mean greater_is_better?",
    ]


SHELL = [
    ("alaunch -n 0 -e 1 train.py", "accmt evaluate RUN --watch"),
    ("async-launch train.py", "accmt evaluate RUN --watch"),
    ("adebug --level 4 train.py", "`accmt debug --gpus 0,1 train.py`"),
    ("debug-levels", "`accmt debug --help`"),
    ("get here -o there", "accmt get CHECKPOINT FOLDER"),
    ("launch -n 0,1 train.py", "--gpus 0,1"),
    ("launch --strat fsdp-bf16 train.py", 'fsdp2, with Trainer(mixed_precision="bf16")'),
    ("launch --strat deepspeed-2 train.py", "--strat fsdp2"),
    ("launch --debug-timings train.py", 'Trainer(profiler="simple")'),
    ("strats --ddp", "accmt strats"),
]


@pytest.mark.parametrize(("typed", "line"), SHELL, ids=[typed for typed, _ in SHELL])
def test_a_command_of_the_original_is_an_error_with_the_line(typed, line, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    try:
        code = main(typed.split())
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert line in capsys.readouterr().err


# ---- The lines themselves: they are Python, and name what exists.

ADVICE = [
    *NAMES.values(),
    *UTILITIES.values(),
    *(line for lines in ATTRIBUTES.values() for line in lines.values()),
    *(
        line
        for row in FOREIGN["the original accmt"].values()
        for line in ([row] if isinstance(row, str) else row.values())
    ),
    *OF_MODULE.values(),
    *(do for _, do in SHELL),
]
ROOTS = {"trainer": Trainer(HPS, "out/model"), "state": TrainingState(), "accmt": accmt}


@each("advice", sorted(set(ADVICE)))
def test_what_the_advice_names_exists(advice):
    arguments = {*Settings.defaults(), "model_path"}
    for call in re.findall(r"Trainer\(((?:[^()]|\([^()]*\))*)\)", advice):
        names = re.findall(r"(?:^|, )(\w+)=", re.sub(r"\{[^}]*\}|\(.*?\)|lambda.*", "", call))
        assert set(names) <= arguments, call
    for root, path in re.findall(r"(?<![\w.])(trainer|state|accmt)\.([\w.]+)", advice):
        resolve(ROOTS[root], path)
    for path in re.findall(r"self\.(trainer|state)\.(\w+)", advice):
        resolve(ROOTS[path[0]], path[1])
    for name in re.findall(r"self\.(\w+)\(", advice):
        assert hasattr(ByHand(), name), name
    for path in re.findall(
        r"(?<![\w.])((?:torch|transformers|numpy|accelerate|tqdm|importlib|urllib|random)\.[\w.]+)", advice
    ):
        resolve_import(path)
    for name in re.findall(r"def (\w+)\(", advice):
        assert name in HOOKS or hasattr(accmt.AcceleratorModule, name), name
    for command in re.findall(r"`accmt (\w+)", advice):
        assert command in COMMANDS


def resolve(owner: Any, path: str) -> None:
    """Follow a dotted name; attributes that exist during a run only count."""
    for name in path.rstrip(".").split("."):
        if owner is ROOTS["trainer"] and isinstance(getattr(type(owner), name, None), property):
            return
        owner = getattr(owner, name)


def resolve_import(path: str) -> None:
    """Follow a dotted name from a package outside."""
    names = path.rstrip(".").split(".")
    owner: Any = importlib.import_module(names[0])
    for index, name in enumerate(names[1:], 2):
        if not hasattr(owner, name):
            importlib.import_module(".".join(names[:index]))
        owner = getattr(owner, name)


# ---- What exists under its name.


@pytest.mark.parametrize(
    ("variable", "decorator"), [("RANK", accmt.on_process), ("LOCAL_RANK", accmt.on_local_process)]
)
def test_a_function_runs_on_one_process_only(variable, decorator, monkeypatch):
    @decorator(1)
    def work(value: int) -> int:
        return value

    assert work(3) is None
    with monkeypatch.context() as changed:
        changed.setenv(variable, "1")
        assert work(3) == 3


def test_batches_of_a_list_are_slices():
    assert list(accmt.iterbatch(range(5), 2)) == [range(2), range(2, 4), range(4, 5)]
    assert [len(part) for part in accmt.iterbatch(torch.zeros(5, 2), 3)] == [3, 2]


def test_a_breakpoint_needs_no_process_group(monkeypatch):
    calls = []
    monkeypatch.setattr(builtins, "breakpoint", lambda: calls.append(1))
    accmt.dist_breakpoint()
    assert calls == [1]


# ---- Mappings that are no dicts, as OmegaConf's.


class Items(MutableSequence[Any]):
    """A list of a configuration, such as OmegaConf's `ListConfig`."""

    def __init__(self, *items: Any) -> None:
        self.items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.items[index] = value

    def __delitem__(self, index: Any) -> None:
        del self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def insert(self, index: int, value: Any) -> None:
        self.items.insert(index, value)


class Config(Mapping[str, Any]):
    """A mapping that is no dict, such as OmegaConf's `DictConfig`."""

    def __init__(self, **values: Any) -> None:
        self.values_by_key = values

    def __getitem__(self, key: str) -> Any:
        return self.values_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


def test_any_mapping_is_accepted_where_a_dict_is():
    optim = Config(type="AdamW", lr=1e-3, betas=Items(0.8, 0.9))
    trainer = Trainer(
        Config(hps=Config(epochs=1, batch_size=Items(2, 4), optim=optim)),
        "out/model",
        parallelism=Config(ddp=Config(bucket_cap_mb=30)),
        tracker_options=Config(config=Config(team=Config(name="a"), tags=Items("x"))),
        failures=Config(on_nonfinite="skip"),
        data_options=Config(drop_last=True),
        patience=Config(valid_loss=Config(patience=3)),
        limit_batches=Config(train=3),
        compile=Config(mode="default"),
        log_with="mlflow",
        mlflow=Config(tags=Config(a="b")),
    )
    assert trainer.hps.optim_kwargs["betas"] == (0.8, 0.9)
    assert trainer.hps.batch_size == (2, 4)
    arguments = trainer.config()
    assert arguments["parallelism"] == {"ddp": {"bucket_cap_mb": 30}}
    assert arguments["tracker_options"] == {"config": {"team": {"name": "a"}, "tags": ["x"]}}
    assert arguments["mlflow"] == {"tags": {"a": "b"}}
    assert arguments["compile"] == {"mode": "default"}
    assert Trainer(**arguments).config() == arguments


def test_a_mapping_of_hyper_parameters_trains():
    config = Config(epochs=1, batch_size=2, optim=Config(type="SGD", lr=0.1))
    assert accmt.HyperParameters.from_config(config).to_dict() == accmt.HyperParameters.from_config(HPS).to_dict()
    assert Trainer(config, "out/model", verbose=False).fit(Linear(), make_points()).global_step == 4


SIZES = [
    ({}, None),
    ({"dp_replicate_size": 4}, None),
    ({"dp_shard_size": 4}, {"shard": 4, "replicate": 1, "tp": 1}),
    ({"dp_replicate_size": 2, "dp_shard_size": 4}, {"shard": 4, "replicate": 2, "tp": 1}),
    ({"tp_size": 2}, {"shard": 1, "replicate": 1, "tp": 2}),
]


@each(("sizes", "options"), SIZES)
def test_accelerates_parallelism_config_is_accepted(sizes, options):
    parallelism = Trainer(HPS, "out/model", parallelism=ParallelismConfig(**sizes)).settings.running.parallelism
    assert (parallelism and parallelism.to_dict()) == options


@each("key", ["sp", "cp", "ep"])
def test_other_ways_to_split_are_answered_with_what_exists(key):
    with pytest.raises(ArgumentError) as caught:
        Trainer(HPS, "out/model", parallelism={key: 2})
    (fault,) = caught.value.faults
    assert fault.do.startswith(f"leave `{key}` out: ")
    assert 'parallelism={"fsdp": True}' in fault.do
    if key == "ep":
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = ParallelismConfig(**{f"{key}_size": 2})
    with pytest.raises(ArgumentError) as caught:
        Trainer(HPS, "out/model", parallelism=config)
    assert caught.value.faults[0].do == fault.do


@each(
    "name", ["aim", "clearml", "comet_ml", "dagshub", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
)
def test_every_tracker_of_report_to_has_its_class(name):
    with pytest.raises(UnknownArgumentError) as caught:
        Trainer(HPS, "out/model", report_to=name)
    tracker = re.fullmatch(r"write Trainer\(log_with=accmt\.(\w+)\)", caught.value.faults[0].do)[1]
    assert hasattr(accmt, tracker)


def test_a_tracker_that_does_not_exist_is_named():
    with pytest.raises(UnknownArgumentError, match="there is no tracker neptune"):
        Trainer(HPS, "out/model", report_to="neptune")
