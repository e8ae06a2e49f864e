"""Fine-tuning transformers models, from a folder to a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset, Value

from accmt import F1, AcceleratorModule, Callback
from accmt.errors import ArgumentError, MetricError, ModuleContractError
from tests.raising import raises_at
from tests.toys import make_trainer


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """A tiny BERT in a folder."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "pretrained")
    return tmp_path / "pretrained"


def make_data(labels: int) -> Dataset:
    """A `datasets` dataset of token ids and labels."""
    rows = {"input_ids": [[i % 50, (i * 7) % 50, 3] for i in range(12)], "labels": [i % labels for i in range(12)]}
    return Dataset.from_dict(rows).with_format("torch")


@pytest.mark.parametrize("form", ["tuple", "module"])
def test_a_model_folder_trains_and_comes_back_as_a_folder(form: str, pretrained: Path):
    from transformers import AutoModelForSequenceClassification

    kind = "AutoModelForSequenceClassification"
    trainer = make_trainer({"batch_size": 4}, model_saving="best_valid_loss", seed=1)
    keywords = {"num_labels": 3, "ignore_mismatched_sizes": True}
    if form == "tuple":
        state = trainer.fit((str(pretrained), kind), make_data(3), make_data(3), **keywords)
    else:
        state = trainer.fit(AcceleratorModule.from_hf(pretrained, kind, **keywords), make_data(3), make_data(3))
    assert state.global_step == 3
    saved = AutoModelForSequenceClassification.from_pretrained("out/model").eval()
    assert saved.config.num_labels == 3
    trained = trainer.run.module.model.eval()
    batch = {"input_ids": make_data(3)["input_ids"][:4]}
    assert torch.equal(saved(**batch).logits, trained(**batch).logits)


def test_metrics_of_a_classifier_need_no_module(pretrained: Path):
    kind, data = "AutoModelForSequenceClassification", make_data(2)
    metrics = {"both": ["accuracy", F1(num_classes=2)], "one": ["accuracy"]}
    trainer = make_trainer({"batch_size": 5}, metrics=metrics, model_saving="best_accuracy", seed=1)
    module = AcceleratorModule.from_hf(pretrained, kind)
    state = trainer.fit(module, data, {"both": data, "one": data.select(range(7))})
    logits = trainer.predict(module, data)
    expected = (logits.argmax(-1) == data["labels"][:]).float()
    assert state.metrics["accuracy__both"] == expected.mean().item()
    assert state.metrics["accuracy__one"] == pytest.approx(expected[:7].mean().item())
    assert trainer.test(module, {"both": data, "one": data})["f1__both"] == state.metrics["f1__both"]


def test_metrics_of_a_regression_need_no_module(pretrained: Path):
    data = make_data(3).cast_column("labels", Value("float32")).with_format("torch")
    trainer = make_trainer({"batch_size": 5}, metrics="mse", seed=1)
    keywords = {"num_labels": 1, "ignore_mismatched_sizes": True}
    state = trainer.fit((str(pretrained), "AutoModelForSequenceClassification"), data, data, **keywords)
    assert state.metrics["mse"] == pytest.approx(state.metrics["val_loss"], rel=1e-5)


def test_metrics_of_tokens_ask_for_a_module(pretrained: Path):
    rows = {"input_ids": [[i, 3] for i in range(8)], "labels": [[0, 1]] * 8}
    data = Dataset.from_dict(rows).with_format("torch")
    with raises_at(MetricError, "metric 'accuracy'", "no predictions"):
        make_trainer(metrics="accuracy").fit((str(pretrained), "AutoModelForTokenClassification"), data, data)


def test_a_path_alone_is_a_model_too(pretrained: Path):
    with raises_at(ModuleContractError, "BertModel", "['input_ids']", do="AutoModelForSequenceClassification"):
        make_trainer().fit(str(pretrained), make_data(2).select_columns(["input_ids"]))


def test_a_head_without_labels_asks_for_labels_not_for_a_head(pretrained: Path):
    data = make_data(2).select_columns(["input_ids"])
    with raises_at(
        ModuleContractError, "BertForSequenceClassification", do='dataset.rename_column("label", "labels")'
    ) as error:
        make_trainer().fit((str(pretrained), "AutoModelForSequenceClassification"), data)
    assert "AutoModelForSequenceClassification" not in str(error.value)


def test_a_wrong_class_name_gives_the_nearest(pretrained: Path):
    with raises_at(ArgumentError, "from_hf(type=", do="'AutoModelForSequenceClassification'"):
        make_trainer().fit((str(pretrained), "AutoModelForSequenceClasification"), make_data(2))


def test_the_gradient_of_a_language_model_does_not_depend_on_accumulation(tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
    ).save_pretrained(tmp_path)
    tokens = [[(7 * row + column) % 40 for column in range(14)] for row in range(8)]
    labels = [row[:2] + [-100] * 12 if index < 4 else row for index, row in enumerate(tokens)]
    data = Dataset.from_dict({"input_ids": tokens, "labels": labels}).with_format("torch")

    def first_gradient(batch_size: int, accumulation: int) -> torch.Tensor:
        gradients = []

        class Look(Callback):
            def on_before_optimizer_step(self, optimizer):
                parameters = [p for group in optimizer.param_groups for p in group["params"]]
                gradients.append(torch.cat([p.grad.flatten() for p in parameters]))

        module = AcceleratorModule.from_hf(
            tmp_path, "AutoModelForCausalLM", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
        trainer = make_trainer(
            {"batch_size": batch_size}, grad_accumulation_steps=accumulation, shuffle_train=False, callbacks=Look()
        )
        trainer.fit(module, data)
        return gradients[0]

    whole, split = first_gradient(8, 1), first_gradient(4, 2)
    assert (whole - split).norm() / whole.norm() <= 1e-5
