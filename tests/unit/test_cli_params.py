"""`accmt params`: the groups of parameters, as docs/hyper-parameters.md shows them."""

import re
from pathlib import Path

import pytest
from transformers import BertConfig, BertForSequenceClassification

from accmt.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "hyper-parameters.md").read_text().split("### Groups of parameters")[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
    BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=34, **sizes)).save_pretrained(
        "out/bert"
    )
    Path("hps").mkdir()
    Path("hps/groups.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])
    return tmp_path


def test_the_page_shows_what_is_printed(folder, capsys):
    command, *table = re.search(r"```text\n\$ (.*?)```", PAGE, re.DOTALL)[1].strip().split("\n")
    assert main(command.split()[1:]) == 0
    assert capsys.readouterr().out.strip().split("\n") == table


def test_names_are_listed_below_their_group(folder, capsys):
    assert main(["params", "hps/groups.yaml", "--model", "out/bert", "--names", "--type", "AutoModel"]) == 2
    assert "groups.0.match" in capsys.readouterr().err  # AutoModel has no classifier
    assert main(["params", "hps/groups.yaml", "--model", "out/bert", "--names"]) == 0
    assert "    classifier.weight" in capsys.readouterr().out.split("\n")


def test_hyper_parameters_without_groups_are_one_row(folder, capsys):
    Path("hps/plain.yaml").write_text("hps: {epochs: 1, batch_size: 1, optim: {type: SGD, lr: 0.1}}")
    assert main(["params", "hps/plain.yaml", "--model", "out/bert"]) == 0
    _, row = capsys.readouterr().out.strip().split("\n")
    assert row.split()[:4] == ["all", "SGD", "0.1", "0"]


def test_flags_win_over_the_file(folder, capsys):
    typed = ["--hps.optim.groups.0.lr=0.5", "--hps.optim.type", "SGD"]
    assert main(["params", "hps/groups.yaml", "--model", "out/bert", *typed]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("\n")]
    assert ["^classifier\\.", "SGD", "0.5"] in [row[:3] for row in rows]
    assert main(["params", "hps/groups.yaml", "--model", "out/bert", "--hps.optim.lrr=1"]) == 2
    assert "--hps.optim.lrr\n  got: lrr = 1 (int)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["params", "hps/groups.yaml", "--modle", "out/bert"])
