"""The pages of docs/ and the README are true: their code runs, and what they list is what there is."""

from __future__ import annotations

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from accmt import HyperParameters, errors
from accmt.callbacks import ALIASES, HOOKS
from accmt.compat import HOOK_NAMES
from accmt.data import Shard
from accmt.data.samplers import Plan
from accmt.registry import EXTENSION_POINTS
from accmt.saving.weights import SHARED_KEY
from accmt.state import Counters
from tests.e2e.markdown import (
    PAGES,
    ROOT,
    read_anchors,
    read_blocks,
    read_links,
    read_prose,
    read_section,
    read_table,
    run_python_blocks,
    with_successors,
    write_files,
)
from tests.toys import Linear, Recorder, make_points, make_trainer

DOCS = ROOT / "docs"
STATUS_TAG = "accmt.status"  # of an MLflow run
CONCEPTS = DOCS / "concepts.md"
ERROR_HOOKS = {"on_keyboard_interrupt", "on_cuda_out_of_memory", "on_runtime_error", "on_exception"}


def named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=page.relative_to(ROOT).as_posix()) for page in pages]


@pytest.mark.parametrize("page", named([page for page in PAGES if read_blocks(page, "python")]))
def test_the_python_of_a_page_runs(page, tmp_path):
    shutil.copytree(ROOT / "hps", tmp_path / "hps")
    write_files(page, tmp_path)
    assert run_python_blocks(page) == len([block for block in read_blocks(page, "python") if block.is_run])


@pytest.mark.parametrize("page", named(PAGES))
def test_the_hyper_parameters_on_a_page_are_right(page):
    for block, successor in with_successors(read_blocks(page)):
        shows_errors = successor is not None and successor.text.partition("\n")[0].split(" in ")[0].endswith("errors")
        needs_more = "bitsandbytes" in block.text  # which `make quantized` has
        if (
            block.language == "yaml"
            and not needs_more
            and "hps" in (yaml.safe_load(block.text) or {})
            and not shows_errors
        ):
            config = yaml.safe_load(block.text)
            assert HyperParameters.from_config(config).to_dict()["hps"].keys() >= config["hps"].keys() - {"optimizer"}


@pytest.mark.parametrize("page", named(PAGES))
def test_the_links_of_a_page_lead_somewhere(page):
    for link in read_links(page):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in read_anchors(target), f"{page.name} links to {link}"


def test_the_index_links_every_page():
    linked = {DOCS / link.partition("#")[0] for link in read_links(DOCS / "index.md")}
    inside = {(page.parent / link).resolve() for page in linked if page.name == "index.md" for link in read_links(page)}
    assert set(DOCS.rglob("*.md")) - {DOCS / "index.md"} == linked | inside


@pytest.mark.parametrize("page", named(PAGES))
def test_a_page_names_only_what_the_project_has(page):
    prose = read_prose(page)
    spans = re.findall(r"`([^`\n]+)`", prose)
    for path in (span for span in spans if re.fullmatch(r"(accmt|docs|examples|tests)/[\w./-]*", span)):
        assert (ROOT / path).exists(), path
    for name in (span.partition("(")[0] for span in spans if re.match(r"accmt(\.\w+)+(\(|$)", span)):
        assert name in (SHARED_KEY, STATUS_TAG, *EXTENSION_POINTS) or resolves(name), name
    for name in (span for span in spans if re.fullmatch(r"[\w-]+\.md", span)):
        assert (DOCS / name).exists() or (ROOT / name).exists(), name
    assert not re.findall(r"(?<![\w./:$<*-])/\w+/\w", prose), "a path of somebody's machine"


def resolves(name: str) -> bool:
    """Return whether a dotted name is a module or something in one."""
    *parents, last = name.split(".")
    try:
        return hasattr(import_module(".".join(parents)), last) or bool(import_module(name))
    except ModuleNotFoundError:
        return False


# The picture of the loop


@dataclass
class Line:
    """A line of the picture, with what is indented below it."""

    text: str
    below: list[Line] = field(default_factory=list)

    @property
    def hook(self) -> str | None:
        return self.text.partition("(")[0] if self.text.startswith("on_") else None

    def every(self) -> Iterator[Line]:
        yield self
        for line in self.below:
            yield from line.every()

    def pattern(self, evaluation: str) -> str:
        """Return the regular expression of the calls that the line and those below it allow."""
        if self.hook:
            return f"{self.hook} "
        if self.text == "evaluation" and not self.below:
            return evaluation
        inner = "".join(line.pattern(evaluation) for line in self.below)
        times = "+" if self.text.startswith("for ") else "?" if self.text.startswith("if ") else ""
        return f"(?:{inner}){times}"


def read_picture(text: str) -> Line:
    open_lines: list[Line] = []
    for row in text.splitlines():
        depth = (len(row) - len(row.lstrip())) // 2
        line = Line(row.strip())
        del open_lines[depth:]
        if open_lines:
            open_lines[-1].below.append(line)
        open_lines.append(line)
    return open_lines[0]


FIT, EVALUATION = [read_picture(block.text) for block in read_blocks(CONCEPTS, "text")]


def train(trainer_settings: dict[str, Any], hps: dict[str, Any], module: Linear | None = None) -> list[str]:
    """Train on 5 batches an epoch, evaluate 4, and return the hooks called."""
    recorder = Recorder()
    trainer = make_trainer(hps, callbacks=recorder, **{"grad_accumulation_steps": 2, **trainer_settings})
    trainer.fit(module or Linear(), make_points(10), make_points(8))
    return recorder.calls


SCHEDULED = {"epochs": 2, "scheduler": {"type": "StepLR", "step_size": 1}}
RUNS = {
    "an evaluation each epoch": ({"model_saving": "best_valid_loss"}, SCHEDULED),
    "an evaluation each two updates": ({"evaluate_every_n_steps": 2, "log_every": 2}, {"epochs": 3}),
    "a last evaluation": ({"evaluate_every_n_steps": 2}, {"max_steps": 3, "epochs": 1}),
    "an evaluation before training": ({"eval_when_start": True}, {}),
    "losses of validation batches": ({"report_loss_after_eval": False}, {}),
    "a row each epoch": ({"log_every": -1}, {}),
    "a schedule stepped per epoch": ({}, {**SCHEDULED, "step_scheduler_per_epoch": True}),
    "an epoch cut short": ({"model_saving": "always"}, {"max_steps": 1}),
    "checkpoints each epoch": ({"checkpoint_every": "epoch"}, {"epochs": 2}),
    "checkpoints each update": ({"checkpoint_every": "step"}, {"epochs": 2}),
    "checkpoints each evaluation": ({"checkpoint_every": "eval", "evaluate_every_n_steps": 2}, {"epochs": 3}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_hooks_of_a_run_are_called_in_the_order_of_the_picture(name):
    calls = train(*RUNS[name])
    pattern = FIT.pattern(EVALUATION.pattern(""))
    assert re.fullmatch(pattern, "".join(f"{call} " for call in calls)), calls


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ValueError("x"), RuntimeError("x"), RuntimeError("out of memory")]
)
def test_the_hooks_of_an_error_are_called_in_the_order_of_the_picture(error):
    class Failing(Linear):
        def training_step(self, batch):
            raise error

    recorder = Recorder()
    with pytest.raises(type(error)):
        make_trainer(callbacks=recorder).fit(Failing(), make_points())
    conditions = {
        "on_keyboard_interrupt": isinstance(error, KeyboardInterrupt),
        "on_cuda_out_of_memory": "out of memory" in str(error),
        "on_runtime_error": isinstance(error, RuntimeError),
        "on_exception": isinstance(error, Exception),
    }
    pictured = [line.hook for line in FIT.every() if line.hook in ERROR_HOOKS or line.hook == "on_fit_end"]
    expected = [hook for hook in pictured if conditions.get(str(hook), True)]
    assert recorder.calls[-len(expected) :] == expected
    assert not ERROR_HOOKS & set(recorder.calls[: -len(expected)])


def test_the_picture_shows_every_hook_with_its_keywords():
    shown = {line.hook: line.text for picture in (FIT, EVALUATION) for line in picture.every() if line.hook}
    assert shown == {name: f"{name}({', '.join(keys)})" if keys else name for name, keys in HOOKS.items()}


@pytest.mark.parametrize("resume", ["in an epoch", "after an epoch"])
def test_a_run_that_continues_calls_its_hooks_in_the_order_of_the_picture(resume):
    settings = {"checkpoint_every": "step" if resume == "in an epoch" else "epoch"}
    train(settings, {"max_steps": 4, "epochs": 1})
    train({**settings, "resume": "auto"}, {"epochs": 2, "max_steps": 4})
    calls = train({**settings, "resume": True}, {"epochs": 3})
    assert calls[0] == "on_resume"
    assert re.fullmatch(FIT.pattern(EVALUATION.pattern("")), "".join(f"{call} " for call in calls)), calls


def test_a_run_calls_every_hook_but_those_of_errors():
    settings, hps = RUNS["an evaluation each epoch"]
    settings = {**settings, "checkpoint_every": "epoch"}
    calls = [*train(settings, hps), *train({**settings, "resume": True}, {**hps, "epochs": 3})]
    assert set(calls) == set(HOOKS) - ERROR_HOOKS


# What pages list


def test_the_table_of_hooks_is_the_real_one():
    rows = read_table(read_section(CONCEPTS, "Hooks"))
    cells = [[tuple(re.findall(r"`(\w+)`", cell)) for cell in row] for row in rows]
    assert {names[0]: keywords for names, keywords, *_ in cells} == HOOKS
    others = {alias: names[0] for names, _, *systems in cells for aliases in systems for alias in aliases}
    assert others == {**ALIASES, **HOOK_NAMES}


def test_the_table_of_counters_is_the_real_one():
    rows = read_table(read_section(CONCEPTS, "Counters"))
    assert [name.strip("`") for name, _ in rows] == list(Counters.__dataclass_fields__)


@pytest.mark.parametrize("process", [0, 1])
def test_the_table_of_shares_is_the_real_one(process):
    _, *shown = read_table(read_section(DOCS / "data.md", "Sharding the data"))[process]
    plan = Plan(num_samples=11, batch_size=2, shard=Shard(process, 2))
    assert [list(map(int, cell.split())) for cell in shown] == [
        list(plan.local_indices(r)) for r in range(plan.num_micro_batches)
    ]


def test_the_table_of_errors_is_the_real_one():
    rows = read_table(read_section(DOCS / "failures.md", "Exception classes"))
    listed = {name.strip("`"): set(re.findall(r"`(\w+)`", bases)) for name, bases, _ in rows}
    classes = {
        name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, BaseException)
    }
    assert listed == {
        name: {base.__name__ for base in kind.__bases__} - {"AccmtError"} for name, kind in classes.items()
    }


def test_the_table_of_packages_is_the_real_one():
    rows = read_table(read_section(DOCS / "architecture.md", "Packages and layers"))
    rooms = {path for path in (ROOT / "accmt").iterdir() if path.name[:2] != "__" and path.suffix in ("", ".py")}
    assert {ROOT / room.strip("`") for _, room, _ in rows} == rooms


def test_the_page_of_arguments_is_up_to_date():
    generator = runpy.run_path(str(DOCS / "generate_arguments.py"))
    assert (DOCS / "arguments.md").read_text() == generator["write_page"](), "python docs/generate_arguments.py"
    source = generator["SOURCE"].read_text()
    assert source == generator["write_docstring"](source), "python docs/generate_arguments.py"


# What the quickstart says about processes


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), [("torchrun", 2), ("accmt", 2)])
def test_a_command_of_the_quickstart_runs_as_many_processes_as_the_page_says(launcher, processes, tmp_path):
    page = DOCS / "quickstart.md"
    write_files(page, tmp_path)
    settings = Path("hps.yaml").read_text()
    Path("hps.yaml").write_text(settings.replace("epochs: 10", "epochs: 1"))
    lines = [line for block in read_blocks(page, "bash") for line in block.text.splitlines()]
    (command,) = [line for line in lines if line.startswith(f"{launcher} ")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PET_STANDALONE": "1"}
    run = subprocess.run(command.split(), env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert f"{processes} process(es)" in run.stdout, run.stdout + run.stderr
