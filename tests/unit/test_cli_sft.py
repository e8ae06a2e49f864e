"""`accmt sft` and `accmt merge`: from rows and one YAML to a folder that transformers loads."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset, DatasetDict
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from accmt import SFTModule, Trainer, merge_adapter
from accmt.addons.sft.rows import read_rows
from accmt.cli import launch
from accmt.cli.main import main
from accmt.errors import WeightsError
from tests import conversations
from tests.conversations import draw_conversations, make_tokenizer
from tests.raising import raises_at

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()
LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny model, its tokenizer, rows to train on and rows to evaluate on."""
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(conversations.CHATML)
    tokenizer.save_pretrained("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("base")
    for name, seed in (("train", 3), ("validation", 4)):
        lines = [json.dumps(row) for row in draw_conversations(10, seed=seed)]
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n\n")
    return tmp_path


def write(sft: Any = None, *, lora: Any = None, **model: Any) -> None:
    """Write hps.yaml."""
    section = {"path": "./base", "type": "AutoModelForCausalLM", **({"lora": lora} if lora else {}), **model}
    hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.01}, "model": section}
    Path("hps.yaml").write_text(yaml.safe_dump({"hps": hps if sft is None else {**hps, "sft": sft}}, sort_keys=False))


def said(capsys: pytest.CaptureFixture[str]) -> tuple[list[str], str]:
    captured = capsys.readouterr()
    return captured.out.strip().split("\n"), captured.err


def test_it_ends_in_a_folder_that_transformers_loads(capsys: pytest.CaptureFixture[str]):
    write({"data": "train.jsonl", "validation": "validation.jsonl", "max_length": 300})
    assert main(["sft", "hps.yaml", "out/chat", "--seed", "1", "--hps.epochs=2", "--verbose", "false"]) == 0
    out, _ = said(capsys)
    assert out[-1] == "out/chat: a model with its tokenizer, for transformers"
    assert AutoTokenizer.from_pretrained("out/chat").chat_template == conversations.CHATML
    trained = AutoModelForCausalLM.from_pretrained("out/chat")
    by_hand = SFTModule.from_hps("hps.yaml")
    hps = {"epochs": 2, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.01}}
    own = draw_conversations(10, seed=3), draw_conversations(10, seed=4)
    Trainer(hps, "out/other", seed=1, verbose=False).fit(by_hand, *own)
    assert all(map(torch.equal, trained.parameters(), AutoModelForCausalLM.from_pretrained("out/other").parameters()))
    recorded = yaml.safe_load(Path("out/chat/hps.yaml").read_text())["hps"]
    assert (recorded["epochs"], recorded["sft"]["max_length"]) == (2, 300)


def test_an_adapter_is_merged_where_that_is_asked_for(capsys: pytest.CaptureFixture[str]):
    write(lora=LORA)
    typed = ["--data", "train.jsonl", "--validation", "validation.jsonl", "--merge", "--verbose", "false"]
    assert main(["sft", "hps.yaml", "out/chat", *typed]) == 0
    out, _ = said(capsys)
    assert out[-2:] == [
        "out/chat: an adapter, for PEFT (or `accmt merge`)",
        "out/chat/merged: a model with its tokenizer, for transformers",
    ]
    plain = AutoModelForCausalLM.from_pretrained("base")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "out/chat")
    merged, tokenizer = (
        AutoModelForCausalLM.from_pretrained("out/chat/merged"),
        AutoTokenizer.from_pretrained("out/chat/merged"),
    )
    assert merged.generation_config.eos_token_id == [2, tokenizer.convert_tokens_to_ids("<|im_end|>")]
    inputs = tokenizer("a text", return_tensors="pt")
    with torch.inference_mode():
        found, expected, before = (model(**inputs).logits for model in (merged, adapted, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(found, before)
    assert tokenizer.chat_template == conversations.CHATML
    assert main(["merge", "out/chat", "out/again"]) == 0
    again = AutoModelForCausalLM.from_pretrained("out/again")
    assert all(map(torch.equal, again.parameters(), merged.parameters()))


def test_the_yaml_and_the_command_of_the_page_run(capsys: pytest.CaptureFixture[str]):
    section = PAGE.split("### From one YAML to a chat model")[1]
    Path("chat.yaml").write_text(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1])
    command = re.search(r"```bash\naccmt (sft .*)\n", section)[1]
    assert main(command.split()) == 0
    out, _ = said(capsys)
    assert out[-1] == "out/chat/merged: a model with its tokenizer, for transformers"
    AutoModelForCausalLM.from_pretrained("out/chat/merged")


def test_rows_are_read_from_all_kinds_of_files(capsys: pytest.CaptureFixture[str]):
    rows = [{"prompt": f"{number} + 1 = ", "completion": str(number + 1)} for number in range(8)]
    Dataset.from_list(rows).save_to_disk("folder")
    DatasetDict({"train": Dataset.from_list(rows), "validation": Dataset.from_list(rows[:3])}).save_to_disk("sets")
    Dataset.from_list(rows).to_parquet("rows.parquet")
    Path("rows.json").write_text(json.dumps(rows))
    Path("lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write()
    results = []
    for paths in (["lines.jsonl"], ["folder"], ["sets"], ["rows.parquet"], ["rows.json"]):
        typed = ["--data", *paths, "--validation", "sets", "--seed", "1", "--verbose", "false"]
        assert main(["sft", "hps.yaml", "out/chat", "--resume", "false", *typed]) == 0
        results.append(list(AutoModelForCausalLM.from_pretrained("out/chat").parameters()))
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])
    two = ["--data", "lines.jsonl", "folder", "--validation", "sets", "--hps.max_steps=4", "--hps.epochs=-1"]
    assert main(["sft", "hps.yaml", "out/two", *two, "--verbose", "false"]) == 0
    said(capsys)


def test_paths_are_folders_globs_and_urls_too():
    import datasets
    import fsspec

    rows = [{"text": f"row {number}"} for number in range(4)]
    Path("parts").mkdir()
    for number, row in enumerate(rows):
        Path(f"parts/part-{number}.jsonl").write_text(json.dumps(row))
    files = fsspec.filesystem("memory")
    files.put("parts", "/parts", recursive=True)
    for path in ("parts", "parts/part-*.jsonl", "memory://parts/*.jsonl"):
        assert list(read_rows("sft.data", [path], "train")) == rows
    files.rm("/parts", recursive=True)
    datasets.Dataset.from_list([{"text": "last"}]).save_to_disk("saved")
    assert [row["text"] for row in read_rows("sft.data", ["parts", "saved"], "train")][-2:] == ["row 3", "last"]


@pytest.mark.parametrize(
    ("sft", "message"),
    [
        (3, "hps.yaml:10 sft\n  got: 3 (int)\n  expected: a path, or a mapping with `data`"),
        ({"dta": "x"}, "sft.dta\n  got: dta = 'x' (str)"),
        ({"data": 3}, "sft.data\n  got: 3 (int)\n  expected: a path, a list"),
        ({"data": "train.jsonl", "max_length": 1}, "expected: a whole number of at least 2"),
        ({"data": "train.jsonl", "per_turn": "yes"}, "sft.per_turn\n  got: 'yes' (str)\n  expected: true or false"),
        ({"data": "train.jsonl", "merge": True}, "sft.merge\n  got: true without an adapter in `model`"),
        ({"data": "trian.jsonl"}, "sft.data\n  got: trian.jsonl: no such file; the working directory is "),
        ({"data": "base"}, "got: base: a folder without such files\n  expected: files that end with .parquet, .arrow"),
        ({"data": "empty.jsonl"}, "got: empty.jsonl, which has no rows"),
        ({"data": "broken.jsonl"}, "row 1 of broken.jsonl"),
        ({"data": "broken.json"}, "got: broken.json: JSON parse error"),
        ({"data": "empty.json"}, "got: empty.json, which has no rows"),
        ({"data": "other.jsonl"}, "row 1 for supervised fine-tuning\n  got: the keys question\n"),
        ({"data": "train.jsonl", "chat_template": "x.jinja"}, "sft.chat_template\n  got: x.jinja: no such file"),
        ({"validation": "train.jsonl"}, "expected: training data\n  do: add `sft: {data: train.jsonl}`"),
    ],
)
def test_what_is_wrong_has_its_place(sft: Any, message: str, capsys: pytest.CaptureFixture[str]):
    Path("empty.jsonl").touch()
    Path("empty.json").touch()
    Path("broken.json").write_text("{not json")
    Path("other.jsonl").write_text('{"text": "a"}\n{"question": "a"}\n')
    Path("broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    write(sft)
    assert main(["sft", "hps.yaml", "out/chat"]) == 2
    _, err = said(capsys)
    assert message in err


def test_a_chat_template_is_a_file_where_the_tokenizer_has_none(capsys: pytest.CaptureFixture[str]):
    make_tokenizer().save_pretrained("base")
    Path("base/chat_template.jinja").unlink(missing_ok=True)
    Path("own.jinja").write_text(conversations.CHATML)
    write({"data": "train.jsonl", "validation": "validation.jsonl"})
    assert main(["sft", "hps.yaml", "out/chat"]) == 2
    _, err = said(capsys)
    assert "expected: a chat template\n" in err
    assert "chat_template: template.jinja" in err
    typed = ["--hps.sft.chat_template=own.jinja", "--verbose", "false"]
    assert main(["sft", "hps.yaml", "out/chat", *typed, "--hps.sft.max_length=200"]) == 0


def test_what_cannot_be_merged_is_said_before_training(capsys: pytest.CaptureFixture[str]):
    adapter = {"type": "PromptTuning", "num_virtual_tokens": 4}
    write({"data": "train.jsonl", "merge": True}, adapter=adapter)
    assert main(["sft", "hps.yaml", "out/chat"]) == 2
    _, err = said(capsys)
    assert "sft.merge\n  got: an adapter of type PromptTuning\n" in err
    assert not Path("out/chat").exists()


def test_folders_that_cannot_be_merged_are_named(capsys: pytest.CaptureFixture[str]):
    with raises_at(WeightsError, "merge_adapter('base')", "adapter_config.json"):
        merge_adapter("base", "out/merged")
    assert main(["merge", "base", "base"]) == 2
    assert main(["merge", "out/chat", "base"]) == 2
    _, err = said(capsys)
    assert "got: the folder of the adapter\n" in err
    assert "got: a folder with files in it\n" in err


def test_a_model_without_a_tokenizer_is_said(capsys: pytest.CaptureFixture[str]):
    LlamaForCausalLM.from_pretrained("base").save_pretrained("bare")
    write("train.jsonl", path="./bare")
    assert main(["sft", "hps.yaml", "out/chat"]) == 2
    _, err = said(capsys)
    # Older versions of transformers make an empty tokenizer of nothing, which has no chat template.
    assert "tokenizer of ./bare\n" in err or "chat_template: template.jinja" in err


def test_the_launcher_starts_the_command():
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    one = launch.build_command(parser.parse_args(["--cpu", "sft", "hps.yaml", "out/chat"]))
    assert one[1:] == ["-m", "accmt.cli.main", "sft", "hps.yaml", "out/chat"]
    two = launch.build_command(parser.parse_args(["--cpu", "-N", "2", "sft", "hps.yaml", "out/chat"]))
    assert two[-5:] == ["-m", "accmt.cli.main", "sft", "hps.yaml", "out/chat"]
