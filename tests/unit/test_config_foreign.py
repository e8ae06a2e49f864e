"""Names of other trainers' arguments: what is advised is a line that works here."""

from __future__ import annotations

import ast

import pytest
import yaml

import accmt
from accmt import HyperParameters, Trainer
from accmt.config.foreign import FOREIGN, advise_key, find_foreign
from accmt.config.hyperparameters import FIELDS
from accmt.errors import HyperParameterError
from accmt.settings import Settings
from accmt.trainer import ALIASES
from tests.toys import HPS

ADVICE = sorted({here for names in FOREIGN.values() for here in names.values()})
LINES = [here for here in ADVICE if here.split(":")[0] in FIELDS]
CALLS = [here for here in ADVICE if here.startswith("Trainer(")]
OBJECTS = {"accmt": accmt, "collator": list, "sampler": [[0]], "handler": object()}


def test_names_of_ours_are_not_foreign():
    ours = {"hps_config", "model_path", "kwargs", *Settings.defaults(), *ALIASES, *FIELDS}
    assert [name for names in FOREIGN.values() for name in names if name in ours] == []


@pytest.mark.parametrize("line", LINES)
def test_an_advised_line_of_the_hyper_parameters_can_be_read(line):
    assert HyperParameters.from_config({"hps": HPS | yaml.safe_load(line)})


@pytest.mark.parametrize("call", CALLS)
def test_an_advised_argument_of_the_trainer_can_be_given(call):
    def make(**arguments):
        return Trainer(**{"hps_config": HPS, "model_path": "out", **arguments})

    assert eval(call, {"Trainer": make, **OBJECTS}).settings


def test_the_rest_of_the_advice_is_a_command_or_python():
    rest = [here for here in ADVICE if here not in {*LINES, *CALLS}]
    for here in rest:
        assert here.startswith(("accmt launch ", "accelerate launch ")) or ast.parse(here)
    assert len(rest) < 10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("max_epochs", ("Lightning's Trainer", "write `epochs: 3` in the hyper-parameters")),
        ("bf16", ("transformers' TrainingArguments", 'write Trainer(mixed_precision="bf16")')),
        ("devices", ("Lightning's Trainer", "start the program with `accmt launch -N 2 train.py`")),
        ("log_every", None),
        ("anything", None),
    ],
)
def test_a_name_is_known_with_its_owner_and_with_what_to_do(name, expected):
    assert find_foreign(name) == expected


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("num_train_epochs", 3, "write `epochs: 3` in the hyper-parameters"),
        ("lr", 1e-3, "write `optim: {type: AdamW, lr: 1e-4}`"),
        ("gradient_accumulation_steps", 4, r"write Trainer\(grad_accumulation_steps=4\)"),
        ("seed", 1, r"write Trainer\(seed=1\): `seed` is an argument of the Trainer"),
        ("model_path", "out", r"write Trainer\(model_path='out'\)"),
        ("eopchs", 3, "write `epochs`$"),
        ("anything", 3, "remove `anything`$"),
    ],
)
def test_a_key_that_is_no_hyper_parameter_gets_the_advice_of_its_name(key, value, advice):
    with pytest.raises(HyperParameterError, match=f"do: {advice}"):
        HyperParameters.from_config({"hps": {**HPS, key: value}})


def test_a_foreign_key_beside_hps_is_not_told_to_be_indented(tmp_path):
    path = tmp_path / "hps.yaml"
    path.write_text("hps: {epochs: 1, batch_size: 2, optim: SGD}\nlr: 0.1\nmax_steps: 3\n")
    with pytest.raises(HyperParameterError) as caught:
        HyperParameters.from_config(path)
    assert "hps.yaml:2 lr\n" in str(caught.value)
    assert "do: write `optim: {type: AdamW, lr: 1e-4}`" in str(caught.value)
    assert "do: indent `max_steps` below `hps:`" in str(caught.value)


def test_nobodys_name_is_left_to_the_nearest():
    assert advise_key("eopchs", 3) is None
