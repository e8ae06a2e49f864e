"""Weights of turns and rows in fine-tuning: of each token, of a step, and in what is shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from accmt import DistillationModule, PreferenceModule, SFTModule, Trainer, read_history
from accmt.addons.sft import chat
from accmt.addons.sft.chat import IGNORED, mask_row
from accmt.addons.sft.rows import Masking, TokenizedRows
from accmt.addons.token_losses import weigh_tokens
from accmt.errors import DataError, ModuleContractError
from tests import conversations
from tests.conversations import make_tokenizer
from tests.raising import raises_at
from tests.turn_weights import (
    SHAPES,
    expected_gradient,
    gradient_of_step,
    make_model,
    tokenizer,
    weighted_rows,
    weights_by_turn,
)

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}


def say(*turns: Any, **entries: Any) -> dict[str, Any]:
    """Make a row of texts, or texts with weights, of user and assistant in turns."""
    parts = [turn if isinstance(turn, tuple) else (turn, None) for turn in turns]
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, (text, _) in enumerate(parts)]
    for message, (_, weight) in zip(messages, parts, strict=True):
        message |= {} if weight is None else {"weight": weight}
    return {"messages": messages, **entries}


def test_each_token_of_100_conversations_has_the_weight_of_its_turn_times_that_of_its_row():
    fractions = 0
    for row in weighted_rows(100):
        masked, (ids, weights) = mask_row(tokenizer(), row), weights_by_turn(row)
        assert masked.input_ids == ids
        assert [label != IGNORED for label in masked.labels] == [weight > 0 for weight in weights]
        own = masked.weights or [float(label != IGNORED) for label in masked.labels]
        assert own == pytest.approx(weights)
        fractions += sum(weight not in (0, 1) for weight in weights)
    assert fractions > 1000


def test_markers_of_the_template_have_the_weight_of_their_turn():
    content = "{{ message.content }}"
    marked = f"{{% if message.role == 'assistant' %}}{{% generation %}}{content}{{% endgeneration %}}"
    template = conversations.CHATML.replace(content, f"{marked}{{% else %}}{content}{{% endif %}}")
    own = make_tokenizer(template)
    masked = mask_row(own, say("a", ("first", 0.5), "b", ("second", 2), weight=3))
    assert masked.show(own).count("⟦") == 2
    assert "⟦first⟧×1.5" in masked.show(own)
    assert "⟦second⟧×6" in masked.show(own)


def test_rows_of_strings_have_the_weight_of_the_row_and_turns_as_samples_theirs():
    masked = mask_row(tokenizer(), {"prompt": "2 + 2 =", "completion": " four", "weight": 0.25})
    assert {weight for weight in masked.weights} == {0.0, 0.25}
    assert masked.weights[-1] == 0.25, "the end"
    reader = Masking(tokenizer(), per_turn=True)
    row = say("a", ("b", 0.5), "c", ("d", 0), "e", ("f", 2))
    assert reader.turns_of(row, "a row") == [1, 5]
    assert {weight for weight in reader.read(row, 5, "a row").weights} == {0.0, 2.0}


def test_a_dropped_token_and_max_length_keep_weights_at_their_tokens():
    own = make_tokenizer(conversations.LLAMA, adds_bos=True)
    row = say("a", ("first", 0.5), "b", ("second", 2))
    row["messages"][0]["content"] = "<s>a"
    whole = mask_row(own, row)
    cut = mask_row(own, row, max_length=len(whole.input_ids) - 2)
    assert cut.weights == whole.weights[:-2]
    doubled = mask_row(own, {"prompt": "<s>", "completion": "b", "weight": 2})
    assert chat.DOUBLED_BOS in {problem.kind for problem in doubled.problems}
    assert len(doubled.weights) == len(doubled.input_ids) == len(doubled.labels)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "0.5", [1]])
def test_an_invalid_weight_is_an_error_that_names_the_row_and_the_message(tmp_path: Path, weight: Any):
    rows = [say("a", "b"), say("a", "b", "c", ("d", weight))]
    with raises_at(DataError, "row 1 for supervised fine-tuning, message 3", '"weight": '):
        Trainer(HPS, tmp_path, verbose=False).fit(SFTModule(make_model(), tokenizer()), rows)
    with raises_at(DataError, "a row for supervised fine-tuning", '"weight": '):
        mask_row(tokenizer(), say("a", "b", weight=weight))


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return expected_gradient(weighted_rows())


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_a_step_is_that_of_plain_torch(
    tmp_path: Path, shape: str, accumulation: int, expected: torch.Tensor
):
    found = gradient_of_step(tmp_path, weighted_rows(), shape, accumulation, processes=1)
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def test_all_weights_times_a_number_are_no_weights(tmp_path: Path):
    plain, halved = ([{**row, "weight": weight} for row in weighted_rows()] for weight in (1, 0.5))
    one, other = (gradient_of_step(tmp_path / str(len(str(rows))), rows, "padding", 4, 1) for rows in (plain, halved))
    torch.testing.assert_close(one, other)


def test_the_loss_of_experts_is_added_as_the_model_adds_it():
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(vocab_size=len(tokenizer()), num_local_experts=2, num_key_value_heads=1, **sizes)
    config.output_router_logits = True
    module = SFTModule(MixtralForCausalLM(config), tokenizer())
    plain, weighed = (module.collate_fn([mask_row(tokenizer(), say("a", "b c", weight=w)).sample()]) for w in (1, 2))
    one, other = module.step(plain), module.step(weighed)
    torch.testing.assert_close(one["loss"], other["loss"])
    assert other["weight"] == 2 * one["weight"]


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "LORA"])
def test_adapters_are_weighed_too(kind: str):
    from peft import LoraConfig, PromptTuningConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    if kind == "PROMPT_TUNING":
        config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    module = SFTModule(get_peft_model(make_model(), config).double(), tokenizer())
    rows = [[say("a", "b", weight=weight), say("question", "answer", weight=weight)] for weight in (1, 2)]
    plain, weighed = (module.collate_fn([mask_row(tokenizer(), row).sample() for row in own]) for own in rows)
    one, other = module.step(plain), module.step(weighed)
    torch.testing.assert_close(one["loss"], other["loss"], check_dtype=False)  # transformers computes it in float32
    assert other["weight"] == 2 * one["weight"]


def test_a_model_that_does_not_predict_the_next_token_is_rejected():
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1))
    with raises_at(ModuleContractError, "training_step"):
        weigh_tokens(model, None, {}, torch.ones(1, 2))


def test_distillation_weighs_tokens_and_preferences_weigh_rows():
    module = DistillationModule(make_model(), tokenizer(), make_model())
    torch.nn.init.normal_(module.model.lm_head.weight)
    rows = [say("a", "b"), say("a", "other", weight=3)]
    samples = [mask_row(tokenizer(), row).sample() for row in rows]
    first, second, both = (module.step(module.collate_fn(own)) for own in (samples[:1], samples[1:], samples))
    expected = (first["loss"] * first["weight"] + second["loss"] * second["weight"]) / both["weight"]
    torch.testing.assert_close(both["loss"], expected)
    prefer = PreferenceModule(make_model(), tokenizer())
    row = {"prompt": "a", "chosen": [{"role": "assistant", "content": "b", "weight": 0.5}]}
    row["rejected"] = [{"role": "assistant", "content": "c"}]
    with raises_at(DataError, "row 0 for preference tuning", "weight"):
        prefer.make_samples([row])[0]


def test_a_mixture_by_tokens_and_its_counts_use_weights(tmp_path: Path):
    sources = {"one": [say("a", "b c d", weight=0.25)] * 40, "two": [say("a", "b c d")] * 40}
    hps = {**HPS, "optim": {"type": "SGD", "lr": 1e-9}}
    hps["data"] = {"mix": {"one": 0.5, "two": 0.5}, "unit": "tokens"}
    trainer = Trainer(hps, tmp_path, seed=0, verbose=False, log_every=1)
    trainer.fit(SFTModule(make_model(), tokenizer()), sources)
    rows = [row["values"] for row in read_history(trainer.run.tracking.run_folder) if "values" in row]
    last = {name: value for row in rows for name, value in row.items()}
    assert last["samples_seen__one"] == pytest.approx(4 * last["samples_seen__two"], abs=4)
    assert last["target_tokens_seen__one"] == pytest.approx(last["target_tokens_seen__two"], rel=0.2)
    assert last["train_loss__one"] == pytest.approx(last["train_loss__two"], rel=1e-5)


def test_a_table_of_datasets_has_weights_where_they_are_not_none():
    from datasets import Dataset

    table = Dataset.from_list([say("a", ("b", 0.5), weight=None), say("a", "b", weight=2.0)])
    samples = TokenizedRows(table, Masking(tokenizer()))
    assert max(samples[0]["loss_weights"]) == 0.5
    assert max(samples[1]["loss_weights"]) == 2.0


def test_a_batch_without_weight_has_a_finite_loss_and_gradient():
    module = SFTModule(make_model(), tokenizer())
    samples = [mask_row(tokenizer(), say("a", "b", weight=weight)).sample() for weight in (0, 2)]
    batch = module.collate_fn(samples)
    output = module.step({name: entry[:1] for name, entry in batch.items()})
    assert output["weight"] == 0
    output["loss"].backward()
    assert all(weight.grad.isfinite().all() for weight in module.model.parameters())
    assert module.predict_step(batch).shape[:2] == batch["input_ids"].shape
