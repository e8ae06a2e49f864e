"""The Trainer's arguments on the command line: which flags there are, what they read, and what wins."""

from __future__ import annotations

import argparse
import re

import pytest

from accmt import Accuracy, Trainer
from accmt.addons.command_line import NOT_TEXT, list_flags
from accmt.errors import ArgumentError
from accmt.options import Settings
from accmt.options.units import read_max_time
from tests.raising import raises_at

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}


def parse(*typed, parser=None):
    parser = Trainer.add_argparse_args(parser or argparse.ArgumentParser())
    return parser.parse_args(list(typed))


def make(*typed, **kwargs):
    return Trainer.from_argparse_args(parse(*typed), **{"hps_config": HPS, "model_path": "out/x", **kwargs})


@pytest.fixture
def hps_file(tmp_path):
    path = tmp_path / "hps.yaml"
    path.write_text("hps: {epochs: 3, batch_size: 4, optim: {type: SGD, lr: 1e-1}}\n")
    return str(path)


def test_flags_make_the_trainer_that_arguments_make(hps_file):
    typed = ["--hps_config", hps_file, "--model_path", "out/x", "--monitor", "{grad_norm: true}"]
    typed += ["--log_every", "5", "--clip_grad", "1", "--resume", "true", "--max_time", "1h", "--seed", "3"]
    arguments = {"log_every": 5, "clip_grad": 1, "resume": True, "max_time": "1h", "seed": 3}
    expected = Trainer(hps_file, "out/x", **arguments, monitor={"grad_norm": True})
    assert Trainer.from_argparse_args(parse(*typed)).config() == expected.config()


def test_every_argument_is_a_flag_or_known_to_be_no_text():
    flags = {flag.name for flag in list_flags()}
    assert flags & NOT_TEXT == set()
    assert flags | NOT_TEXT == {"hps_config", "model_path", "tracker_kwargs", *Settings.defaults()}


@pytest.mark.parametrize("flag", list_flags(), ids=lambda flag: flag.name)
def test_every_flag_has_a_help_and_can_be_given_its_default_as_text(flag):
    assert len(flag.meaning) > 20
    defaults = Settings.defaults()
    if flag.name in defaults:
        value = flag.read(str(defaults[flag.name]))
        assert value == defaults[flag.name]
        assert getattr(make(f"--{flag.name}", str(value)), "settings", None) is not None


def test_only_what_was_typed_is_in_the_namespace_and_the_users_flags_stay():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    args = parse("--patience", "3", parser=parser)
    assert vars(args) == {"lr": 0.1, "patience": 3}
    trainer = Trainer.from_argparse_args(args, hps_config=HPS, model_path="out/x")
    assert trainer.settings.saving.patience == 3


READ = {
    ("clip_grad", "1"): 1,
    ("clip_grad", "5e-1"): 0.5,
    ("clip_grad", "none"): None,
    ("run_name", "7"): "7",
    ("run_name", "true"): "true",
    ("mixed_precision", "no"): "no",
    ("resume", "auto"): "auto",
    ("resume", "False"): False,
    ("max_time", "1:00:00:00"): "1:00:00:00",
    ("limit_batches", "1"): 1,
    ("limit_batches", "1.0"): 1.0,
    ("limit_batches", "{train: 3, val: 0.5}"): {"train": 3, "val": 0.5},
    ("failures", "{on_nonfinite: skip}"): {"on_nonfinite": "skip"},
    ("evaluate_every_n_steps", "2 epochs"): "2 epochs",
    ("evaluate_every_n_steps", "0.25"): 0.25,
    ("compile", "true"): True,
    ("enable_model_summary", "-1"): -1,
    ("grad_accumulation_steps", "{0: 2, 4: 8}"): {0: 2, 4: 8},
    ("model_saving", "[best_accuracy, best_valid_loss]"): ["best_accuracy", "best_valid_loss"],
    ("parallelism", "{ddp: {bucket_cap_mb: 1e1}}"): {"ddp": {"bucket_cap_mb": 10.0}},
    ("max_shard_size", "1GB"): "1GB",
    ("max_shard_size", "1000"): 1000,
}


@pytest.mark.parametrize(("name", "text"), READ)
def test_a_text_is_read_as_the_argument_may_be(name, text):
    value = getattr(parse(f"--{name}", text), name)
    expected = READ[name, text]
    assert (type(value), value) == (type(expected), expected)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dataloader_num_workers", "often", r"argument --dataloader_num_workers: expected int, got 'often'"),
        ("dataloader_num_workers", "1.5", r"expected int, got '1.5'"),
        ("clip_grad", "nan", r"expected float\|mapping\|none, got 'nan'"),
        ("set_to_none", "1", r"expected true\|false, got '1'"),
        ("parallelism", "{a: ", r"'\{a: ' is not valid YAML"),
        ("seed", "[1]", r"expected int\|none, got '\[1\]'"),
    ],
)
def test_a_text_that_is_no_value_is_an_error_of_the_command_line(name, text, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(f"--{name}", text)
    assert re.search(message, capsys.readouterr().err)


def test_keywords_win_over_flags_and_flags_over_the_file(tmp_path, hps_file):
    path = tmp_path / "trainer.yaml"
    path.write_text(f"hps_config: {hps_file}\nmodel_path: out/file\nlog_every: 7\nseed: 1\nclip_grad: 2.0\n")
    args = parse("--seed", "2", "--clip_grad", "3")
    arguments = Trainer.from_argparse_args(args, config=path, clip_grad=4.0, metrics=Accuracy()).config()
    assert (arguments["model_path"], arguments["log_every"]) == ("out/file", 7)
    assert (arguments["seed"], arguments["clip_grad"]) == (2, 4.0)


@pytest.mark.parametrize("flag", [("--seed",), ("--lr-seed", "seed"), ("seed",)], ids=["flag", "dest", "positional"])
def test_a_clash_with_a_flag_of_the_user_is_an_error_that_adds_nothing(flag):
    parser = argparse.ArgumentParser()
    parser.add_argument(flag[0], **({"dest": flag[1]} if flag[1:] else {}))
    before = parser.format_help()
    with raises_at(ArgumentError, "Trainer.add_argparse_args"):
        Trainer.add_argparse_args(parser)
    assert parser.format_help() == before


def test_what_is_required_and_given_nowhere_is_named():
    with raises_at(ArgumentError, "Trainer.from_argparse_args"):
        Trainer.from_argparse_args(parse())
    with raises_at(ArgumentError, "Trainer.from_argparse_args"):
        Trainer.from_argparse_args(parse(), hps_config=HPS)


def test_a_config_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("[1]")
    for make_of in (Trainer.from_config, lambda config: Trainer.from_argparse_args(parse(), config)):
        with raises_at(ArgumentError, "Trainer.from_config(PosixPath('"):
            make_of(path)


@pytest.mark.parametrize("text", ["2h", "1h60m", "120m", "0d 2h", "00:02:00:00", "120 minutes", "1 hour 60 min"])
def test_times_are_read_in_both_forms(text):
    assert read_max_time(text) == 7200


@pytest.mark.parametrize("text", ["", "h", "0s", "1w", "1.5h"])
def test_a_text_that_is_no_time_is_refused(text):
    with raises_at(ArgumentError, "Trainer(max_time=...)"):
        read_max_time(text)
