"""Hyper-parameters as flags: over a file, with its checks and messages, and recorded."""

import argparse
import json

import pytest

from accmt import HyperParameters, Trainer
from accmt.addons.hps_flags import split_flags
from accmt.errors import HyperParameterError

YAML = """\
hps:
  epochs: 1
  batch_size: 4
  optim:
    type: AdamW
    lr: 1e-3
    groups:
      - {kind: norm, weight_decay: 0}
  scheduler: CosineAnnealingLR
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "x.yaml").write_text(YAML)
    return tmp_path / "x.yaml"


def parse(*typed, path="x.yaml"):
    parser = argparse.ArgumentParser(exit_on_error=True)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--hps", default="x.yaml")  # of the user's own
    Trainer.add_argparse_args(parser)
    return parser.parse_args(["--hps_config", str(path), "--model_path", "out/m", *typed])


def hps_of(path, *typed):
    return Trainer.from_argparse_args(parse(*typed, path=path)).hps


def test_flags_win_over_the_file(path):
    typed = ["--hps.epochs", "3", "--hps.optim.lr=3e-4", "--hidden", "8", "--hps.optim.groups.0.weight_decay=0.5"]
    hps = hps_of(path, *typed, "--hps.batch_size", "[8, 16]", "--hps.scheduler", "none", "--hps.max_steps=-1")
    assert (hps.epochs, hps.optim_kwargs["lr"], hps.batch_size, hps.scheduler) == (3, 3e-4, (8, 16), None)
    assert hps.optim_kwargs["groups"] == [{"kind": "norm", "weight_decay": 0.5}]
    assert parse(*typed).hidden == 8


def test_what_is_not_there_yet_is_made(path):
    hps = hps_of(path, "--hps.scheduler.T_max", "7", "--hps.max_tokens=64", "--hps.optimizer.weight_decay", "0.1")
    assert (hps.scheduler_kwargs, hps.max_tokens, hps.optim_kwargs["weight_decay"]) == ({"T_max": 7}, 64, 0.1)
    assert hps_of(path, "--hps.optim", "SGD").optim == "SGD"


def test_flags_alone_are_hyper_parameters(path):
    parser = Trainer.add_argparse_args(argparse.ArgumentParser())
    typed = [
        "--model_path",
        "out/m",
        "--hps.epochs=2",
        "--hps.batch_size=4",
        "--hps.optim.type=SGD",
        "--hps.optim.lr=1",
    ]
    assert Trainer.from_argparse_args(parser.parse_args(typed)).hps.epochs == 2


def test_flags_win_over_a_file_of_arguments_and_an_object():
    hps = HyperParameters(epochs=1, batch_size=4, optim="SGD", optim_kwargs={"lr": 0.1})
    parser = Trainer.add_argparse_args(argparse.ArgumentParser())
    trainer = Trainer.from_argparse_args(
        parser.parse_args(["--hps.epochs=5"]), {"hps_config": hps, "model_path": "out"}
    )
    assert (trainer.hps.epochs, hps.epochs) == (5, 1)


def test_the_run_records_what_came_of_both(path):
    trainer = Trainer.from_argparse_args(parse("--hps.optim.lr=3e-4", path=path))
    assert json.loads(json.dumps(trainer.config()))["hps_config"]["hps"]["optim"]["lr"] == 3e-4


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--hps.optim.weigth_decay=1"], "--hps.optim.weigth_decay\n  got: weigth_decay = 1 (int)"),
        (["--hps.optim.lr", "fast"], "--hps.optim.lr\n  got: 'fast' (str)"),
        (["--hps.optim.groups.3.lr=1"], "--hps.optim.groups.3.lr\n  got: optim.groups = [{'kind': 'norm'"),
        (["--hps.epochs.lr=1"], "--hps.epochs.lr\n  got: epochs = 1 (int)\n  expected: a mapping at epochs"),
        (["--hps.optim.lrr=none"], "--hps.optim.lrr\n  got: lrr = None (NoneType)"),
        (["--hps.scheduler.type=CosineWithWarmp"], "--hps.scheduler.type\n"),
    ],
)
def test_messages_name_the_flag(path, typed, message):
    with pytest.raises(HyperParameterError) as raised:
        hps_of(path, *typed)
    assert message in str(raised.value)


def test_none_takes_away_what_the_file_has(path):
    path.write_text(YAML.replace("lr: 1e-3", "betas: [0.9, 0.98]"))
    hps = hps_of(path, "--hps.optim.type=SGD", "--hps.optim.betas=none", "--hps.optim.groups", "none")
    assert (hps.optim, hps.optim_kwargs) == ("SGD", {})
    assert hps_of(path, "--hps.optim.foreach=none").optim_kwargs["foreach"] is None


def test_what_is_wrong_in_the_file_keeps_its_line(path):
    path.write_text(YAML.replace("lr: 1e-3", "lrr: 1e-3"))
    with pytest.raises(HyperParameterError) as raised:
        hps_of(path, "--hps.epochs=0")
    assert f"{path}:6 optim.lrr" in str(raised.value)
    assert "--hps.epochs\n  got: 0 (int)" in str(raised.value)


@pytest.mark.parametrize("typed", [["--hps.epochs"], ["--hps.epochs", "--hidden", "3"], ["--hps.optim={a: "]])
def test_a_flag_without_a_value_is_the_parsers_error(typed, capsys):
    with pytest.raises(SystemExit) as raised:
        parse(*typed)
    assert raised.value.code == 2
    assert "--hps.epochs: expected one argument" in capsys.readouterr().err or "{" in typed[-1]


def test_what_stands_behind_two_dashes_is_left_alone():
    assert split_flags(["--hps.a=1", "x", "--", "--hps.b=2"]) == ({"a": "1"}, ["x", "--", "--hps.b=2"])


def test_a_parser_of_a_subcommand_reads_them_too(path):
    parser = argparse.ArgumentParser()
    Trainer.add_argparse_args(parser.add_subparsers().add_parser("train"))
    args = parser.parse_args(["train", "--hps_config", str(path), "--hps.epochs=7", "--model_path", "out/m"])
    assert Trainer.from_argparse_args(args).hps.epochs == 7
