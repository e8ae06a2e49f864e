"""The launches of a proof: each trains for a few steps in forks of this process, and is compared with the reference.

A fork has the user's objects as they are when the proof begins. What a launch does to them, to files and to process
groups ends with it.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from accmt.addons.digests import digest, digest_attributes
from accmt.addons.prove.randomness import SameForAllSamples, first_samples, seed_step
from accmt.callbacks import Callback, build_callbacks
from accmt.engine.sync_batchnorm import is_batch_norm
from accmt.errors import AccmtError
from accmt.files import dumps, loads
from accmt.libraries.private_names import forget_accelerator
from accmt.options import Settings

EXACT, REDUCED = 1e-3, 5e-2
"""Relative errors up to which gradients count as equal: of float32 weights, and of bfloat16 and float16 ones."""
_ROUNDING = 1e-5  # of the largest gradient
_FLOOR = 1e-3  # of the largest gradient: errors of a smaller one are measured against this


@dataclass(frozen=True)
class Launch:
    """One way to train the same steps.

    Attributes:
        name: Its name in the table.
        processes: How many processes.
        divided_by: How many micro-batches, over all processes, make an optimizer step.
        workers: Loader workers.
        val_batch_size: Samples of a validation batch.
        max_tokens: Tokens of a micro-batch, or None.
        resumes: Whether it continues from the checkpoint in the middle of the second launch.
        saves: Whether it writes that checkpoint.
        with_callbacks: The callbacks that take part, by index; None is all.
        freezes_batch_norm: Whether batch norm uses its running statistics.
        units: The units of `same_bits`; None is without.
    """

    name: str
    processes: int = 1
    divided_by: int = 1
    workers: int = 0
    val_batch_size: int = 8
    max_tokens: int | None = None
    resumes: bool = False
    saves: bool = False
    with_callbacks: tuple[int, ...] | None = None
    freezes_batch_norm: bool = False
    units: int | None = None


@dataclass
class Outcome:
    """What a launch measured.

    Attributes:
        error: The error that ended it, as "Type: message".
        kind: The type of the error.
        is_refused: Whether accmt itself refused the launch.
        gradient: The largest relative error of a gradient.
        first: The first tensor with an error: (step, name, error).
        ratio: The factor by which all gradients of a step differ from the reference, if there is one.
        weight: The largest relative error of a weight's update.
        first_weight: The first such weight: (step, name, error).
        values: Logged training values by step.
        metrics: Results of evaluations, in order.
        batches: Digests of the batches by step.
        attributes: Digests of the attributes of module, callbacks and data at the end.
        tokens: Padded tokens of the largest batch; 0 if samples have one length.
        tolerance: The relative error up to which gradients count as equal.
    """

    error: str | None = None
    kind: str = ""
    is_refused: bool = False
    gradient: float = 0.0
    first: tuple[int, str, float] | None = None
    ratio: float | None = None
    weight: float = 0.0
    first_weight: tuple[int, str, float] | None = None
    values: dict[str, dict[str, float]] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    batches: dict[str, str] = field(default_factory=dict)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: int = 0
    tolerance: float = EXACT


@dataclass(frozen=True)
class Subject:
    """What is proven: the arguments of `fit`, and the size of the proof."""

    trainer: Any
    module: Any
    train: Any
    val: Any
    datamodule: Any
    steps: int
    batch_size: int
    uses_batch_norm: bool
    folder: Path
    fit: Callable[..., Any]


def run_forked(number: int, body: Callable[[], Any], folder: Path, timeout_s: float = 600) -> dict[str, Any]:
    """Run a function in forks of this process, which form a process group if there are several.

    Returns:
        What it returned in the first, as JSON; or `error`, `kind` and `is_refused` of the process that failed.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if number > 1 else None
    results = [folder / f"result-{rank}.json" for rank in range(number)]
    for path in results:
        path.unlink(missing_ok=True)
    deadline = time.monotonic() + timeout_s
    forking, port = get_context("fork"), store.port if store else 0
    children = [
        forking.Process(target=_become, args=(rank, number, port, folder / f"output-{rank}.txt", body, result))
        for rank, result in enumerate(results)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.exitcode is None:
            for one in children:
                one.kill()
            return {"error": f"it did not finish within {timeout_s:.0f} s", "kind": "timeout", "is_refused": False}
    del store
    found: list[Any] = [loads(path.read_text()) if path.exists() else None for path in results]
    failed = [one for one in found if one is not None and one.get("error")]
    failed.sort(key=lambda one: one["kind"] == "ProcessFailedError")
    if failed:
        error: dict[str, Any] = failed[0]
        return error
    if None in found:
        last = (folder / f"output-{found.index(None)}.txt").read_text(errors="replace").splitlines()[-3:]
        return {"error": "a process ended without a result: " + " | ".join(last), "kind": "exit", "is_refused": False}
    first: dict[str, Any] = found[0]
    return first


def _become(rank: int, number: int, port: int, output: Path, body: Callable[[], Any], result: Path) -> None:
    """Be one process of a launch: run the function, and write what it returns."""
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number}
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    for name in (*places, *meeting):
        os.environ.pop(name, None)
    if number > 1:
        os.environ.update({name: str(value) for name, value in {**places, **meeting}.items()})
    os.environ.update(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)  # the threads of the process that was forked do not exist here
    forget_accelerator()
    try:
        returned = body()
    except BaseException as error:
        message = "".join(traceback.format_exception_only(error)).strip()
        failure = {"error": message, "kind": type(error).__name__, "is_refused": isinstance(error, AccmtError)}
        result.write_text(dumps(failure))
        raise
    result.write_text(dumps(returned))


def run_launch(subject: Subject, launch: Launch, variant: str = "") -> Outcome:
    """Train as one launch, and return what was measured; the launch "reference" writes what others compare with."""
    folder = subject.folder / f"reference{variant}"
    folder.mkdir(exist_ok=True)

    def body() -> dict[str, Any]:
        observer = Observer(folder, launch, is_reference=launch.name == "reference")
        train_as(subject, launch, [observer])
        return vars(observer.outcome)

    found = run_forked(launch.processes, body, subject.folder)
    outcome = Outcome(**found)
    outcome.first = None if outcome.first is None else tuple(outcome.first)  # type: ignore[assignment]
    return outcome


def train_as(subject: Subject, launch: Launch, watching: Sequence[Callback]) -> None:
    """Train in this process, which is a fork, with the settings of a launch."""
    trainer, module = subject.trainer, subject.module
    module.trainer, module.state = trainer, trainer.state
    train, val = _find_data(subject)
    arguments = _arguments(subject, launch)
    if isinstance(train, DataLoader):  # launches make their own, from what stays in effect of it
        module.collate_fn_train = train.collate_fn
        if isinstance(train.sampler, SequentialSampler):
            arguments["shuffle_train"] = False
        elif not isinstance(train.sampler, RandomSampler) and train.batch_sampler is not None:
            arguments["sampler"] = list(itertools.islice(iter(train.sampler), subject.steps * subject.batch_size))
        train = train.dataset
    has_order = arguments.get("sampler") is not None or hasattr(train, "order_run")
    last = subject.batch_size // 2 + (2 if subject.uses_batch_norm else 1)  # batch norm needs two samples
    count = (subject.steps - 1) * subject.batch_size + last
    train = train if hasattr(train, "order_run") else first_samples(train, None if has_order else count)
    if val is not None:
        sets = list(val.values()) if isinstance(val, dict) else val if _are_sets(val) else [val]
        limited = [first_samples(one.dataset if isinstance(one, DataLoader) else one, count) for one in sets]
        loaders = [one for one in sets if isinstance(one, DataLoader)]
        if loaders and loaders[0].collate_fn is not None:
            module.collate_fn_val = loaders[0].collate_fn
        val = (
            dict(zip(val, limited, strict=True)) if isinstance(val, dict) else limited if _are_sets(val) else limited[0]
        )
    module.get_train_dataloader = lambda *_: None
    module.get_validation_dataloader = lambda *_: None
    callbacks = build_callbacks(trainer.settings.running.callbacks)
    if launch.with_callbacks is not None:
        every = [*callbacks, *build_callbacks(module.get_callbacks())]
        callbacks = [every[index] for index in launch.with_callbacks]
        module.get_callbacks = lambda: []
    arguments["callbacks"] = [*callbacks, *watching]
    copied = copy.copy(trainer)
    copied.settings = Settings.from_arguments({**Settings.defaults(), "tracker_kwargs": {}, **arguments})
    copied.registered_savings, copied.chosen_checkpoint, copied._run = [], None, None
    if launch.resumes:
        found = sorted((subject.folder / "checkpoints").glob("*"))
        copied.load_checkpoint(found[0] if len(found) > 1 else subject.folder / "checkpoints")
    subject.fit(copied, module, train, val)


def _are_sets(val: Any) -> bool:
    return isinstance(val, list | tuple) and bool(val) and isinstance(val[0], torch.utils.data.Dataset | DataLoader)


def _find_data(subject: Subject) -> tuple[Any, Any]:
    from accmt.loaders import UserData, find_train_data

    module, maker = subject.module, subject.datamodule
    train, val = subject.train, subject.val
    if maker is not None:
        UserData("fit", {}, maker)  # checks it
        maker.trainer = subject.trainer
        for name, arguments in (("prepare_data", ()), ("setup", ("fit",))):
            getattr(maker, name, lambda *_: None)(*arguments)
        train = maker.train_dataloader()
        loader = getattr(maker, "val_dataloader", None)
        is_own = not getattr(loader, "__qualname__", "").startswith("DataHooks.")  # that of Lightning's class raises
        val = loader() if loader is not None and is_own else None
    train = find_train_data(module, train, subject.trainer.hps)
    takes_data = bool(inspect.signature(module.get_validation_dataloader).parameters)
    own = module.get_validation_dataloader(val) if takes_data else module.get_validation_dataloader()
    return train, val if own is None else own


_LEFT_OUT = (
    "accelerator",
    "checkpointer",
    "clip_grad",
    "compile",
    "eval_when_start",
    "evaluate_every_n_steps",
    "fast_dev_run",
    "fork",
    "handlers",
    "limit_batches",
    "log_with",
    "max_time",
    "min_length",
    "mixed_precision",
    "model_saving_above",
    "model_saving_below",
    "monitor",
    "num_sanity_val_steps",
    "overfit_batches",
    "parallelism",
    "patience",
    "profiler",
    "reload_dataloaders_every_n_epochs",
    "run_name",
    "tracker_options",
)


def _arguments(subject: Subject, launch: Launch) -> dict[str, Any]:
    settings = subject.trainer.settings
    arguments: dict[str, Any] = settings.to_arguments()
    for name in (*_LEFT_OUT, *settings.tracking.tracker_kwargs):
        arguments.pop(name, None)
    size = subject.batch_size // launch.divided_by
    folder, middle = subject.folder, max(1, subject.steps // 2)
    hps = {
        **arguments["hps_config"]["hps"],
        "epochs": None,
        "max_steps": subject.steps,
        "max_samples": None,
        "max_target_tokens": None,
        "max_micro_batch_size": None,
        "max_tokens": launch.max_tokens,
        "packing": None,
        "batch_size": [size, launch.val_batch_size],
    }
    options = arguments["data_options"] = {**arguments.get("data_options", {}), "group_by_length": False}
    if options.get("batch_sampler") is not None:
        batches = itertools.chain.from_iterable(options.pop("batch_sampler"))
        arguments["sampler"] = list(itertools.islice(batches, subject.steps * subject.batch_size))
    accumulation = 1 if launch.units else launch.divided_by // launch.processes
    if launch.units:
        arguments["clip_grad"] = settings.optimization.clip_grad
    return arguments | {
        "same_bits": launch.units,
        "hps_config": {"hps": hps},
        "model_path": folder / "model",
        "logging_dir": folder / "logs",
        "checkpoint": folder / ("resumed" if launch.resumes else "checkpoints"),
        "checkpoint_every": f"{middle} steps" if launch.saves else None,
        "checkpoint_options": {"max_checkpoints": 100},
        "model_saving": None,
        "resume": False,
        "grad_accumulation_steps": accumulation,
        "dataloader_num_workers": launch.workers,
        "log_every": 1,
        "seed": settings.running.seed or 0,
        "accelerator": {"cpu": True},
        "mixed_precision": "no",
        "verbose": False,
        "enable_progress_bar": False,
        "num_sanity_val_steps": 0,
    }


def is_compared(name: str) -> bool:
    """Return whether a logged value is a result, not a time or a size."""
    return not any(word in name for word in ("second", "time", "throughput", "padding", "memory"))


class Observer(Callback):
    """Measures a launch; after each step it sets the weights of the reference, so that errors do not add up."""

    order = math.inf

    def __init__(self, folder: Path, launch: Launch, *, is_reference: bool) -> None:
        self.outcome = Outcome()
        self._folder = folder
        self._launch = launch
        self._is_reference = is_reference
        self._noise: SameForAllSamples | None = None
        self._steps = 0  # calls of optimizers, of which a module may have several

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]

    def on_fit_start(self) -> None:
        if self._launch.freezes_batch_norm:
            layer: Any
            for layer in filter(is_batch_norm, self.trainer.run.unwrapped_model.modules()):
                layer.eval()
                layer.train = lambda mode=True, layer=layer: layer  # it stays so after `model.train()`
        if self._is_reference:
            self._save("weights", {name: weight.detach() for name, weight in self._weights()})
        if any(weight.dtype in (torch.bfloat16, torch.float16) for _, weight in self._weights()):
            self.outcome.tolerance = REDUCED

    def on_before_training_step(self, batch: Any) -> None:
        step = self.state.global_step
        before = self.outcome.batches.get(str(step), "")
        self.outcome.batches[str(step)] = digest((before, batch))
        inputs = batch[0] if isinstance(batch, list | tuple) and batch and isinstance(batch[0], Mapping) else batch
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) and "input_ids" in inputs else None
        if isinstance(mask, torch.Tensor) and not bool(mask.bool().all()):  # texts with padding
            self.outcome.tokens = max(self.outcome.tokens, mask.numel())
        self._begin_noise("step", step)

    def on_after_training_step(self) -> None:
        self._end_noise()

    def on_before_validation_step(self) -> None:
        self._begin_noise("evaluation", 0)

    def on_after_validation_step(self) -> None:
        self._end_noise()

    def _begin_noise(self, purpose: str, step: int) -> None:
        seed_step(purpose, step)
        self._noise = SameForAllSamples(purpose, step)
        self._noise.__enter__()  # type: ignore[no-untyped-call]

    def _end_noise(self) -> None:
        if self._noise is not None:
            self._noise.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._noise = None

    def on_before_optimizer_step(self) -> None:
        gradients = {name: weight.grad.detach() for name, weight in self._weights() if weight.grad is not None}
        gradients = {name: one.coalesce().to_dense() if one.is_sparse else one for name, one in gradients.items()}
        if self._is_reference:
            self._save(f"gradients-{self._steps}", gradients)
            return
        expected = self._load(f"gradients-{self._steps}")
        norms = {name: float(one.float().norm()) for name, one in expected.items()}
        floor = _FLOOR * max(norms.values(), default=0.0)
        product = square = rest = 0.0
        for name in {**expected, **gradients}:
            one, other = gradients.get(name), expected.get(name)
            one = torch.zeros_like(other) if one is None else one.float()  # type: ignore[arg-type]
            other = torch.zeros_like(one) if other is None else other.float().to(one.device)
            error = float((one - other).norm()) / max(norms.get(name, 0.0), floor, 1e-12)
            error = error if math.isfinite(error) else math.inf
            product += float((one * other).sum())
            square += float((other * other).sum())
            self.outcome.gradient = max(self.outcome.gradient, error)
            if error > self.outcome.tolerance and self.outcome.first is None:
                self.outcome.first = (self.state.global_step + 1, name, error)
        ratio = product / square if square > 0 else 1.0
        for name, other in expected.items():
            if name in gradients:
                rest += float((gradients[name].float() - ratio * other.float()).norm()) ** 2
        if square > 0 and self.outcome.ratio is None and abs(ratio - 1) > EXACT:
            self.outcome.ratio = ratio if math.sqrt(rest) < EXACT * math.sqrt(square) else math.nan

    def on_after_optimizer_step(self) -> None:
        self._steps += 1
        weights = dict(self._weights())
        if self._is_reference:
            self._save(f"weights-{self._steps}", {name: weight.detach() for name, weight in weights.items()})
            return
        before = self._load("weights" if self._steps == 1 else f"weights-{self._steps - 1}")
        expected, gradients = self._load(f"weights-{self._steps}"), self._load(f"gradients-{self._steps - 1}")
        norms = {name: float(one.float().norm()) for name, one in gradients.items()}
        negligible = _ROUNDING * max(norms.values(), default=0.0)
        for name, weight in weights.items():
            if name not in expected:
                continue
            if norms.get(name, math.inf) <= negligible:  # the bias of attention's keys: 0 but for rounding
                with torch.no_grad():
                    weight.copy_(expected[name])
                continue
            other = expected[name].float()
            own = weight.detach().float().cpu()
            # Weighted by the gradient: where that is 0 but for rounding, Adam makes a step of either sign.
            matters = gradients[name].float().abs() if name in gradients else torch.ones_like(other)
            eps = torch.finfo(expected[name].dtype).eps
            moved = float((matters * (other - before[name].float()).abs()).sum())
            off = float((matters * ((own - other).abs() - 4 * eps * other.abs()).clamp(min=0)).sum())
            error = off / moved if moved > 0 else float(off > 0)
            self.outcome.weight = max(self.outcome.weight, error)
            if error > 10 * self.outcome.tolerance and self.outcome.first_weight is None:
                self.outcome.first_weight = (self.state.global_step + 1, name, error)
            with torch.no_grad():
                weight.copy_(expected[name])

    def on_log(self, values: Mapping[str, float], step: int) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
        self.outcome.values.setdefault(str(step), {}).update(numbers)

    def on_evaluation_end(self, metrics: Mapping[str, Any]) -> None:
        self.outcome.metrics.append({name: float(value) for name, value in metrics.items()})

    def on_fit_end(self) -> None:
        run = self.trainer.run
        owners = {"module": self.module, **{f"callback {type(one).__name__}": one for one in run.callbacks}}
        owners.pop(f"callback {type(self).__name__}", None)
        dataset = getattr(run.train_loader.source.dataloader, "dataset", None)
        owners["data set"] = getattr(dataset, "dataset", dataset)
        self.outcome.attributes = {name: digest_attributes(owner) for name, owner in owners.items()}

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        model = self.trainer.run.unwrapped_model
        every = model.named_parameters()
        return [(name, one) for name, one in every if one.is_floating_point() and type(one.data) is torch.Tensor]

    def _save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(
            {key: one.cpu().clone().contiguous() for key, one in tensors.items()}, self._folder / f"{name}.safetensors"
        )

    def _load(self, name: str) -> dict[str, torch.Tensor]:
        path = self._folder / f"{name}.safetensors"
        if not path.exists():
            return {}
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
