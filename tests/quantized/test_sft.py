"""Conversations on a quantized model with an adapter: on one process and two, in rows and streams, resumed, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from accmt.cli.main import main
from tests import conversations
from tests.conversations import draw_conversations, make_tokenizer
from tests.launching import SCRIPTS, launch

pytestmark = pytest.mark.filterwarnings("ignore:.*_check_is_size will be removed:FutureWarning")


def test_two_processes_train_what_one_trains_and_resume_with_equal_bits(tmp_path: Path) -> None:
    found = {}
    for processes in (1, 2):
        result = tmp_path / f"{processes}.json"
        arguments = (str(result), str(tmp_path / str(processes)), "nf4")
        launch(SCRIPTS / "sft.py", *arguments, processes=processes, result=result, timeout_s=280)
        found[processes] = json.loads(result.read_text())
    for name, own in found[2].items():
        one = found[1][name]
        assert own["moved"], name
        assert own["resumes"], name
        assert one["resumes"], name
        torch.testing.assert_close(torch.tensor(own["weights"]), torch.tensor(one["weights"]), rtol=1e-3, atol=1e-5)


def test_the_command_trains_a_quantized_model_and_merges_into_the_full_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(conversations.CHATML)
    tokenizer.save_pretrained("base")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("base")
    Path("train.jsonl").write_text("\n".join(json.dumps(row) for row in draw_conversations(8, seed=3)))
    model = {
        "path": "./base",
        "type": "AutoModelForCausalLM",
        "quantization": "nf4",
        "lora": {"r": 4, "targets": "all-linear"},
    }
    hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "bitsandbytes.optim.AdamW8bit", "lr": 0.01}, "model": model}
    Path("hps.yaml").write_text(yaml.safe_dump({"hps": {**hps, "sft": {"data": "train.jsonl", "merge": True}}}))
    assert main(["sft", "hps.yaml", "out/chat", "--verbose", "false"]) == 0
    merged, before = (AutoModelForCausalLM.from_pretrained(path) for path in ("out/chat/merged", "base"))
    changed = {
        name for name, weight in merged.named_parameters() if not torch.equal(weight, before.get_parameter(name))
    }
    assert changed
    assert all("proj" in name for name in changed)
    assert not hasattr(merged, "is_quantized") or not merged.is_quantized
