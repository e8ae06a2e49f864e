"""A batch that a transformers model cannot take is explained, where torch says `index out of range in self`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from accmt.addons.batch_notes import add_note_of_batch
from accmt.addons.made_modules import HuggingFaceModule
from tests.toys import make_trainer

SIZES = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def bert(**config: Any) -> Any:
    return BertForSequenceClassification(BertConfig(**SIZES, max_position_embeddings=8, **config))


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def ids(length: int, high: int = 19) -> torch.Tensor:
    return torch.tensor([[high, *[2] * (length - 1)]] * 4)


MODELS = {
    "bert": bert,
    "bert of tokens": lambda: BertForTokenClassification(BertConfig(**SIZES, num_labels=3)),
    "regression": lambda: bert(num_labels=1),
    "roberta": lambda: RobertaForSequenceClassification(RobertaConfig(**SIZES, max_position_embeddings=10)),
    "llama": llama,
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, ffn_dim=8, max_position_embeddings=8)
    ),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    ),
}


def message_of(model: Any, batch: dict[str, torch.Tensor], *, evaluates: bool = False) -> str:
    rows = [{name: value[index] for name, value in batch.items()} for index in range(4)]
    trainer = make_trainer({"epochs": 1, "batch_size": 2}, checkpoint_every=None)
    run = trainer.validate if evaluates else trainer.fit
    with pytest.raises((IndexError, RuntimeError, ValueError)) as raised:
        run(HuggingFaceModule(model), rows)
    return "\n".join(note for note in raised.value.__notes__ if not note.startswith("This happened in"))


@pytest.mark.parametrize(
    ("name", "length"), [("bert", 9), ("roberta", 9), ("gpt2", 9), ("opt", 9)], ids=lambda value: str(value)
)
def test_a_row_that_is_too_long_is_named_with_the_length_that_fits(name: str, length: int) -> None:
    batch = {"input_ids": ids(length), "labels": ids(length) if name in ("gpt2", "opt") else torch.ones(4).long()}
    message = message_of(MODELS[name](), batch)
    assert message.startswith(f'batch["input_ids"]\n  got: {length} tokens in a row\n  expected: at most 8 tokens: ')
    assert "do: tokenizer(..., truncation=True, max_length=8)" in message
    fits = {key: value[:, :8] if value.ndim == 2 else value for key, value in batch.items()}
    rows = [{key: value[index] for key, value in fits.items()} for index in range(4)]
    make_trainer({"epochs": 1, "batch_size": 2}).fit(HuggingFaceModule(MODELS[name]()), rows)


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_token_that_the_model_does_not_know_is_named(evaluates: bool) -> None:
    message = message_of(llama(), {"input_ids": ids(4, high=20), "labels": ids(4)}, evaluates=evaluates)
    assert message.startswith('batch["input_ids"]\n  got: the id 20\n  expected: ids from 0 to 19: LlamaForCausalLM')


@pytest.mark.parametrize(
    ("name", "labels", "got", "do"),
    [
        ("bert", [2], "the label 2", "do: pass num_labels=3 to from_pretrained or from_hf"),
        ("bert", [-1], "the label -1", "do: number the classes from 0"),
        ("bert of tokens", [[0, 3, -100, 1]], "the label 3", "do: pass num_labels=4"),
        ("llama", [[1, 20, 1, 1]], "the label 20", "do: use this model's tokenizer"),
        ("t5", [[1, 20, 1, 1]], "the label 20", "do: use this model's tokenizer"),
    ],
)
def test_a_label_that_the_model_does_not_have_is_named(name: str, labels: Any, got: str, do: str) -> None:
    message = message_of(MODELS[name](), {"input_ids": ids(4), "labels": torch.tensor(labels * 4)})
    assert message.startswith(f'batch["labels"]\n  got: {got}\n')
    assert do in message


def test_floats_where_classes_are_meant_are_named() -> None:
    message = message_of(bert(num_labels=3), {"input_ids": ids(4), "labels": torch.ones(4)})
    assert message.startswith('batch["labels"]\n  got: torch.float32 for BertForSequenceClassification')


@pytest.mark.parametrize("problem", [None, "multi_label_classification"])
def test_whole_numbers_for_several_labels_of_a_sample_are_named(problem: str | None) -> None:
    model, labels = bert(num_labels=3, problem_type=problem), torch.tensor([[1, 0, 1]] * 4)
    assert "do: use labels.float()" in message_of(model, {"input_ids": ids(3), "labels": labels})
    model = bert(num_labels=3, problem_type="multi_label_classification")
    rows = [{"input_ids": row, "labels": label.float()} for row, label in zip(ids(3), labels, strict=True)]
    make_trainer({"epochs": 1, "batch_size": 2}).fit(HuggingFaceModule(model), rows)  # as advised


def test_a_missing_padding_token_is_named() -> None:
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, num_labels=3))
    batch = {"input_ids": ids(3), "labels": torch.tensor([0, 1, 2, 0])}
    assert "model.config.pad_token_id = tokenizer.pad_token_id" in message_of(model, batch)
    model.config.pad_token_id = 0
    rows = [{name: value[index] for name, value in batch.items()} for index in range(4)]
    make_trainer({"epochs": 1, "batch_size": 2}).fit(HuggingFaceModule(model), rows)  # as advised


def test_targets_at_padding_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    tokens, mask = ids(4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]] * 2)

    def train(model: Any, labels: torch.Tensor) -> str:
        batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
        rows = [{name: value[index] for name, value in batch.items()} for index in range(4)]
        caplog.clear()
        make_trainer({"epochs": 1, "batch_size": 2}, shuffle_train=False).fit(HuggingFaceModule(model), rows)
        return caplog.text

    assert "1 of the 8 targets in the first batch are padding" in train(llama(), tokens)
    assert "2 of the 8 targets in the first batch are padding" in train(MODELS["bert of tokens"](), tokens % 3)
    assert "padding" not in train(llama(), tokens.masked_fill(mask == 0, -100))
    written_end = torch.tensor([[1, 2, 2, 3], [1, 2, 3, -100]] * 2)
    assert "padding" not in train(llama(), written_end), "the model is to write the token behind a text"
    assert "padding" not in train(MODELS["t5"](), tokens), "the mask is that of the inputs"
    assert "padding" not in train(bert(), torch.ones(4).long())


def test_an_error_stays_where_a_model_has_no_embeddings_of_its_own() -> None:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    image = {**sizes, "image_size": 8, "patch_size": 4}
    clip = CLIPModel(CLIPConfig(text_config={**sizes, "vocab_size": 20}, vision_config=image))
    with pytest.raises(NotImplementedError):
        clip.get_input_embeddings()
    error = ValueError("of the step")
    add_note_of_batch(error, clip, {"input_ids": ids(4)})
    assert not getattr(error, "__notes__", [])


def test_nothing_is_said_of_what_is_right() -> None:
    class Failing(HuggingFaceModule):
        def step(self, batch: Any) -> Any:
            super().step(batch)
            raise ValueError("of its own")

    rows = [{"input_ids": ids(4)[0], "labels": torch.tensor(1.0)}] * 4
    with pytest.raises(ValueError, match="of its own") as raised:
        make_trainer({"epochs": 1, "batch_size": 2}).fit(Failing(MODELS["regression"]()), rows)
    assert "\n  do: " not in "\n".join(raised.value.__notes__)
