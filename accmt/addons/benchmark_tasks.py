"""Benchmarks in evaluations: the tasks of lm-evaluation-harness, on the model in training.

    evaluation:
      tasks: [hellaswag, my_task]

or, with arguments of the harness:

    evaluation:
      tasks: {names: [my_task], path: tasks, num_fewshot: 2, limit: 200, batch_size: 8}

Each metric of a task is a result of the evaluation, named `<task>_<metric>`. The processes share the requests; if they
share the weights, each of them runs all requests.

`every: end` runs the tasks once, at the end of training, and `every: "5 evals"` in every fifth evaluation.
"""

from __future__ import annotations

import copy
import logging
import math
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from accmt.addons.averaging import using_average
from accmt.data import preserve_generators
from accmt.errors import ArgumentError, MissingPackageError, describe_value, fail, nearest
from accmt.loop.evaluation import without_training
from accmt.messages import say
from accmt.options.checks import KeyFault
from accmt.options.units import read_every
from accmt.options.yaml_reader import suggest
from accmt.processes import broadcast_object, gather_objects, num_processes, process_index
from accmt.run import EvaluationRun, Run
from accmt.run.features import Feature
from accmt.state import Stage

IsBetter = Callable[[float, float], bool]

_WHERE = "evaluation.tasks"
_EXAMPLES = {
    "names": "names: [hellaswag]",
    "path": "path: tasks",
    "every": "every: end",
    "num_fewshot": "num_fewshot: 2",
    "limit": "limit: 200",
    "batch_size": "batch_size: 8",
    "max_length": "max_length: 1024",
    "apply_chat_template": "apply_chat_template: true",
    "fewshot_as_multiturn": "fewshot_as_multiturn: true",
    "system_instruction": "system_instruction: Answer briefly.",
    "gen_kwargs": "gen_kwargs: {max_gen_toks: 64}",
}
_END = "end"
_OF_MODEL = ("batch_size", "max_length")
_COUNTS = ("num_fewshot", "batch_size", "max_length")
_UNWANTED = str.maketrans("@/", "__")


# ---- The key `tasks` of the section `evaluation`


@dataclass(frozen=True)
class TaskSection:
    """The tasks to evaluate.

    Attributes:
        names: Names of tasks, groups or tags.
        path: A folder with YAML files of own tasks.
        every: The number of evaluations between two that run the tasks; None runs them once, at the end of training.
        options: Arguments of the harness.
    """

    names: tuple[str, ...]
    path: str | None = None
    every: int | None = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    def directions(self) -> dict[str, IsBetter]:
        """Return how values of each result compare, from the files of the tasks.

        Raises:
            MissingPackageError: The harness is not installed.
            ArgumentError: A task does not exist, or cannot be loaded.
        """
        return dict(_load(self.names, self.path)[1])


def read_tasks(value: Any) -> tuple[TaskSection | None, list[KeyFault]]:
    """Return the tasks and the errors of the key `tasks`; whether the tasks exist is checked later."""
    values = dict(value) if isinstance(value, Mapping) else {"names": value}
    names = values.get("names")
    names = [names] if isinstance(names, str) else names
    is_list = isinstance(names, list | tuple) and bool(names) and all(isinstance(name, str) for name in names)
    faults = []
    if not is_list:
        got = describe_value(names) if "names" in values else "no `names`"
        faults.append(KeyFault(("evaluation", "tasks"), got, "the names of tasks", "write `tasks: [hellaswag]`"))
    for key, entry in values.items():
        expected = _find_expected(key, entry)
        if key not in _EXAMPLES:
            got, do = f"{key} = {describe_value(entry)}", suggest(str(key), _EXAMPLES, f"remove `{key}`")
            faults.append(KeyFault(("evaluation", "tasks", str(key)), got, f"one of {', '.join(_EXAMPLES)}", do))
        elif expected is not None:
            faults.append(
                KeyFault(("evaluation", "tasks", key), describe_value(entry), expected, f"write `{_EXAMPLES[key]}`")
            )
    if faults:
        return None, faults
    own = ("names", "path", "every")
    options = {key: entry for key, entry in values.items() if key not in own and entry is not None}
    every = _read_every(values.get("every"))
    return TaskSection(tuple(dict.fromkeys(names or ())), values.get("path"), every, options), []


def _read_every(value: Any) -> int | None:
    """Return the number of evaluations; None for the end of training.

    Raises:
        ArgumentError: It is neither.
    """
    if value == _END:
        return None
    return 1 if value is None else int(read_every("every", value, ["eval"], plain="eval").number)


def _find_expected(key: Any, entry: Any) -> str | None:
    """Return what is expected in place of an entry; None if it is right."""
    if entry is None or key not in _EXAMPLES:
        return None
    is_number = isinstance(entry, int | float) and not isinstance(entry, bool)
    if key in _COUNTS:
        least = 0 if key == "num_fewshot" else 1
        return None if type(entry) is int and entry >= least else f"a whole number of at least {least}"
    if key == "limit":
        return None if is_number and entry > 0 else "a number of samples, or a fraction below 1"
    if key == "path":
        return None if isinstance(entry, str) else "a folder"
    if key == "every":
        try:
            _read_every(entry)
        except ArgumentError:
            return '`end`, or a number of evaluations, such as "5 evals"'
    return None


@lru_cache(maxsize=4)
def _load(names: tuple[str, ...], path: str | None) -> tuple[Any, Mapping[str, IsBetter]]:
    """Return the task manager of the harness, and the directions of the results; the tasks are loaded to check them."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        got, do = "lm_eval is not installed", "pip install 'accmt-trainer[tasks]'"
        raise fail(MissingPackageError, _WHERE, got=got, expected="lm-evaluation-harness", do=do) from error
    if path is not None and not Path(path).is_dir():
        do = "write the path from the working folder of the program"
        raise fail(
            ArgumentError, _WHERE, got=f"no such folder: {path}", expected="a folder with YAML files of tasks", do=do
        )
    manager = None
    if path is not None:  # the index of all tasks takes seconds
        manager = TaskManager(include_path=path, include_defaults=False)
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=path)
    for name in names:
        if name not in manager.all_tasks:
            meant = nearest(name, manager.all_tasks)
            do = f"did you mean {meant!r}?" if meant else "`lm_eval ls tasks` lists them; `path` adds a folder of tasks"
            raise fail(
                ArgumentError,
                _WHERE,
                got=f"no task {name!r}",
                expected="a task, a group or a tag of the harness",
                do=do,
            )
    with _quiet(), preserve_generators():
        try:
            loaded = manager.load(list(names))
        except Exception as error:
            got = f"{', '.join(names)} cannot be loaded: {type(error).__name__}: {error}"
            do = "correct the file of the task, or make its data available on this machine"
            raise fail(ArgumentError, _WHERE, got=got, expected="tasks with their data", do=do) from error
    better: dict[str, bool | None] = {}
    of_tasks = {name: task.higher_is_better() or {} for name, task in loaded["tasks"].items()}
    for name, metrics in of_tasks.items():
        configured = getattr(loaded["tasks"][name].config, "filter_list", None) or [{"name": "none"}]
        filters = [one["name"] for one in configured]
        better |= {_name(name, metric, one): is_higher for metric, is_higher in metrics.items() for one in filters}
    every = {metric: is_higher for metrics in of_tasks.values() for metric, is_higher in metrics.items()}
    for name, group in loaded["groups"].items():
        for listed in group.aggregate_metric_list or ():
            filters = [listed.filter_list] if isinstance(listed.filter_list, str) else listed.filter_list or ["none"]
            better |= {_name(name, listed.metric, one): every.get(listed.metric) for one in filters}
    directions = {
        name: operator.gt if is_higher else operator.lt for name, is_higher in better.items() if is_higher is not None
    }
    return manager, directions


def _name(task: str, metric: str, filtered: str) -> str:
    """Return the name of a result; `@`, `/` and `__` have a meaning in the names of results."""
    name = f"{task}_{metric}" + ("" if filtered == "none" else f"_{filtered}")
    name = name.translate(_UNWANTED)
    while "__" in name:
        name = name.replace("__", "_")
    return name


# ---- The feature


class BenchmarkTasks(Feature):
    """Evaluates tasks of the harness in evaluations, or at the end of training."""

    name = "tasks"

    def __init__(self, run: EvaluationRun, section: TaskSection) -> None:
        self._run = run
        self._section = section
        self._ended_at: int | None = None
        self._tokenizer = find_tokenizer(run, _WHERE, "encode the tasks")
        model = run.module.unwrapped_model
        if not all(hasattr(model, name) for name in ("config", "device", "tie_weights")):
            do = "train a transformers model, or remove `evaluation.tasks`"
            raise fail(
                ArgumentError,
                _WHERE,
                got=f"a {type(model).__name__}",
                expected="a language model of transformers",
                do=do,
            )
        if section.every != 1:
            # Nothing that is decided in each evaluation may depend on tasks that are not in each.
            saving, hps = run.settings.saving, run.settings.hps
            rules = saving.model_saving if isinstance(saving.model_saving, list | tuple) else [saving.model_saving]
            stops = saving.patience if isinstance(saving.patience, Mapping) else {}
            decided = {f"model_saving={rule!r}": rule for rule in rules}
            decided |= {f"patience={{{name!r}: ...}}": name for name in stops}
            decided["the scheduler's `monitor`"] = hps.scheduler_kwargs.get("monitor")
            of_tasks = section.directions().keys()
            for what, name in decided.items():
                parts = name.removeprefix("best_").split("/") if isinstance(name, str) else []
                if not of_tasks.isdisjoint(parts):
                    got = f"tasks that are not in each evaluation, and {what}, which needs them in each"
                    do = f"remove `every` from the tasks, or choose another value than {name!r}"
                    raise fail(ArgumentError, f"{_WHERE}.every", got=got, expected="tasks in each evaluation", do=do)

    @classmethod
    def for_run(cls, run: EvaluationRun) -> BenchmarkTasks | None:
        section = run.settings.hps.section("evaluation")
        return None if section is None or section.tasks is None else cls(run, section.tasks)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._ended_at is None else {"ended_at": self._ended_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ended_at = state["ended_at"]

    def add_results(self, stage: Stage) -> dict[str, float]:
        """Evaluate the tasks if they are due; in the trial before training, only their results are named.

        Processes: collective.
        """
        every, state = self._section.every, self._run.state
        if stage == "sanity_check":
            return dict.fromkeys(self._section.directions(), math.nan) if every == 1 else {}
        is_due = state.fn != "fit" or (every is not None and (state.evaluations_done + 1) % every == 0)
        return self._run_tasks() if stage == "validate" and is_due else {}

    def has_work_left(self) -> bool:
        """Return whether the run was interrupted before the tasks at its end were evaluated."""
        return self._section.every is None and self._ended_at != self._run.state.global_step

    def on_training_end(self) -> None:
        """Evaluate the tasks that run only at the end, and log their results as one row.

        Processes: collective.
        """
        run = self._run
        if not (isinstance(run, Run) and self.has_work_left()):
            return
        say(f"evaluating {', '.join(self._section.names)} at the end of training")
        with (
            run.features.doing("evaluating"),
            run.stepper.evaluating(),
            using_average(run.callbacks),
            without_training(run, "validate"),
        ):
            run.engine.share_buffers()
            found = self._run_tasks()
        run.state.metrics.update(found)
        for hook in run.hooks.on_log if found else ():
            hook(values=found, step=run.state.global_step)
        say(", ".join(f"{name} {value:.4g}" for name, value in found.items()))
        self._ended_at = run.state.global_step
        if run.settings.checkpoints.every is not None:
            run.checkpoints.request(None)  # the last one may have been written before

    def _run_tasks(self) -> dict[str, float]:
        devices = [self._run.device] if self._run.device.type == "cuda" else []
        for module in ("lm_eval.evaluator", "lm_eval.models.huggingface"):
            import_module(module)  # before it is made quiet
        running = self._run.settings.running
        shows_bars = running.verbose and running.enable_progress_bar is not False and sys.stderr.isatty()
        with preserve_generators(), torch.random.fork_rng(devices), _quiet(shows_bars=shows_bars):
            found = self._evaluate()
        return broadcast_object(found)

    def _evaluate(self) -> dict[str, float]:
        """Return the scores on the main process.

        Processes: collective.
        """
        from lm_eval import simple_evaluate

        options = dict(self._section.options)
        own = {name: options.pop(name) for name in _OF_MODEL if name in options}
        tokenizer, shares = copy.deepcopy(self._tokenizer), not self._run.engine.needs_all
        model = _build_model(self._run.module.unwrapped_model, tokenizer, own, shares_requests=shares)
        manager, _ = _load(self._section.names, self._section.path)
        names = list(self._section.names)
        found = simple_evaluate(
            model, tasks=names, task_manager=manager, log_samples=False, bootstrap_iters=0, **options
        )
        scores: dict[str, float] = {}
        for part in ("results", "groups") if found is not None else ():
            for task, entries in found.get(part, {}).items():
                for key, value in entries.items():
                    metric, _, filtered = key.partition(",")
                    is_score = filtered and not metric.endswith("_stderr") and isinstance(value, int | float)
                    scores |= {_name(task, metric, filtered): float(value)} if is_score else {}
        return scores


def _build_model(model: Any, tokenizer: Any, options: Mapping[str, Any], *, shares_requests: bool) -> Any:
    """Return the harness's model for one that exists.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        options: Arguments of the harness's model.
        shares_requests: Whether each process scores a part of the requests. Otherwise each scores all of them, at the
            same time as the others: they share the weights, and each forward needs all processes.
    """
    from lm_eval.models.huggingface import HFLM

    class Shared(HFLM):  # type: ignore[misc]
        rank = property(lambda _: process_index() if shares_requests else 0)
        world_size = property(lambda _: num_processes() if shares_requests else 1)

        def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
            return torch.stack(gather_objects(tensor.cpu()))

        def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
            every = gather_objects(obj)
            return every if process_index() == dst else None

        def barrier(self) -> None:
            gather_objects(None)

    return Shared(pretrained=model, tokenizer=tokenizer, **options)


def find_tokenizer(run: EvaluationRun, where: str, purpose: str) -> Any:
    """Return the tokenizer of a module.

    Args:
        run: The run.
        where: The setting that needs it.
        purpose: What for.

    Raises:
        ArgumentError: The module has none.
    """
    module = run.module
    for owner in (getattr(module, "processor", None), getattr(module, "tokenizer", None)):
        tokenizer = getattr(owner, "tokenizer", owner)  # a processor of text and images has one
        if hasattr(tokenizer, "decode"):
            return tokenizer
    got = f"{type(module).__name__} has no tokenizer"
    do = "set self.processor = tokenizer in the module, or pass processor=tokenizer to `fit`"
    raise fail(ArgumentError, where, got=got, expected=f"a tokenizer, to {purpose}", do=do)


@contextmanager
def _quiet(*, shows_bars: bool = False) -> Iterator[None]:
    """Show only errors of the harness: it warns about a model that exists, draws a bar per text, and asks git."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    loaded = [module for name, module in sys.modules.items() if name.startswith("lm_eval.")]
    quiet: dict[str, Any] = {"get_git_commit_hash": lambda: None, **({} if shows_bars else {"tqdm": _hide_bar})}
    replaced = [(module, name, vars(module)[name]) for module in loaded for name in quiet if name in vars(module)]
    for module, name, _ in replaced:
        setattr(module, name, quiet[name])
    try:
        yield
    finally:
        logger.setLevel(before)
        for module, name, own in replaced:
            setattr(module, name, own)


def _hide_bar(*arguments: Any, **options: Any) -> Any:
    return tqdm(*arguments, **{**options, "disable": True})
