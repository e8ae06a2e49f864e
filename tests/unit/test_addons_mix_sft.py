"""Supervised fine-tuning on several sources: the loss over the target tokens of each, however they are batched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn import functional

from accmt import SFTModule, Trainer
from accmt.addons.sft.chat import IGNORED, mask_row
from accmt.cli.main import main
from accmt.tracking import read_history
from tests import conversations
from tests.conversations import draw_conversations, make_tokenizer
from tests.unit.test_addons_sft import make_model


@pytest.mark.parametrize(
    ("hps", "settings"),
    [
        ({}, {"grad_accumulation_steps": 2}),
        ({"max_tokens": 600}, {}),
        ({"max_tokens": 900, "packing": True}, {}),
    ],
    ids=["padded", "budget", "packed"],
)
def test_the_loss_of_each_source_is_the_mean_over_its_target_tokens(tmp_path: Path, hps: Any, settings: Any):
    tokenizer = make_tokenizer(conversations.CHATML)
    no_answer = {"messages": [{"role": "user", "content": "nobody answers"}]}
    sources = {"long": draw_conversations(9, seed=3), "short": [*draw_conversations(4, seed=4), no_answer]}
    module = SFTModule(make_model(), tokenizer)
    values = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 1e-9}}
    mix = {"data": {"mix": {"long": 9, "short": 5}}}
    trainer = Trainer(
        {**values, **mix, **hps}, tmp_path / "m", seed=1, log_every=-1, verbose=False, model_saving=None, **settings
    )
    trainer.fit(module, sources)
    expected: dict[str, tuple[float, int]] = {}
    for name, rows in sources.items():
        losses: list[float] = []
        for row in rows:
            masked = mask_row(tokenizer, row)
            ids, labels = torch.tensor([masked.input_ids]), torch.tensor(masked.labels)
            with torch.inference_mode():
                logits = module.model(input_ids=ids).logits[0]
            each = functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
            losses += each[labels[1:] != IGNORED].tolist()
        expected[name] = sum(losses) / len(losses), len(losses)
    rows = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
    row = rows[-1]
    for name, (loss, tokens) in expected.items():
        assert row[f"train_loss__{name}"] == pytest.approx(loss, rel=1e-5), name
        assert row[f"target_tokens_seen__{name}"] == tokens
        assert row[f"samples_seen__{name}"] == len(sources[name])
    assert sum(tokens for _, tokens in expected.values()) == trainer.state.target_tokens_seen


def test_the_command_mixes_files_by_name_and_shows_them_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    make_tokenizer(conversations.CHATML).save_pretrained("base")
    make_model().save_pretrained("base")
    for name, seed in (("news", 3), ("code", 4), ("held_out", 5)):
        rows = [json.dumps(row) for row in draw_conversations(8, seed=seed)]
        Path(f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    hps: dict[str, Any] = {"epochs": 1, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.01}}
    hps["model"] = {"path": "./base", "type": "AutoModelForCausalLM"}
    hps["sft"] = {"data": {"news": "news.jsonl", "code": ["code.jsonl"]}, "validation": {"code": "held_out.jsonl"}}
    hps["data"] = {"mix": {"news": 0.75, "code": 0.25}}
    Path("hps.yaml").write_text(yaml.safe_dump({"hps": hps}))
    assert main(["data", "inspect", "hps.yaml", "--seed", "1"]) == 0
    shown = capsys.readouterr().out
    assert main(["sft", "hps.yaml", "out", "--enable_progress_bar", "false", "--seed", "1", "--log_every", "1"]) == 0
    [run] = Path("logs", "out").iterdir()
    rows = [row["values"] for row in read_history(run) if "values" in row]
    last = [row for row in rows if "train_loss" in row][-1]
    assert last["samples_seen__news"] == 8
    assert last["samples_seen__code"] == 3
    assert {"train_loss__news", "train_loss__code"} <= set().union(*rows)
    # What was shown is what was trained on.
    table = {line.split()[0]: line.split() for line in shown.splitlines() if line.startswith(("news ", "code "))}
    assert table["news"][-2:] == ["8", "1.00"]
    assert table["code"][-2:] == ["3", "0.38"]
    places = re.findall(r"^(news|code), row (\d+):$", shown, re.MULTILINE)
    assert len(places) == 4
    first = next(row for row in rows if "train_loss" in row)
    assert [name for name, _ in places].count("news") == first["samples_seen__news"]
    tokenizer = make_tokenizer(conversations.CHATML)
    files = {name: Path(f"{name}.jsonl").read_text().splitlines() for name in ("news", "code")}
    for name, place in places:
        assert mask_row(tokenizer, json.loads(files[name][int(place)])).show(tokenizer) in shown
    assert any("val_loss__code" in row for row in rows)
    del hps["sft"]["data"]["code"]
    Path("hps.yaml").write_text(yaml.safe_dump({"hps": hps}))
    assert main(["sft", "hps.yaml", "other"]) == 2, "the weights name another source"
