"""`evaluation: {tasks: ...}` with lm-evaluation-harness; `make tasks` runs it.

The tasks and their data are files of the test, so nothing is asked of a hub.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM

from accmt import EMA, SFTModule, Trainer
from accmt.addons.benchmark_tasks import BenchmarkTasks
from accmt.errors import ArgumentError
from accmt.tracking import read_history
from tests import conversations
from tests.conversations import make_tokenizer
from tests.launching import launch

pytestmark = [
    pytest.mark.filterwarnings("default"),  # of the harness
]
WORDS = ["red", "green", "blue", "one"]
ROWS = [{"prompt": f"{WORDS[number % 4]} {number}", "completion": WORDS[number % 3]} for number in range(12)]
NAMES = ["colors", "written", "plain"]
SCORES = ["colors_acc", "colors_acc_norm", "plain_bits_per_byte", "plain_word_perplexity", "written_exact_match"]
METRICS = {
    "colors": ["{metric: acc, aggregation: mean, higher_is_better: true}", "{metric: acc_norm}"],
    "written": ["{metric: exact_match, aggregation: mean, higher_is_better: true}"],
    "plain": ["{metric: word_perplexity}", "{metric: bits_per_byte}"],
}
KINDS = {
    "colors": "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n",
    "written": "output_type: generate_until\ndoc_to_target: '{{text}}'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 4}\n",
    "plain": "output_type: loglikelihood_rolling\ndoc_to_target: '{{text}}'\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_tasks(tmp_path)
    return tmp_path


def write_tasks(folder: Path) -> None:
    place = folder / "tasks"
    place.mkdir()
    rows = [
        {"question": f"{WORDS[n % 4]} {n}", "choices": WORDS[:3], "answer": n % 3, "text": WORDS[n % 3]}
        for n in range(11)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in NAMES:
        data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {place}/rows.jsonl}}}}\ntest_split: test\n"
        text = "''" if name == "plain" else "'{{question}}'"
        metrics = "".join(f"  - {metric}\n" for metric in METRICS[name])
        (place / f"{name}.yaml").write_text(
            f"task: {name}\n{data}{KINDS[name]}doc_to_text: {text}\nmetric_list:\n{metrics}"
        )


def make_module() -> SFTModule:
    tokenizer = make_tokenizer(conversations.CHATML)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return SFTModule(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)), tokenizer)


def make_trainer(tasks: Any, **arguments: Any) -> Trainer:
    hps = {"epochs": 2, "batch_size": [4, 4], "optim": {"type": "AdamW", "lr": 1e-2}}
    hps |= {} if tasks is None else {"evaluation": {"tasks": tasks}}
    return Trainer(hps, "model", **{"model_saving": None, "verbose": False, "seed": 0, "run_name": "run", **arguments})


def train(tasks: Any, **arguments: Any) -> tuple[Trainer, SFTModule]:
    trainer, module = make_trainer(tasks, **arguments), make_module()
    trainer.fit(module, ROWS, ROWS[:5])
    return trainer, module


def score_by_hand(module: SFTModule, **options: Any) -> dict[str, float]:
    model = HFLM(pretrained=module.model, tokenizer=copy.deepcopy(module.processor))
    manager = TaskManager(include_path="tasks", include_defaults=False)
    found = simple_evaluate(model, tasks=NAMES, task_manager=manager, log_samples=False, bootstrap_iters=0, **options)
    scores = {(task, key): value for task, one in found["results"].items() for key, value in one.items()}
    return {
        f"{task}_{key.removesuffix(',none')}": value
        for (task, key), value in scores.items()
        if key.endswith(",none") and "stderr" not in key
    }


def test_scores_are_those_of_the_harness_and_training_does_not_change(
    project: Path, capfd: pytest.CaptureFixture
) -> None:
    _, plain = train(None)
    trainer, module = train({"names": NAMES, "path": "tasks"})
    assert module.model.training == plain.model.training
    shown = "".join(capfd.readouterr())
    assert not any(text in shown for text in ("requests", "git", "pretrained"))
    by_hand = score_by_hand(module)
    assert sorted(by_hand) == SCORES
    row = [row["values"] for row in read_history(trainer.log_dir) if "colors_acc" in row.get("values", {})][-1]
    assert {name: row[name] for name in by_hand} == by_hand
    assert {name: trainer.validate()[name] for name in by_hand} == by_hand
    trained, others = plain.model.state_dict(), module.model.state_dict()
    assert all(torch.equal(trained[name], others[name]) for name in trained)


def test_models_are_saved_by_a_task_and_options_are_those_of_the_harness(project: Path) -> None:
    trainer, module = train(
        {"names": NAMES, "path": "tasks", "limit": 6}, model_saving=["best_colors_acc", "best_plain_bits_per_byte"]
    )
    rows = [row["values"] for row in read_history(trainer.log_dir) if "colors_acc" in row.get("values", {})]
    assert len(rows) == 2
    assert trainer.state.best == {
        "best_colors_acc": max(row["colors_acc"] for row in rows),
        "best_plain_bits_per_byte": min(row["plain_bits_per_byte"] for row in rows),
    }
    by_hand = score_by_hand(module, limit=6)
    assert {name: rows[-1][name] for name in by_hand} == by_hand


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"names": ["colrs"], "path": "tasks"}, "no task 'colrs'[\\s\\S]*did you mean 'colors'"),
        ({"names": ["colors"], "path": "task"}, "no such folder: task"),
    ],
)
def test_a_task_that_does_not_exist_is_an_error_before_training(project: Path, tasks: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make_trainer(tasks)


def test_a_task_without_its_data_is_an_error_before_training(project: Path) -> None:
    Path("tasks/rows.jsonl").unlink()
    with pytest.raises(ArgumentError, match="plain cannot be loaded"):
        make_trainer({"names": ["plain"], "path": str(project / "tasks")})


@pytest.mark.parametrize("processes", [2, "fsdp-2", "tp-2"])
def test_processes_score_what_one_process_scores(project: Path, processes: int | str) -> None:
    result = project / "result.json"
    script = Path(__file__).with_name("on_processes.py")
    launch(script, str(result), str(project / "own"), processes=processes, result=result)
    found = json.loads(result.read_text())
    if processes == "fsdp-2":  # each runs the same batches as one process, with the same gathered weights
        assert found["scores"] == found["by_hand"]
    assert found["scores"] == pytest.approx(found["by_hand"], rel=1e-5)
    assert found["scores"]["colors_acc"] == found["by_hand"]["colors_acc"]


def rows_of_tasks(trainer: Trainer) -> list[tuple[int, dict[str, float]]]:
    rows = read_history(trainer.log_dir)
    return [(row["step"], row["values"]) for row in rows if "colors_acc" in row.get("values", {})]


def test_tasks_at_the_end_have_the_scores_of_the_last_weights_and_training_does_not_change(project: Path) -> None:
    _, plain = train(None)
    trainer, module = train({"names": NAMES, "path": "tasks", "every": "end"}, callbacks=EMA(), model_saving="last")
    trained, others = plain.model.state_dict(), module.model.state_dict()
    assert all(torch.equal(trained[name], others[name]) for name in trained)
    ((step, row),) = rows_of_tasks(trainer)
    last = make_module()
    last.load_weights("model/last")  # the average
    assert (step, row) == (trainer.state.global_step, score_by_hand(last))
    assert {name: trainer.state.metrics[name] for name in row} == row
    assert trainer.state.metrics.keys() - row.keys() == {"val_loss"}
    assert {name: trainer.validate()[name] for name in row} == row


def test_tasks_at_the_end_that_a_kill_interrupted_run_when_the_run_is_resumed_and_only_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"names": ["colors"], "path": "tasks", "every": "end"}
    run_tasks = BenchmarkTasks._run_tasks

    def fail(_: Any) -> Any:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(BenchmarkTasks, "_run_tasks", fail)
        with pytest.raises(OSError, match="killed"):
            train(tasks, checkpoint_every="epoch")
    calls: list[int] = []
    monkeypatch.setattr(BenchmarkTasks, "_run_tasks", lambda self: calls.append(1) or run_tasks(self))
    trainer, _ = train(tasks, checkpoint_every="epoch", resume=True)
    assert len(calls) == 1
    assert [step for step, _ in rows_of_tasks(trainer)] == [6]
    for resume in (False, True):
        train(tasks, checkpoint_every="epoch", resume=resume)
        assert len(calls) == 2


def test_tasks_run_in_every_second_evaluation(project: Path) -> None:
    trainer, _ = train({"names": ["colors"], "path": "tasks", "every": "2 evals"}, evaluate_every_n_steps=1)
    assert [step for step, _ in rows_of_tasks(trainer)] == [2, 4, 6]


@pytest.mark.parametrize(
    "arguments", [{"model_saving": "best_colors_acc"}, {"patience": {"colors_acc": 2}, "model_saving": "last"}]
)
def test_nothing_is_decided_in_each_evaluation_by_tasks_at_the_end(project: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="got: tasks that are not in each evaluation"):
        train({"names": ["colors"], "path": "tasks", "every": "end"}, **arguments)
