"""Fine-tuning transformers models, from a folder to a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from datasets import Dataset

from accmt import AcceleratorModule
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


@pytest.mark.feature("A57", "A58", "D12", "A60", "D32", "L01")
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


@pytest.mark.feature("A57")
def test_a_path_alone_is_a_model_too(pretrained: Path):
    with pytest.raises(TypeError, match=r"(?s)BertModel.*no loss.*AutoModelForSequenceClassification"):
        make_trainer().fit(str(pretrained), make_data(2).select_columns(["input_ids"]))


@pytest.mark.feature("D12")
def test_a_wrong_class_name_gives_the_nearest(pretrained: Path):
    with pytest.raises(ValueError, match="AutoModelForSequenceClassification"):
        make_trainer().fit((str(pretrained), "AutoModelForSequenceClasification"), make_data(2))
