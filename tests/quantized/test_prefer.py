"""DPO on a quantized model with an adapter: switched off, it is the reference; and the run resumes with equal bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from accmt import PreferenceModule, Trainer
from accmt.addons.prefer.module import log_probs
from tests import conversations
from tests.conversations import make_tokenizer
from tests.resume.unbroken import InterruptAt, InterruptionError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*_check_is_size will be removed:FutureWarning"),
]
ROWS = [{"prompt": f"why {n}?", "chosen": f" because {n % 3}", "rejected": f" so {n % 4} it is"} for n in range(10)]


@pytest.mark.parametrize("folder", [None, "reference"])
def test_the_quantized_model_without_its_adapter_is_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = make_tokenizer(conversations.CHATML)
    tokenizer.save_pretrained("base")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained("base")
    model = {"path": "./base", "type": "AutoModelForCausalLM", "quantization": "nf4"}
    model["lora"] = {"r": 4, "targets": "all-linear"}
    prefer = {"data": "rows.jsonl", "loss": "dpo", "beta": 0.5, "reference_folder": folder}
    hps: dict[str, Any] = {"epochs": 2, "batch_size": 4, "optim": {"type": "AdamW", "lr": 0.02}, "model": model}
    hps["prefer"] = {name: value for name, value in prefer.items() if value is not None}

    def train(name: str, **settings: Any) -> PreferenceModule:
        torch.manual_seed(1)  # of the adapter
        trainer = Trainer(hps, name, seed=1, verbose=False, checkpoint_every="1 steps", **settings)
        module = PreferenceModule.from_hps(trainer.hps)
        trainer.fit(module, ROWS, ROWS)
        metrics.append(trainer.state.metrics)
        return module

    metrics: list[dict[str, float]] = []
    whole = train("whole")
    with pytest.raises(InterruptionError):
        train("parts", callbacks=InterruptAt(4))
    parts = train("parts", resume=True)
    assert whole.teacher is None
    trained = [[p for p in one.model.parameters() if p.requires_grad] for one in (whole, parts)]
    assert all(map(torch.equal, *trained))
    assert metrics[0] == metrics[-1]

    quantized = AutoModelForCausalLM.from_pretrained(
        "base", quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    )
    samples = whole.make_samples(ROWS)
    batch = whole.collate_fn([samples[index] for index in range(len(ROWS))])
    with torch.no_grad():
        found = [log_probs(whole._logits(one.eval(), batch), batch).sums for one in (whole.model, quantized)]
    chosen, rejected = (0.5 * (found[0] - found[1])).unbind(1)
    assert metrics[0]["margin"] == pytest.approx(float((chosen - rejected).mean()), rel=1e-3)
    assert metrics[0]["reward_chosen"] == pytest.approx(float(chosen.mean()), rel=1e-3, abs=1e-4)
    assert metrics[0]["margin"] > 0.5
