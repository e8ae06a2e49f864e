"""What the original accmt has and is useful in its own right: tools, collators, a search, snapshots, debug levels."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BatchEncoding, BertTokenizer

import accmt
from accmt import HyperParameterSearch, MemorySnapshots, RecursiveCollator, Trainer
from accmt.addons import memory_snapshots
from accmt.addons.batch_notes import BatchNotes
from accmt.addons.debug_levels import LEVELS, change_arguments
from accmt.addons.recursive_collators import COLLATORS
from accmt.cli.main import main
from accmt.errors import ArgumentError
from tests.tables import each
from tests.toys import HPS, Linear, make_points


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Four GPUs; the second has a process."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = [f"GPU-{uuid}, {index}" for index, uuid in enumerate("abcd")]
    used = f"GPU-b, {os.getpid()}, 500, python"
    answers = {"--query-gpu=uuid,index": "\n".join(lines), "--query-compute-apps": used}
    cases = "\n".join(f"{question}*) echo '{answer}';;" for question, answer in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$1" in\n{cases}\nesac\n')
    program.chmod(0o755)
    with monkeypatch.context() as changed:
        changed.setenv("PATH", str(program.parent), prepend=os.pathsep)
        yield


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_without_processes_are_available(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    (tmp_path / "train.py").touch()
    command = ["launch", "--dry-run", "--gpus", "available", str(tmp_path / "train.py")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES=GPU-a,GPU-c,GPU-d " in printed
    assert "--nproc-per-node=3" in printed
    with monkeypatch.context() as changed:
        changed.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-d")
        main(command)
        assert "CUDA_VISIBLE_DEVICES=GPU-d " in capsys.readouterr().out
        changed.setenv("CUDA_VISIBLE_DEVICES", "1")
        with pytest.raises(SystemExit):
            main(command)
    assert "write --gpus with the indices to share" in capsys.readouterr().err


# ---- Tools of a module


def test_a_module_pads_tensors_to_the_longest_or_to_a_length():
    module, tensors = Linear(), [torch.tensor([1, 2, 3]), torch.tensor([4])]
    assert [part.tolist() for part in module.pad(tensors, 0)] == [[1, 2, 3], [4, 0, 0]]
    assert module.pad(tuple(tensors), 9, side="left", op="stack").tolist() == [[1, 2, 3], [9, 9, 4]]
    assert module.pad(tensors, 0, max_length=4, op=torch.stack).shape == (2, 4)
    assert module.pad(torch.ones(2, 2), -100, max_length=3)[:, 2].tolist() == [-100, -100]
    assert tensors[1].tolist() == [4]
    for wrong in ({}, {"max_length": 2}, {"max_length": 4, "side": "up"}):
        with pytest.raises(ArgumentError):
            module.pad(tensors[0], 0, **wrong)
    module.free_memory(tensors, clear_cache=True, gc_collect=True)


# ---- Collators


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]
    vocabulary = tmp_path_factory.mktemp("words") / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    return BertTokenizer(str(vocabulary))


@each("name", COLLATORS)
@pytest.mark.filterwarnings("ignore:Deprecated in 0.9.0:DeprecationWarning")  # tokenizers, from older transformers
def test_a_collator_finds_encodings_in_tuples_lists_and_dicts(name, tokenizer):
    collate = pickle.loads(pickle.dumps(getattr(accmt, name)(tokenizer)))  # for worker processes
    samples = []
    for length in (8, 6):
        ids = list(range(5, 5 + length))
        row = BatchEncoding({"input_ids": ids})
        if name in ("DataCollatorForSeq2Seq", "DataCollatorForTokenClassification"):
            row["labels"] = ids
        samples.append((row, {"pair": [row, length]}, 1.0))
    first, second, third = collate(samples)
    assert isinstance(collate, RecursiveCollator)
    assert first["input_ids"].shape == second["pair"][0]["input_ids"].shape == (2, 8)
    assert second["pair"][1].tolist() == [8, 6]
    assert third.tolist() == [1, 1]
    if "labels" in first:
        assert first["labels"].shape == (2, 8)


# ---- The search


def test_a_search_is_a_sweep_of_the_named_values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search = HyperParameterSearch(Linear, make_points(16), make_points(8), verbose=False)
    with pytest.raises(ArgumentError, match="set_parameters"):
        search.optimize()
    schedulers = {"linear": "LinearWithWarmup", "cosine": "CosineWithWarmup"}
    search.set_parameters(
        train_batch_size=[2, 4], learning_rate=[1e-2, 1e-1], beta1=(0.8, 0.9), scheduler=schedulers, eval_batch_size=8
    )
    asked = []

    def score(metrics):
        asked.append(metrics["0"]["valid_loss"])
        return -asked[-1]

    result = search.optimize(score, direction="maximize", n_trials=2)
    assert result.best.objectives == {"score": -min(asked)}
    values = result.best.values
    assert values["batch_size"] in ([2, 8], [4, 8])
    assert 1e-2 <= values["optim.lr"] <= 1e-1
    assert values["optim.betas.0"] in (0.8, 0.9)
    assert values["scheduler.type"] in schedulers.values()
    by_steps = HyperParameterSearch(Linear, make_points(), make_points(), folder="out/steps", verbose=False)
    by_steps.set_parameters(max_steps=[2, 3])
    assert set(by_steps.optimize(n_trials=1).best.objectives) == {"valid_loss"}


# ---- Memory


def test_snapshots_are_written_every_n_steps_and_when_memory_runs_out(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(memory_snapshots, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory_snapshots, "_dump_snapshot", lambda path: calls.append(Path(path).name))
    callback = MemorySnapshots(every=2, max_entries=10)
    run = SimpleNamespace(tracking=SimpleNamespace(run_folder=tmp_path))
    callback.trainer = SimpleNamespace(device=torch.device("cuda"), run=run)
    callback.state = SimpleNamespace(global_step=0)
    callback.on_fit_start()
    for callback.state.global_step in (1, 2):
        callback.on_update_end()
    callback.on_cuda_out_of_memory()
    callback.on_fit_end()
    assert calls == [
        {"max_entries": 10},
        "step-00000002-process-0.pickle",
        "step-00000002-process-0-out-of-memory.pickle",
        {"enabled": None},
    ]


def test_without_a_gpu_nothing_is_recorded_and_a_line_says_so(tmp_path, caplog):
    callback = MemorySnapshots(every=1)
    trainer = Trainer(HPS, tmp_path / "model", logging_dir=tmp_path, callbacks=callback, verbose=False)
    trainer.fit(Linear(), make_points(4))
    assert "records nothing: training is on cpu" in caplog.text
    assert not list(tmp_path.rglob("memory"))
    with pytest.raises(ArgumentError):
        MemorySnapshots(every=0)


@pytest.mark.usefixtures("nvidia_smi")
def test_an_error_about_memory_names_the_processes_on_the_gpus():
    error = RuntimeError("CUDA out of memory")
    BatchNotes(torch.nn.Linear(1, 1), accmt.TrainingState()).on_step_error(error, torch.zeros(1))
    notes = "\n".join(error.__notes__)
    assert f"GPU 1: process {os.getpid()} of " in notes
    assert "python: 500 MiB" in notes


# ---- Debug levels


@each("level", sorted(LEVELS))
def test_a_debug_level_changes_the_arguments_of_a_trainer(level, monkeypatch):
    with monkeypatch.context() as changed:
        changed.setenv("ACCMT_DEBUG_LEVEL", str(level))
        arguments = change_arguments({"compile": True, "eval_when_start": True, "patience": 3})
    assert arguments["patience"] == 3
    assert arguments.get("log_with", "") is None
    assert arguments["compile"] is (level < 2)
    assert arguments["eval_when_start"] is (level < 4)
    assert ("model_saving" in arguments) == (level >= 3)
    assert ("evaluate_every_n_steps" in arguments) == (level == 5)


SCRIPT = """
from accmt import Trainer
from tests.toys import HPS, Linear, make_points

trainer = Trainer(HPS, "out/model", compile=True, verbose=False, eval_when_start=True)
trainer.fit(Linear(), make_points(), make_points())
print(trainer.config())
"""


def test_a_script_runs_in_debug_mode_as_it_is(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "model.safetensors").write_text("of an earlier run")
    command = [sys.executable, "-m", "accmt.cli.main", "debug", "--cpu", "-L", "4", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "'model_saving': None" in done.stdout
    assert "eval_when_start" not in done.stdout  # config() leaves out what is off by default
    assert "compile" not in done.stdout
    assert [path.name for path in (tmp_path / "out").rglob("*") if path.is_file()] == ["model.safetensors"]
