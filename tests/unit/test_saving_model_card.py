import json

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from accmt import AcceleratorModule, HyperParameters
from accmt.addons.model_card import write_model_card
from accmt.saving.model_folder import CARD_MARK, TRAINER_NAME, write_hps, write_trainer_config
from tests.toys import make_trainer


def read(folder):
    return (folder / "README.md").read_text()


def write(folder, **sections):
    return write_model_card(folder, head={"library_name": "pytorch"}, sections=sections)


def test_the_head_is_yaml_that_the_hub_reads(tmp_path):
    head = {"library_name": "peft", "base_model": "bert-base-uncased", "tags": ["accmt"]}
    assert write_model_card(tmp_path, head=head, sections={"Results": {"val_loss": 0.5}})
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == head
    assert card.content.startswith("---\nlibrary_name: peft\n")


class Judging(AcceleratorModule):
    def __init__(self, path):
        self.model = AutoModelForSequenceClassification.from_pretrained(path)

    def step(self, batch):
        result = self.model(**batch)
        return {"loss": result.loss, "accuracy": (result.logits, batch["labels"])}


def test_the_hub_reads_the_results_the_data_and_the_license_of_the_base_model(tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    BertForSequenceClassification(BertConfig(vocab_size=9, **sizes)).save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# base\n")
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]}).with_format("torch")
    named = rows.select([0])
    named.info.dataset_name, named.info.config_name, named._split = "glue", "sst2", "test"
    named.info.download_checksums = {"hf://datasets/nyu-mll/glue@bcdcba79/sst2/test.parquet": {}}
    trainer = make_trainer(model_path=str(tmp_path / "news"), model_saving="always", metrics=["accuracy"])
    trainer.fit(Judging(tmp_path / "base"), rows, {"dev": rows, "sst2": named})
    data = ModelCard.load(tmp_path / "news" / "README.md").data
    head = (data.license, data.library_name, data.pipeline_tag, data.datasets, data.metrics, data.model_name)
    assert head == ("apache-2.0", "transformers", "text-classification", ["nyu-mll/glue"], ["accuracy"], "news")
    for result, key in zip(data.eval_results, ("dev", "sst2"), strict=True):
        assert (result.task_type, result.metric_type, result.metric_name) == (data.pipeline_tag, "accuracy", "Accuracy")
        assert result.metric_value == trainer.state.metrics[f"accuracy__{key}"]
    sets = [
        (each.dataset_name, each.dataset_type, each.dataset_config, each.dataset_split) for each in data.eval_results
    ]
    assert sets == [("dev", "unknown", None, "dev"), ("sst2", "nyu-mll/glue", "sst2", "test")]


def test_each_section_is_a_table_or_a_command(tmp_path):
    write(
        tmp_path, Results={"accuracy": 0.123456789, "samples": 1780, "name": "a|b\nc"}, Command="python t.py", Empty={}
    )
    text = read(tmp_path)
    assert f"# {tmp_path.name}\n" in text
    assert "## Results\n\n| | |\n|---|---|\n| accuracy | 0.123457 |\n| samples | 1,780 |\n| name | a\\|b c |\n" in text
    assert "## Command\n\n```bash\npython t.py\n```\n" in text
    assert "Empty" not in text


@pytest.mark.parametrize("change", [lambda text: "mine", lambda text: text.replace(CARD_MARK, "") + "and my words"])
def test_somebody_elses_card_stays(tmp_path, change):
    write(tmp_path, Results={"loss": 1.0})
    mine = change(read(tmp_path))
    (tmp_path / "README.md").write_text(mine)
    assert not write(tmp_path, Results={"loss": 0.5})
    assert read(tmp_path) == mine


def test_the_hyper_parameters_train_again(tmp_path):
    hps = HyperParameters.from_config(
        {"hps": {"epochs": 2, "batch_size": 4, "optim": {"type": "AdamW", "lr": 1e-4, "betas": [0.9, 0.99]}}}
    )
    assert write_hps(tmp_path, hps.to_dict())
    assert HyperParameters.from_config(tmp_path / "hps.yaml") == hps
    assert write_hps(tmp_path, hps.to_dict())


def test_no_password_is_written_whatever_it_stands_in(tmp_path):
    secret = "hunter2"
    arguments = {
        "hps_config": {"hps": {"epochs": 1}},
        "logging_dir": f"https://me:{secret}@example.org:5000",
        "comet": {"api_key": secret, "project": "mine"},
        "mlflow": {"store": f"postgresql://me:{secret}@db/x", "tags": ["a", f"https://h/?token={secret}"]},
        "seed": 3,
    }
    assert write_trainer_config(tmp_path, arguments)
    text = (tmp_path / TRAINER_NAME).read_text()
    assert secret not in text
    kept = {"comet": {"project": "mine"}, "mlflow": {"tags": ["a"]}, "seed": 3, "hps_config": {"hps": {"epochs": 1}}}
    assert json.loads(text) == kept
