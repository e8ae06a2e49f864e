"""Evaluates and predicts without training: builds no optimizer, scheduler or tracker, and restores all state."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from accmt.addons.averaging import WeightAverage
from accmt.addons.prediction import predict
from accmt.callbacks.progress import draw_batches
from accmt.checkpoint.contents import load_state
from accmt.data import Loader, MicroBatch, draw_seed
from accmt.engine.accelerator import build_accelerator
from accmt.engine.base import Engine
from accmt.engine.choice import choose_engine
from accmt.errors import ArgumentError, NoCheckpointError, fail
from accmt.features.listed import all_features
from accmt.files import dumps, require_writable_folder, write_text
from accmt.loaders import Evaluation, UserData, build_evaluation_loader, end_workers
from accmt.loop.evaluation import call_hooks, evaluate, in_evaluation_mode, reported
from accmt.messages import say
from accmt.module import AcceleratorModule, defines
from accmt.options import Settings
from accmt.processes import broadcast_object, is_main_process, num_processes, run_on_main_process, serving
from accmt.registry import addon
from accmt.run import EvaluationRun, Run
from accmt.run.resume import find_checkpoint, find_newest
from accmt.run.shutdown import watching_evaluation
from accmt.saving.weights import find_entry
from accmt.setup.build import connect_hooks, gather_callbacks, make_watch
from accmt.setup.model import attach_evaluation, configure_model, is_prepared, prepare_for_evaluation
from accmt.setup.torch_flags import working
from accmt.setup.user_methods import adapt_validation_step
from accmt.sharded_tensors import is_dtensor
from accmt.state import TrainingState

if TYPE_CHECKING:
    from accelerate import Accelerator

    from accmt import Trainer
    from accmt.checks import Facts


# ---- Saved weights that replace the module's during an evaluation.


CheckpointPath = str | PathLike[str]

_SHOWN = 4


@contextmanager
def using_weights(
    module: AcceleratorModule, settings: Settings, ckpt_path: CheckpointPath | None, function: Evaluation
) -> Iterator[None]:
    """Load saved weights into the module's model, and restore its weights afterwards.

    Processes: collective.

    Args:
        module: The module.
        settings: The Trainer's settings, with the folders of models and checkpoints.
        ckpt_path: "best" for the model folder, "last" for the newest checkpoint (or `<model_path>/last`), or the path
            of a model folder or checkpoint; None keeps the weights.
        function: The Trainer's method, for messages.

    Raises:
        NoCheckpointError: There are no weights.
        WeightsError: The weights in a model folder are incomplete, or for another model.
        CheckpointError: The checkpoint is damaged, or for another model.
    """
    if ckpt_path is None:
        yield
        return
    model = module.unwrapped_model
    folder = _find(settings, ckpt_path, function)
    # The weights in training are needed again, and may fill the device twice: copies are on the host.
    trained = {name: _copy(value) for name, value in model.state_dict().items()}
    try:
        _load(module, model, folder)
        say(f"{function}: using the weights in {folder}")
        yield
    finally:
        model.load_state_dict(trained)


def _copy(value: Any) -> Any:
    if is_dtensor(value):  # only the local shard, so it stays on the device
        return value.detach().clone()
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    # `get_extra_state` of a layer may return anything.
    return copy.deepcopy(value)


def _load(module: AcceleratorModule, model: nn.Module, folder: Path) -> None:
    # A checkpoint has weights in another form, also of sharded models.
    if _has_weights(folder):
        module.load_weights(folder)
    else:
        load_state(model, None, folder)


def _find(settings: Settings, ckpt_path: CheckpointPath, function: Evaluation) -> Path:
    """Return a model folder, or a checkpoint."""
    where = f"{function}(ckpt_path={str(ckpt_path)!r})"
    if ckpt_path == "last":
        if settings.checkpoints.every is not None:
            newest = find_newest(settings)
            if newest is not None:
                return newest
        # A run without checkpoints may have saved its last model.
        saved_last = settings.model_folder / "last"
        if run_on_main_process(partial(_has_weights, saved_last)):
            return saved_last
        return _reject_path(where, saved_last)
    folder = settings.model_folder if ckpt_path == "best" else Path(ckpt_path)
    if run_on_main_process(partial(_has_weights, folder)):
        return folder
    if ckpt_path != "best":
        with suppress(NoCheckpointError):
            return find_checkpoint(folder).folder
    return _reject_path(where, folder)


def _has_weights(folder: Path) -> bool:
    return find_entry(folder) is not None


def _reject_path(where: str, folder: Path) -> NoReturn:
    """Raise an error about missing weights that suggests where there are some.

    Raises:
        NoCheckpointError: Always.
    """
    subfolders = []
    if folder.is_dir():
        subfolders = [path for path in folder.iterdir() if path.is_dir()]
    near = sorted(str(entry.parent) for entry in map(find_entry, subfolders) if entry is not None)
    do = "check the path, and model_saving"
    if near:
        do = f"ckpt_path={' or '.join(map(repr, near[:_SHOWN]))}"
    raise fail(
        NoCheckpointError, where, got=f"no weights in {folder}", expected="a model folder, or a checkpoint", do=do
    )


_STEPS: dict[Evaluation, str] = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A call of `validate`, `test` or `predict`.

    Attributes:
        trainer: The Trainer.
        function: Its method.
        module: The module.
        user_data: The data passed to the method, or those of the last `fit`.
        ckpt_path: As in `using_weights`.
        last_run: The Trainer's current or last run of the same module, or None.
        verbose: Whether to print results.
    """

    trainer: Trainer
    function: Evaluation
    module: AcceleratorModule
    user_data: UserData
    ckpt_path: CheckpointPath | None
    last_run: Run | None
    verbose: bool

    @property
    def draws_progress(self) -> bool | None:
        """Whether to draw a bar; None depends on the terminal. During training, the run's bar is used."""
        running = self.trainer.settings.running
        # Two bars in one terminal line overwrite each other.
        if self.current_run is not None or not is_main_process():
            return False
        if running.verbose and self.verbose:
            return running.enable_progress_bar
        return running.enable_progress_bar or False

    @property
    def current_run(self) -> Run | None:
        """The run that is currently training the module."""
        if self.last_run is not None and is_prepared(self.module):
            return self.last_run
        return None


def _find_request(
    trainer: Trainer,
    function: Evaluation,
    module: AcceleratorModule | None,
    dataset: Any,
    datamodule: Any,
    ckpt_path: CheckpointPath | None,
    *,
    verbose: bool,
) -> Request:
    """Return the request for a call, with missing arguments taken from the last `fit`.

    Raises:
        ArgumentError: There is neither a module nor an earlier `fit`, or there are both data and a datamodule.
    """
    user_data, last = UserData(function, {function: dataset}, datamodule), trainer._run
    if module is None and last is not None:
        module = last.module
    if module is None:
        do = f"trainer.{function}(module, ...), or fit first"
        raise fail(ArgumentError, function, got="no module, and no earlier run", expected="a module", do=do)
    # An evaluation within one would reset its sums, and mix both results.
    if trainer.state.now.in_evaluation_batches:
        got = "a call during another evaluation, whose results it would change"
        expected = "a call in a hook between evaluations, such as on_evaluation_end, on all processes"
        do = f"call trainer.{function} in on_evaluation_start, on_evaluation_end, on_update_end or on_epoch_end"
        raise fail(ArgumentError, f"trainer.{function}", got=got, expected=expected, do=do)
    trainer._evaluated = module
    if not user_data.has_any and trainer._user_data is not None:
        user_data = trainer._user_data
    # Its weights and data are those of another module.
    if last is not None and last.module is not module:
        last = None
    return Request(
        trainer=trainer,
        function=function,
        module=module,
        user_data=user_data,
        ckpt_path=ckpt_path,
        last_run=last,
        verbose=verbose,
    )


def evaluate_alone(
    trainer: Trainer,
    function: Evaluation,
    module: AcceleratorModule | None,
    dataset: Any,
    datamodule: Any,
    ckpt_path: CheckpointPath | None,
    *,
    results_output: str | PathLike[str] | None,
    verbose: bool,
) -> dict[str, float]:
    """Validate or test, call the hooks, and print and write the results: `Trainer.validate` and `test`.

    Processes: collective.

    Returns:
        Losses and metrics by name; with several sets `<name>__<key>`. Empty if the data are limited to 0 batches.

    Raises:
        AccmtError: An error in module, data, weights or metrics.
    """
    request = _find_request(trainer, function, module, dataset, datamodule, ckpt_path, verbose=verbose)
    output = None if results_output is None else Path(results_output).absolute()
    with serving(f"trainer.{request.function}"), working(request.trainer.settings.running):
        if output is not None:
            require_writable_folder(output.parent, "results_output")
        with _open(request) as run, in_evaluation_mode(run.unwrapped_model):
            call_hooks(run.hooks.on_evaluation_start)
            results = evaluate(run, request.function)
            call_hooks(run.hooks.on_evaluation_end, metrics=results)
        # Outside a run, no log is open.
        if results and request.current_run is not None:
            for hook in request.current_run.hooks.on_log:
                hook(values=reported(run, results), step=request.trainer.state.global_step)
        if request.verbose:
            values = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
            say(f"{request.function}: {values or 'nothing: the data are limited to 0 batches'}")
        if output is not None:
            run_on_main_process(lambda: _write(output, results))
    return results


def _write(path: Path, results: dict[str, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, dumps(results, indent=2) + "\n")


def predict_alone(
    trainer: Trainer,
    module: AcceleratorModule | None,
    dataset: Any,
    datamodule: Any,
    ckpt_path: CheckpointPath | None,
    *,
    keeps: bool,
) -> Any:
    """Predict like `accmt.addons.prediction.predict`; for a single set, return only its predictions.

    Processes: collective.

    Raises:
        AccmtError: An error in module, data, weights or step.
    """
    request = _find_request(trainer, "predict", module, dataset, datamodule, ckpt_path, verbose=True)
    with serving("trainer.predict"), working(request.trainer.settings.running), _open(request) as run:
        predictions = predict(run, keeps=keeps)
    if list(predictions) == [""]:
        return predictions[""]
    return predictions


@contextmanager
def _open(request: Request) -> Iterator[EvaluationRun]:
    module, function, settings = request.module, request.function, request.trainer.settings
    if getattr(module, "model", None) is None:
        accelerator = build_accelerator(settings.running)  # the module may access it as `accmt.accelerator`
        configure_model(module, accelerator)
        del accelerator
    addon("check_stage")("evaluation", settings, module=module, function=function)
    training = request.trainer._run
    if training is not None and training.module is not module and is_prepared(training.module):
        expected = "the module in training, while fit runs"  # callbacks work for one module at a time
        do = f"leave `module` out, or use another Trainer: Trainer(...).{function}(module, ...)"
        raise fail(ArgumentError, f"{function}(module)", got="another module", expected=expected, do=do)
    with (
        _working(request.trainer.state, function),
        _lending_engine(request) as engine,
        _taking_data(request, engine.accelerator) as facts,
        using_weights(module, settings, request.ckpt_path, function),
        nullcontext() if request.current_run is None else request.current_run.stepper.evaluating(),
    ):
        run = _build(request, facts, engine)
        dataloaders = [loader.source.dataloader for loader in run.val_loaders.values()]
        request.trainer._dataloaders = {**request.trainer._dataloaders, function: dataloaders}
        try:
            with run.features.running():
                yield run
        finally:
            end_workers(run.val_loaders.values())
            if request.current_run is not None:
                request.current_run.train_loader.source.set_epoch_again()


@contextmanager
def _working(state: TrainingState, function: Evaluation) -> Iterator[None]:
    """Set the state for an evaluation, and restore the training state afterwards."""
    status, counters = dict(vars(state.now)), state.state_dict()
    state.now.fn, state.now.status = function, "running"
    state.num_processes = num_processes()
    state.begin_evaluation()
    try:
        yield
    finally:
        vars(state.now).update(status)
        state.load_state_dict(counters)


@contextmanager
def _lending_engine(request: Request) -> Iterator[Engine]:
    """Prepare the model, unless a run already did, and restore it afterwards."""
    in_work, module, settings = request.current_run, request.module, request.trainer.settings
    if in_work is not None:
        yield in_work.engine
        return
    accelerator = build_accelerator(settings.running)
    watch = make_watch(settings, request.trainer.state, is_listening=False, hang_timeout_s=None)
    with watching_evaluation(watch):
        engine = choose_engine(module, accelerator, settings)
        try:
            prepare_for_evaluation(engine, settings)
            attach_evaluation(request.trainer, module, accelerator, engine.model)
            yield engine
        finally:
            engine.detach()


@contextmanager
def _taking_data(request: Request, accelerator: Accelerator) -> Iterator[Facts]:
    """Find the sets; a datamodule prepares them first and cleans up afterwards."""
    user_data, function, trainer = request.user_data, request.function, request.trainer
    with user_data.ending(function):
        user_data.begin(function, trainer, accelerator)
        known = {"module": request.module, "user_data": user_data, "function": function}
        yield addon("check_stage")("evaluation_sets", trainer.settings, **known)


def _build(request: Request, facts: Facts, engine: Engine) -> EvaluationRun:
    trainer, module, function, last = request.trainer, request.module, request.function, request.last_run
    settings = trainer.settings
    seed, device = _choose_seed(request), engine.accelerator.device
    callbacks = gather_callbacks(trainer, module) if last is None else last.callbacks
    # A feature calls the others.
    acting = [callback for callback in callbacks if not isinstance(callback, WeightAverage)]
    # Other weights have no average.
    averaging = () if last is None or request.ckpt_path is not None else last.callbacks
    return EvaluationRun(
        settings=settings,
        engine=engine,
        accelerator=engine.accelerator,
        module=module,
        model=engine.model,
        unwrapped_model=engine.unwrapped_model,
        validation_step=adapt_validation_step(module, _STEPS[function], facts.metrics),
        val_loaders={name: _build_loader(request, name, engine, data, seed=seed) for name, data in facts.sets.items()},
        metrics=facts.metrics,
        callbacks=averaging,
        hooks=connect_hooks(trainer, module, acting, seed=seed, device=device),
        state=trainer.state,
        seed=seed,
        counts_own_samples=defines(module, "get_batch_size"),
        feature_kinds=all_features(settings, *averaging),
    )


def _build_loader(request: Request, name: str, engine: Engine, data: Any, *, seed: int) -> Loader:
    """Build a loader that shows its progress in a bar."""

    def draw(micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        return draw_batches(
            micro_batches,
            enable=request.draws_progress,
            text=f"{request.function} {name}".strip(),
            total=loader.source.num_micro_batches,
            count=attrgetter("num_finished"),
        )

    settings, function = request.trainer.settings, request.function
    loader = build_evaluation_loader(request.module, data, settings, function, engine, seed=seed, through=draw)
    return loader


def _choose_seed(request: Request) -> int:
    if request.last_run is not None:
        return request.last_run.seed
    seed = request.trainer.settings.running.seed
    if seed is None:
        seed = draw_seed()
    return broadcast_object(seed)
