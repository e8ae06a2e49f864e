"""The constructor of the Trainer: its documented signature, its other spellings, and that it does nothing yet."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import traceback

import pytest
import torch

from accmt import Accuracy, Callback, Trainer
from accmt.errors import AccmtError, MissingArgumentError, UnknownArgumentError
from accmt.options import Settings
from accmt.trainer.calls import ALIASES
from tests.raising import raises_at

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
EMPTY = inspect.Parameter.empty
DOCUMENTED = {
    "hps_config": EMPTY,
    "model_path": EMPTY,
    "track_name": None,
    "checkpoint": None,
    "resume": False,
    "model_saving": "best_valid_loss",
    "evaluate_every_n_steps": None,
    "checkpoint_every": "epoch",
    "logging_dir": "logs",
    "log_with": None,
    "log_every": 1,
    "grad_accumulation_steps": None,
    "clip_grad": None,
    "set_to_none": True,
    "shuffle_train": True,
    "shuffle_validation": False,
    "sampler": None,
    "model_saving_below": None,
    "model_saving_above": None,
    "collate_fn": None,
    "max_shard_size": "10GB",
    "safe_serialization": True,  # the one default that differs from the original's
    "compile": False,
    "train_loss_metric_name": "train_loss",
    "val_loss_metric_name": "val_loss",
    "dataloader_pin_memory": True,
    "dataloader_num_workers": 0,
    "report_loss_after_eval": True,
    "handlers": None,
    "eval_when_finish": True,
    "eval_when_start": False,
    "verbose": True,
    "monitor": None,
}
PARAMETERS = {
    name: parameter for name, parameter in inspect.signature(Trainer.__init__).parameters.items() if name != "self"
}


def test_the_documented_arguments_come_first_with_their_defaults():
    first = list(PARAMETERS)[:33]
    assert len(DOCUMENTED) == 33
    assert first == list(DOCUMENTED)
    assert {name: PARAMETERS[name].default for name in first} == DOCUMENTED
    assert all(PARAMETERS[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in first)


def test_everything_added_is_keyword_only():
    added = list(PARAMETERS.values())[33:]
    assert added.pop().kind is inspect.Parameter.VAR_KEYWORD
    assert {parameter.kind for parameter in added} == {inspect.Parameter.KEYWORD_ONLY}


def test_signature_and_settings_hold_the_same_names_and_defaults():
    in_signature = {name: p.default for name, p in PARAMETERS.items() if p.default is not EMPTY}
    in_settings = Settings.defaults()
    assert in_signature == in_settings
    assert {name: type(value) for name, value in in_signature.items()} == {
        name: type(value) for name, value in in_settings.items()
    }
    assert set(PARAMETERS) - set(in_signature) == {"hps_config", "model_path", "kwargs"}


def test_arguments_given_by_position_arrive_under_their_names():
    given = [HPS, "out", "project", None, False, "always", 7]
    settings = Trainer(*given).settings
    assert settings.tracking.track_name == "project"
    assert settings.saving.model_saving == "always"
    assert settings.evaluation.evaluate_every_n_steps == 7


MISSPELT = {
    "evaluate_every_n_step": "evaluate_every_n_steps",
    "log_evry": "log_every",
    "model_savings": "model_saving",
    "clip_gard": "clip_grad",
    "metric": "metrics",
    "grad_accumulation_step": "grad_accumulation_steps",
}


@pytest.mark.parametrize("tracker", [None, "tensorboard"])
@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_argument_is_refused_with_the_nearest_name(name, tracker):
    with raises_at(UnknownArgumentError, f"Trainer({name}=", do=f"did you mean {MISSPELT[name]}?"):
        Trainer(HPS, "out", log_with=tracker, **{name: 1})


def test_other_keywords_go_to_the_tracker():
    trainer = Trainer(HPS, "out", log_with="tensorboard", tags=["a"], mlflow={"nested": True})
    assert trainer.settings.tracking.tracker_kwargs == {"tags": ["a"], "mlflow": {"nested": True}}


@pytest.mark.parametrize(
    "name",
    ["tags", "notes", "entity", "group", "job_type", "name", "id", "mode", "project", "dir", "save_code", "nested_run"]
    + ["run_id", "description", "workspace", "flush_secs", "max_queue", "comment", "repo", "experiment"]
    + ["force", "settings", "monitor_gym", "sync_tensorboard", "config_exclude_keys", "save_dvc_exp", "tracking_uri"],
)
def test_keywords_of_real_trackers_are_not_taken_for_misspelt_arguments(name):
    assert Trainer(HPS, "out", log_with="mlflow", **{name: 1}).settings.tracking.tracker_kwargs == {name: 1}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_and_its_argument_together_are_refused(alias):
    values = {"callbacks": Callback(), "model_saving_above": 0.5}
    name = ALIASES[alias]
    with raises_at(TypeError, f"Trainer({alias}=..., {name}=...)", do=f"remove {alias}"):
        Trainer(HPS, "out", **{name: values[name], alias: values[name]})


@pytest.mark.parametrize("alias", ["callback", "callbacks"])
def test_callbacks_have_the_name_of_the_original_too(alias):
    callback = Callback()
    assert Trainer(HPS, "out", **{alias: callback}).settings.running.callbacks is callback


@pytest.mark.parametrize(
    ("name", "value", "do"),
    [
        ("hooks", Callback(), "Trainer(callbacks=[...])"),
        ("precision", "bf16-mixed", 'Trainer(mixed_precision="bf16")'),
        ("precision", 16, 'Trainer(mixed_precision="fp16")'),
        ("precision", "64-true", "model.double() before fit"),
    ],
)
def test_names_of_other_trainers_are_refused_with_the_line_to_write(name, value, do):
    with raises_at(UnknownArgumentError, f"Trainer({name}=", do=do):
        Trainer(HPS, "out", **{name: value})


def test_the_documented_misspelling_of_model_saving_above_is_understood():
    with pytest.warns(DeprecationWarning, match="write model_saving_above"):
        trainer = Trainer(HPS, "out", model_saving_aboce=0.5)
    assert trainer.settings.saving.model_saving_above == 0.5
    with raises_at(TypeError, "Trainer(model_saving_aboce=..., model_saving_above=...)"):
        Trainer(HPS, "out", model_saving_aboce=0.5, model_saving_above=0.4)


def test_a_callback_class_is_refused_when_the_trainer_is_made():
    with raises_at(TypeError, "Trainer(callbacks=...)"):
        Trainer(HPS, "out", callbacks=Callback)


QUIET = """
import accmt, sys, threading, torch
accmt.Trainer({"epochs": 1, "batch_size": 2, "optim": {"type": "AdamW", "lr": 1e-3}}, "out/model", logging_dir="logs",
              log_with=None, metrics=accmt.Accuracy(), seed=3)
assert not torch.distributed.is_initialized()
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1
if "accelerate.state" in sys.modules:
    from accelerate.state import AcceleratorState, PartialState
    assert not AcceleratorState._shared_state and not PartialState._shared_state
assert not {"transformers", "datasets", "mlflow", "tensorboard"} & set(sys.modules)
"""


def test_making_a_trainer_has_no_effect(tmp_path):
    subprocess.run([sys.executable, "-W", "error", "-c", QUIET], cwd=tmp_path, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_making_a_trainer_draws_no_random_number_and_keeps_no_state_of_another():
    import torch

    before = torch.random.get_rng_state()
    first, second = (Trainer(HPS, "out", metrics=Accuracy()) for _ in range(2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first.state is not second.state
    assert first.settings.tracking.tracker_kwargs is not second.settings.tracking.tracker_kwargs


def test_hyper_parameters_of_the_caller_are_not_changed():
    hps = {"hps": {"epochs": "2", "batch_size": ["4", "8"], "optim": {"type": "SGD", "lr": "1e-1"}}}
    before = repr(hps)
    Trainer(hps, "out").config()
    assert repr(hps) == before


def test_an_error_of_the_arguments_shows_no_frames_but_the_call():
    for arguments in ({"model_savng": "always"}, {"log_every": "x", "seed": "y"}, {"metrics": ["accuracyy"]}):
        with pytest.raises(AccmtError) as caught:
            Trainer(HPS, "out/x", **arguments)
        assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["checked"]


def test_a_trainer_without_its_arguments_is_told_what_the_others_are_called_here():
    with pytest.raises(TypeError) as caught:
        Trainer(model=object(), train_dataset=[1], accelerator="gpu")
    assert type(caught.value) is MissingArgumentError
    message = str(caught.value)
    assert message.startswith(
        "Trainer\n  got: no hps_config and no model_path\n  expected: hyper-parameters and a model folder"
    )
    assert "Trainer(train_dataset=...)\n  got: an argument of transformers' Trainer" in message
    assert "Trainer(accelerator=...)\n  got: 'gpu'" in message
    assert [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)][1:] == ["checked"]


def test_a_model_in_the_first_place_is_taken_for_another_trainers_argument():
    with raises_at(MissingArgumentError, "Trainer(train_dataset=...)") as caught:
        Trainer(torch.nn.Linear(2, 2), "args", list, train_dataset=[1])
    assert str(caught.value).count("argument of transformers' Trainer") == 4
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("arguments", "missing"), [({}, "no hps_config and no model_path"), ({"hps_config": HPS}, "no model_path")]
)
def test_what_is_missing_is_told_alone_where_nothing_else_is_wrong(arguments, missing):
    with pytest.raises(MissingArgumentError) as caught:
        Trainer(**arguments)
    assert f"got: {missing}\n" in str(caught.value)
    assert str(caught.value).count("got:") == 1
    example = re.search(r"do: (Trainer\(.*?\"\))", str(caught.value))[1]
    assert eval(example, {"Trainer": Trainer}).settings
