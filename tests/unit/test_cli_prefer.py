"""`accmt prefer`: from rows with preferences and one YAML to a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from accmt import HyperParameters, PreferenceModule, Trainer
from accmt.cli.main import main
from accmt.errors import ArgumentError, HyperParameterError
from tests import conversations
from tests.conversations import make_tokenizer
from tests.raising import raises_at

ROWS = [{"prompt": f"why {n}?", "chosen": f" because {n % 3}", "rejected": f" so {n % 4}"} for n in range(8)]


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, its tokenizer, and rows."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(conversations.CHATML)
    tokenizer.save_pretrained("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("base")
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return tmp_path


def write(prefer: Any, *, kind: str = "AutoModelForCausalLM", **model: Any) -> None:
    section = {"path": "./base", "type": kind, **model}
    hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.01}, "model": section, "prefer": prefer}
    Path("hps.yaml").write_text(yaml.safe_dump({"hps": hps}, sort_keys=False))


def run(*flags: str) -> int:
    return main(["prefer", "hps.yaml", "out", "--verbose", "false", *flags])


def test_it_tunes_an_adapter_and_merges_it(capsys: pytest.CaptureFixture[str]):
    write(
        {"data": "rows.jsonl", "validation": "rows.jsonl", "loss": "ipo", "beta": 0.2, "merge": True},
        lora={"r": 4, "alpha": 8, "targets": ["q_proj"]},
    )
    assert run("--metrics", "{margin: max}", "--model_saving", "best_margin", "--seed", "1") == 0
    assert capsys.readouterr().out.strip().split("\n")[-1] == "out/merged: a model with its tokenizer, for transformers"
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "out")
    merged = AutoModelForCausalLM.from_pretrained("out/merged")
    weights = zip(merged.parameters(), AutoModelForCausalLM.from_pretrained("base").parameters(), strict=True)
    assert sum(not torch.equal(one, other) for one, other in weights) == 1


def test_a_module_by_hand_trains_the_same():
    write({"data": "rows.jsonl", "loss": "dpo_norm", "max_length": 30})
    assert run("--seed", "1") == 0
    trainer = Trainer("hps.yaml", "other", seed=1, verbose=False)
    trainer.fit(PreferenceModule.from_hps(trainer.hps), ROWS)
    one, other = (AutoModelForCausalLM.from_pretrained(name) for name in ("out", "other"))
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    changed = HyperParameters.from_config("hps.yaml", {"prefer.beta": 3.0})
    with raises_at(ArgumentError, "fit", do="PreferenceModule.from_hps(trainer.hps)"):
        Trainer(changed, "other", verbose=False).fit(PreferenceModule.from_hps("hps.yaml"), ROWS)


def test_a_reward_model_needs_one_label(capsys: pytest.CaptureFixture[str]):
    write({"data": "rows.jsonl", "loss": "reward"}, kind="AutoModelForSequenceClassification")
    assert run() == 2
    assert "LlamaForSequenceClassification with 2 labels" in capsys.readouterr().err
    write({"data": "rows.jsonl", "loss": "reward"}, kind="AutoModelForSequenceClassification", num_labels=1)
    assert run() == 0
    assert AutoModelForSequenceClassification.from_pretrained("out").config.num_labels == 1


def test_a_teacher_is_distilled():
    Path("answers.jsonl").write_text("\n".join(json.dumps({"prompt": "?", "completion": f" {n}"}) for n in range(8)))
    teacher = AutoModelForCausalLM.from_pretrained("base")
    torch.nn.init.normal_(teacher.lm_head.weight)
    teacher.save_pretrained("teacher")
    section = {"data": "answers.jsonl", "validation": "answers.jsonl", "loss": "distillation", "teacher": "./teacher"}
    write({**section, "temperature": 2.0})
    assert run("--hps.epochs=2") == 0
    assert AutoTokenizer.from_pretrained("out").chat_template == conversations.CHATML


@pytest.mark.parametrize(
    ("section", "key", "got"),
    [
        ({"data": "rows.jsonl", "beta": "much"}, "beta", "'much'"),
        ({"data": "rows.jsonl", "loss": "distillation"}, "teacher", "no teacher"),
        ({"data": "rows.jsonl", "teacher": "./base"}, "teacher", "a teacher"),
        ({"data": "rows.jsonl", "loss": "orpo", "reference": "copy"}, "reference", "orpo"),
        ({"data": "rows.jsonl", "rewards": 1}, "rewards", "rewards = 1"),
        ({"data": "rows.jsonl", "reference": "copy", "reference_folder": "x"}, "reference_folder", "reference = copy"),
    ],
)
def test_errors_in_the_section_are_named_with_their_key(section: dict[str, Any], key: str, got: str):
    write(section)
    with raises_at(HyperParameterError, f"prefer.{key}", got):
        HyperParameters.from_config("hps.yaml")


def test_no_data_and_rows_of_another_format_are_errors(capsys: pytest.CaptureFixture[str]):
    write({"loss": "dpo"})
    assert run() == 2
    assert "add `prefer: {data: train.jsonl}`" in capsys.readouterr().err
    write({"data": "rows.jsonl", "loss": "kto"})
    assert run() == 2
    assert "row 0 for preference tuning" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--loss", "kto"], "--loss; a key of `prefer` in the file is a flag such as --hps.prefer.loss=..."),
        (["--model_savign=best_accuracy"], "--model_savign; did you mean --model_saving?"),
    ],
)
def test_flags_that_do_not_exist_are_named_with_those_that_do(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    write({"data": "rows.jsonl"})
    with pytest.raises(SystemExit):
        main(["prefer", "hps.yaml", "out", *flags])
    assert message in capsys.readouterr().err
