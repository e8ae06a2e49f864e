"""The examples, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from accmt import read_history
from tests.launching import launch, python

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.py"
CLASSIFIER = ROOT / "examples" / "finetune_text_classifier.py"


def accelerate_launch(*arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """Run a script with `accelerate launch` on one process."""
    launcher = Path(sys.executable).parent / "accelerate"
    flags = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [str(launcher), "launch", *flags, "--num_cpu_threads_per_process", "1", *arguments]
    return subprocess.run(command, env={**os.environ}, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.feature("L09", "L03")
def test_two_runs_of_the_digits_with_one_seed_give_equal_weights(tmp_path: Path):
    runs = [python(DIGITS, "--output", tmp_path / name, "--seed", "3") for name in ("a", "b")]
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr
    assert "best accuracy" in runs[0].stdout
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("a", "b"))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.feature("D26")
def test_the_digits_run_under_accelerate_launch_and_on_two_processes(tmp_path: Path):
    launched = accelerate_launch(str(DIGITS), "--output", str(tmp_path / "launched"))
    assert launched.returncode == 0, launched.stderr
    printed = launch(DIGITS, "--output", str(tmp_path / "two"), processes=2, result=tmp_path / "two" / "status.json")
    for text in (launched.stdout, printed):
        accuracy = float(text.split("best accuracy")[1].split("%")[0])
        assert accuracy > 85
    assert printed.count("best accuracy") == 1


@pytest.mark.slow
@pytest.mark.feature("D32", "D12", "A19", "A15")
def test_the_text_classifier_ends_with_a_folder_that_transformers_loads(tmp_path: Path):
    run = accelerate_launch(str(CLASSIFIER), "--output", str(tmp_path / "model"), "--limit", "24")
    assert run.returncode == 0, run.stderr
    for text in ("test accuracy", "best epoch", "model folder", "mlflow"):
        assert text in run.stdout
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert sorted(model.config.label2id) == ["business", "entertainment", "politics", "sports", "tech"]
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("a goal")["input_ids"]
    folder = next((tmp_path / "logs" / "model").iterdir())
    assert [row["status"] for row in read_history(folder) if "status" in row] == ["FINISHED"]
    assert (tmp_path / "logs" / "mlflow.db").exists()


@pytest.mark.feature("D15")
def test_every_file_of_hyper_parameters_loads():
    from accmt import HyperParameters

    files = sorted((ROOT / "hps").glob("*.yaml"))
    assert files
    for file in files:
        hps = HyperParameters.from_config(file)
        assert HyperParameters.from_config(hps.to_dict()) == hps
