"""Names of other trainers' arguments: what is advised is a line that works here."""

from __future__ import annotations

import ast
import re
from datetime import timedelta

import pytest
import yaml
from accelerate import InitProcessGroupKwargs
from transformers import IntervalStrategy, SchedulerType, TrainingArguments

import accmt
from accmt import HyperParameters, Trainer
from accmt.addons.hints.arguments import advise, example_of, find_foreign
from accmt.addons.hints.table import FOREIGN
from accmt.errors import HyperParameterError, UnknownArgumentError
from accmt.options import Settings
from accmt.options.yaml_reader import FIELDS
from accmt.trainer.calls import ALIASES
from tests.raising import raises_at
from tests.tables import each
from tests.toys import HPS

ADVICE = sorted({example_of(name) for names in FOREIGN.values() for name in names})
LINES = [here for here in ADVICE if here.split(":")[0] in FIELDS]
CALLS = [here for here in ADVICE if here.startswith("Trainer(")]
OBJECTS = {
    "InitProcessGroupKwargs": InitProcessGroupKwargs,
    "timedelta": timedelta,
    "accmt": accmt,
    "collator": list,
    "sampler": [[0]],
    "handler": object(),
    "args": TrainingArguments("out"),
}


def test_names_of_ours_are_not_foreign():
    ours = {"hps_config", "model_path", "kwargs", *Settings.defaults(), *ALIASES, *FIELDS} - {
        "model"
    }  # theirs is an object
    assert [name for names in FOREIGN.values() for name in names if name in ours] == []


@each("line", LINES)
def test_an_advised_line_of_the_hyper_parameters_can_be_read(line):
    assert HyperParameters.from_config({"hps": HPS | yaml.safe_load(line)})


@pytest.mark.parametrize("call", CALLS)
def test_an_advised_argument_of_the_trainer_can_be_given(call):
    def make(**arguments):
        return Trainer(**{"hps_config": HPS, "model_path": "out", **arguments})

    assert eval(re.split(r"(?<=\)), and ", call)[0], {"Trainer": make, **OBJECTS}).settings


def test_the_rest_of_the_advice_is_a_command_or_python_or_says_that_nothing_is_to_be_written():
    for here in ADVICE:
        if here not in {*LINES, *CALLS}:
            check_rest(here)


NO_PYTHON = ("leave ", "there is ", "accmt launch ", "accelerate launch ", "python ")


def check_rest(here):
    if here.startswith(NO_PYTHON):
        return
    code = re.split(r", which|, and |, a function| in on_", here)[0]
    ast.parse(f"{code}: pass" if re.fullmatch(r"def \w+\([\w, ]+\)", code) else code)


@each(
    ("key", "value", "advice"),
    [
        ("num_train_epochs", 3, "write `epochs: 3` in the hyper-parameters"),
        ("lr", 1e-3, "write `optim: {type: SGD, lr: 0.001}`"),
        ("gradient_accumulation_steps", 4, "write Trainer(grad_accumulation_steps=4)"),
        ("seed", 1, "write Trainer(seed=1)"),
        ("model_path", "out", "write Trainer(model_path='out')"),
        ("eopchs", 3, "write `epochs`"),
        ("anything", 3, "remove `anything`"),
    ],
)
def test_a_key_that_is_no_hyper_parameter_gets_the_advice_of_its_name(key, value, advice):
    with raises_at(HyperParameterError, f"hps_config {key}", do=advice):
        HyperParameters.from_config({"hps": {**HPS, key: value}})


def test_a_foreign_key_beside_hps_is_not_told_to_be_indented(tmp_path):
    path = tmp_path / "hps.yaml"
    path.write_text("hps: {epochs: 1, batch_size: 2, optim: SGD}\nlr: 0.1\nmax_steps: 3\n")
    with pytest.raises(HyperParameterError) as caught:
        HyperParameters.from_config(path)
    assert "hps.yaml:2 lr\n" in str(caught.value)
    assert "do: write `optim: {type: AdamW, lr: 0.1}`" in str(caught.value)
    assert "do: indent `max_steps` below `hps:`" in str(caught.value)


class WandbLogger:
    """Has the name of Lightning's."""

    def __repr__(self):
        return "WandbLogger()"


LEAVE = "leave "
BY_VALUE = [
    ("replace_sampler_ddp", False, 'Trainer(data_options={"shard": False})'),
    ("gradient_clip_val", 0.5, "Trainer(clip_grad=0.5)"),
    ("devices", 8, "accmt launch -N 8 train.py"),
    ("devices", [0, 3], "accmt launch --gpus 0,3 train.py"),
    ("gpus", 0, 'Trainer(accelerator={"cpu": True})'),
    ("strategy", "deepspeed_stage_2", 'Trainer(parallelism={"fsdp": True})'),
    ("accumulate_grad_batches", 1, LEAVE),
    ("max_length", 512, "sft: {data: train.jsonl, max_length: 512}"),
    ("max_epochs", -1, "leave it out, and write `max_steps"),
    ("num_train_epochs", 2.5, "epochs: 3  # and max_steps"),
    ("val_check_interval", 1.0, LEAVE),
    ("logger", WandbLogger(), "Trainer(log_with=accmt.WandB)"),
    ("logger", [WandbLogger(), "mlflow"], "Trainer(log_with=[accmt.WandB, accmt.MLFlow])"),
    ("report_to", "comet_ml", "Trainer(log_with=accmt.CometML)"),
    ("eval_strategy", "no", "leave the validation data out"),
    ("eval_strategy", IntervalStrategy.STEPS, "Trainer(evaluate_every_n_steps=500)"),
    ("metric_for_best_model", "eval_accuracy", 'Trainer(model_saving="best_accuracy", metrics=["accuracy"])'),
    ("learning_rate", 5e-5, "optim: {type: AdamW, lr: 5e-05}"),
    ("warmup_steps", 50, "scheduler: {type: LinearWithWarmup, num_warmup_steps: 50}"),
    ("warmup_steps", 0.1, "scheduler: {type: LinearWithWarmup, warmup_ratio: 0.1}"),
    ("label_smoothing_factor", 0.1, "cross_entropy(logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1)"),
]


@each(("name", "value", "line"), BY_VALUE)
def test_the_advice_has_the_value_that_was_typed(name, value, line):
    owner, do = find_foreign(name, value)
    assert line in do.replace("`", "") if line[:6] != "leave " and "`" not in line else line in do
    assert do.startswith("leave ") == line.startswith("leave ")


OPTIMIZER = "optim: {type: AdamW, lr: 5e-05, weight_decay: 0.1, no_decay: [bias, norm]}"
AXOLOTL = {"base_model": "./x", "adapter": "qlora", "lora_r": 8, "lora_alpha": 16, "lora_target_modules": ["q_proj"]}
LLAMA = "path: ./x, type: AutoModelForCausalLM"
JOINT = [
    ({"per_device_train_batch_size": 8, "per_device_eval_batch_size": 16}, "batch_size: [8, 16]"),
    ({"per_device_eval_batch_size": 16}, "batch_size: [16, 16]"),
    ({"learning_rate": 5e-5, "weight_decay": 0.1}, OPTIMIZER),
    (AXOLOTL, f"model: {{{LLAMA}, quantization: nf4, lora: {{r: 8, alpha: 16, targets: [q_proj]}}}}"),
    (
        {"base_model": "./x", "load_in_8bit": True, "lora_r": 8, "lora_target_linear": True, "flash_attention": True},
        f"model: {{{LLAMA}, quantization: int8, lora: {{r: 8, targets: all-linear}}, "
        "attn_implementation: flash_attention_2}",
    ),
    ({"base_model": "./x", "load_in_4bit": False}, f"model: {{{LLAMA}}}"),
    (
        {"datasets": [{"path": "a.jsonl"}], "val_set_size": 0.1, "sequence_len": 64},
        "sft: {data: a.jsonl, validation: validation.jsonl, max_length: 64}",
    ),
    ({"learning_rate": 5e-5, "weight_decay": 0.1, "adam_beta2": None}, OPTIMIZER),
    ({"adam_beta1": 0.8, "adam_beta2": 1}, "optim: {type: AdamW, lr: 1e-4, betas: [0.8, 1.0]}"),
    (
        {"lr_scheduler_type": SchedulerType.LINEAR, "warmup_steps": 50, "warmup_ratio": 0.0},
        "scheduler: {type: LinearWithWarmup, num_warmup_steps: 50}",
    ),
]


@pytest.mark.parametrize(("arguments", "line"), JOINT, ids=str)
def test_arguments_of_one_hyper_parameter_get_one_line(arguments, line):
    names = [name for name, value in arguments.items() if value is not None]
    advice = {find_foreign(name, arguments[name], arguments)[1] for name in names}
    assert len(advice) == 1
    assert line in advice.pop()
    with raises_at(UnknownArgumentError, "Trainer(", do=line):
        Trainer(HPS, "out", **arguments)


def test_a_key_that_another_one_stands_for_is_not_told_to_be_missing():
    with pytest.raises(HyperParameterError) as caught:
        HyperParameters.from_config({"num_train_epochs": 5, "per_device_train_batch_size": 4, "learning_rate": 0.1})
    message = str(caught.value)
    assert message.startswith("3 errors in hps_config\n")
    assert [line for line in message.splitlines() if "got: nothing" in line] == []


VALUES = [True, False, None, 0, 1, -1, 2, 4, 0.5, 0.0, 1e-5, [], {}, (), "", [2], {"a": 1}, "a", object()]


@pytest.mark.parametrize("name", sorted({name for names in FOREIGN.values() for name in names}))
def test_whatever_the_value_is_the_advice_can_be_followed(name):
    """Of numbers, that is, and of what stands for on, off and nothing; what is nonsense there may be it here."""
    for value in VALUES:
        here = advise(name, value)
        is_nonsense = isinstance(value, list | dict | str | tuple) or value in (0.5, 1e-5, -1)
        if here is None or (is_nonsense and not here.startswith(NO_PYTHON)):
            continue
        if here.split(":")[0] in FIELDS:
            assert HyperParameters.from_config({"hps": HPS | yaml.safe_load(here)})
        elif here.startswith("Trainer("):
            test_an_advised_argument_of_the_trainer_can_be_given(here)
        else:
            check_rest(here)


ALWAYS_THE_SAME = {"auto_lr_find", "do_eval", "do_predict", "do_train", "overwrite_output_dir", "strategy"}


@each("name", [name for names in FOREIGN.values() for name in names if name not in ALWAYS_THE_SAME])
def test_on_and_off_are_not_advised_the_same(name):
    is_switch = advise(name, True) is not None and advise(name, False) is not None
    assert not is_switch or advise(name, True) != advise(name, False)
