"""The user's contract: what a module defines, and what it finds in itself during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from inspect import signature
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from accmt.errors import ArgumentError, DataError, ModuleContractError, explain, nearest

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from accmt.metrics.averages import LoggedValues
    from accmt.options import HyperParameters
    from accmt.protocols import CallbackProtocol, Data, TrainerProtocol
    from accmt.state import TrainingState
    from accmt.tracking.media import MediaLog


# ---- What a module logs besides its losses.


_OF_LIGHTNING: Mapping[str, str] = {
    "add_dataloader_idx": "leave it out: the name of the validation set is added where there are several",
    "batch_size": 'return {"loss": loss, "weight": weight}, or define get_batch_size',
    "enable_graph": "leave it out: no graph is kept",
    "metric_attribute": "leave it out: metrics are the Trainer's, Trainer(metrics=[...])",
    "on_epoch": "leave it out: Trainer(log_every=-1) makes one row of each epoch",
    "on_step": "leave it out: Trainer(log_every=10) says when there is a row, and instant=True makes one now",
    "rank_zero_only": "leave it out: a value may be logged on some processes only",
    "reduce_fx": 'write reduction="sum", or leave it out for the mean',
    "sync_dist": "leave it out: values are means over all processes",
    "sync_dist_group": "leave it out: values are means over all processes",
}
_KEYWORDS = ("value", "step", "reduction", "instant", "prog_bar", "logger")


def _reject_keywords(name: Any, others: Mapping[str, Any]) -> None:
    for keyword in others:
        where, expected = f"log({name!r}, {keyword}=...)", f"a keyword of log: {', '.join(_KEYWORDS)}"
        is_known = keyword in _OF_LIGHTNING
        got = "a keyword of Lightning's log" if is_known else "a keyword that log does not have"
        do = _OF_LIGHTNING.get(keyword) or f"did you mean {nearest(keyword, _KEYWORDS, cutoff=0)}?"
        raise ArgumentError(explain(where, got, expected, do))


class Logs(Protocol):
    """Where a run puts what its module logs."""

    of_training: LoggedValues
    of_evaluation: LoggedValues
    shown: dict[str, float]
    logged: dict[str, float]

    def log(
        self,
        name: str | Mapping[str, Any],
        value: Any,
        step: int | None,
        reduction: str,
        *,
        instant: bool,
        prog_bar: bool,
        logger: bool,
    ) -> None: ...
    def media(self, method: str) -> MediaLog | None: ...
    def of_bar(self, row: Mapping[str, float]) -> dict[str, float]: ...
    def of_trackers(self, row: Mapping[str, float]) -> dict[str, float]: ...


class LogsValues:
    """The part of `AcceleratorModule` that logs.

    Attributes:
        logs: During a run: what was logged, and the newest rows.
    """

    logs: Logs
    state: TrainingState

    def log(
        self,
        name: str | Mapping[str, float | Tensor],
        value: float | Tensor | None = None,
        step: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        *,
        instant: bool = False,
        prog_bar: bool = False,
        logger: bool = True,
        **others: Any,
    ) -> None:
        """Log a value: in training it comes with the next row, in evaluation with its results.

        It is averaged over the batches that logged it, on all processes, each with the weight of its batch. It may be
        logged in some batches or on some processes only. Nothing waits for the device, and no graph is kept.

        Args:
            name: Its name; or values by name, and no `value`.
            value: A number, or a tensor of one element; it stays as it is.
            step: The step of the row, where `instant`; None is the number of optimizer steps.
            reduction: "mean", or "sum" for the sum over batches and processes, whatever they weigh.
            instant: Whether this process makes a row of its own of the value, now. That waits for the device.
            prog_bar: Whether the progress bar shows it.
            logger: Whether trackers and `history.jsonl` get it.
            **others: None; for those of Lightning's `log` the error says what to write here.

        Raises:
            ModuleContractError: The value is not one number, the name is taken, or nothing is running.
            ArgumentError: There is no such reduction or keyword, or a `step` without `instant`.
        """
        _reject_keywords(name, others)
        self._require_run(f"log({name!r}, ...)")
        self.logs.log(name, value, step, reduction, instant=instant, prog_bar=prog_bar, logger=logger)

    def log_dict(self, values: Mapping[str, float | Tensor], **options: Any) -> None:
        """Log several values.

        Args:
            values: Values by name.
            **options: As for `log`.
        """
        self.log(values, **options)

    def log_images(self, images: Mapping[str, Any], step: int | None = None) -> None:
        """Log images: they are written into the run folder, and trackers that show images get them from there.

        Shapes: tensors `[images, channels, height, width]`, NumPy arrays `[images, height, width, channels]`, with 1, 3
        or 4 channels or without that dimension; one image without the first.

        Args:
            images: By name: a tensor, an array, an image of Pillow, or a list of such images, which may differ in
                size. Bytes (uint8), or floats from 0 to 1; what is outside is cut off, with a warning.
            step: The optimizer step that they belong to; None is the number of optimizer steps.

        Raises:
            ArgumentError: A shape, a type or a name is wrong.
            MissingPackageError: Pillow is not installed.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_images")
        if media is not None:
            media.log_images(images, self._step(step))

    def log_table(
        self, name: str, columns: Sequence[str], data: Iterable[Iterable[Any]], step: int | None = None
    ) -> None:
        """Log a table, which goes where images do.

        Args:
            name: Its name.
            columns: The names of the columns.
            data: The rows: strings, numbers, bools or None; other values are logged as text.
            step: As in `log_images`.

        Raises:
            ArgumentError: A row does not fit the columns, or a name is wrong.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_table")
        if media is not None:
            media.log_table(name, columns, data, self._step(step))

    def log_artifact(self, path: str | PathLike[str], step: int | None = None) -> None:
        """Log a copy of a file, which goes where images do.

        Args:
            path: The file; it may change or go afterwards.
            step: As in `log_images`.

        Raises:
            ArgumentError: It is not there, or a folder.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_artifact")
        if media is not None:
            media.log_artifact(path, self._step(step))

    def log_artifacts(self, folder: str | PathLike[str], step: int | None = None) -> None:
        """Log copies of all files of a folder, under the folder's name.

        Args:
            folder: The folder.
            step: As in `log_images`.

        Raises:
            ArgumentError: It is not there, a file, or one that the run folder lies in.
            ModuleContractError: There was no run yet.

        Processes: main only; the others return at once.
        """
        media = self._media("log_artifacts")
        if media is not None:
            media.log_artifacts(folder, self._step(step))

    def _step(self, step: int | None) -> int:
        return self.state.global_step if step is None else step

    def _media(self, method: str) -> MediaLog | None:
        self._require_run(method)
        return self.logs.media(method)

    def _require_run(self, where: str) -> None:
        if "logs" not in self.__dict__:
            raise ModuleContractError(explain(where, "no run", "a call during a run", "log in a step"))


_OF_RUN = ("trainer", "state", "accelerator", "optimizer", "scheduler", "tracker", "logs", "manual_steps")
"""What a run lends a module."""

Step = Callable[[Any, Any], Any]
"""A function of a batch and the Trainer; `Any` lets a user annotate the second as `accmt.Trainer`."""


class AcceleratorModule(LogsValues):
    """A model and how it is trained. Derive from it, set `self.model`, and define `training_step`.

    No `super().__init__()` is needed. Any hook of the table (`accmt.callbacks.HOOKS`) may be defined on the module too.

    Examples:
        >>> class Classifier(AcceleratorModule):
        ...     def __init__(self, model):
        ...         self.model = model
        ...     def training_step(self, batch):
        ...         inputs, labels = batch
        ...         return torch.nn.functional.cross_entropy(self.model(inputs), labels)
        ...     validation_step = training_step

    Attributes:
        model: The `nn.Module` that is trained. During training it is the wrapped one that reduces gradients over
            processes; afterwards it is yours again.
        teacher: A second `nn.Module` that is never trained.
        processor: Tokenizer or other processor that is saved beside a transformers model.
        optimizer: During a run: the optimizer.
        scheduler: During a run: the scheduler, or None.
        state: During a run: the counters, `TrainingState`.
        trainer: During a run: the Trainer.
        accelerator: During a run: the `accelerate.Accelerator`.
        device: During a run: where model and batches are.
        tracker: During a run: the first tracker, or None.
        collate_fn: Makes a batch of samples; defined here it wins over the Trainer's.
        collate_fn_train: The same for training data only.
        collate_fn_val: The same for validation data only.
        uses_manual_optimization: Whether `training_step` runs the optimization itself; derive from
            `ExtendedAcceleratorModule` for that.
    """

    uses_manual_optimization: ClassVar[bool] = False

    model: nn.Module
    teacher: nn.Module | None = None
    processor: Any = None
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    state: TrainingState
    trainer: TrainerProtocol
    accelerator: Accelerator
    device: torch.device
    tracker: GeneralTracker | None

    collate_fn: Callable[..., Any] | None = None
    collate_fn_train: Callable[..., Any] | None = None
    collate_fn_val: Callable[..., Any] | None = None

    def training_step(self, batch: Any) -> Any:
        """Compute the loss of one batch.

        May take `batch_idx`, `state` and `status_dict` as further parameters.

        Args:
            batch: What the collate function made, on the device.

        Returns:
            The mean loss, a tensor of shape `[]`; or a dict with it under "loss", optionally its weight under "weight"
            (such as the number of target tokens), and further scalars that are logged.
        """
        return self.step(batch)

    def validation_step(self, batch: Any) -> Any:
        """Compute the loss, and predictions for metrics, of one validation batch; gradients are off.

        May take the validation set's key as first parameter, `validation_step(self, key, batch)`, and the further
        parameters of `training_step`.

        Returns:
            The mean loss; or a dict with "loss", further scalars, and `(predictions, references)` under names of
            metrics.
        """
        return self.step(batch)

    def step(self, batch: Any) -> Any:
        """Compute what training and validation have in common; used where one of their steps is not defined.

        Raises:
            NotImplementedError: It is not defined either.
        """
        raise NotImplementedError("define training_step(self, batch), or step(self, batch) for training and validation")

    def test_step(self, batch: Any) -> Any:
        """Compute the results of one test batch, as `validation_step` does, which stands in its place unless defined.

        Its loss is reported as `test_loss`.
        """
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Compute the predictions of one batch; gradients are off. Unless defined they are what `forward` makes of it.

        May take the key and the further parameters of `validation_step`.

        Returns:
            One prediction for each sample: a tensor `[samples, ...]`, a list, or a dict or tuple of these.
        """
        return self(batch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; `module(...)` calls this."""
        return self.model(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`."""
        return self.forward(*args, **kwargs)

    def configure_model(self) -> None:
        """Make `self.model` where `__init__` has not: at the start of a run, when the processes know one another.

        A model that is to be sharded need not be whole on any process then: `AcceleratorModule.from_hf` with
        `in_fit=True` does this, and so do `from_pretrained(..., distributed_config=...)` and `fully_shard` in here.
        A model from scratch is built on the meta device in here, and filled when it is sharded.

        Processes: all.
        """

    def get_optimizer(self) -> torch.optim.Optimizer | None:
        """Return an optimizer of your own; None takes the hyper-parameters'.

        An `ExtendedAcceleratorModule` may return a list of several, which it steps itself.
        """
        return None

    def get_scheduler(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int) -> LRScheduler | None:
        """Return a scheduler of your own, which is stepped once per optimizer step; None takes the hyper-parameters'.

        An `ExtendedAcceleratorModule` with several optimizers may return a list: a scheduler for each.

        Args:
            optimizer: The optimizer; several are one `ChainedOptimizer`, whose `optimizers` they are.
            steps_per_epoch: Optimizer steps of an epoch in this run.
            epochs: Epochs of this run.
        """
        return None

    def get_train_dataloader(self) -> Data | None:
        """Return training data that are used instead of `fit`'s; may take those as parameter `dataset`."""
        return None

    def get_validation_dataloader(self) -> Data | None:
        """Return validation data that are used instead of `fit`'s; may take those as parameter `dataset`."""
        return None

    def get_test_dataloader(self) -> Data | None:
        """Return test data that are used instead of `test`'s; may take those as parameter `dataset`."""
        return None

    def get_predict_dataloader(self) -> Data | None:
        """Return data that are predicted instead of `predict`'s; may take those as parameter `dataset`."""
        return None

    def get_callbacks(self) -> CallbackProtocol | Sequence[CallbackProtocol] | None:
        """Return callbacks to add; one replaces the Trainer's callbacks of the same class."""
        return None

    def get_batch_size(self, batch: Any) -> int | None:
        """Return the number of samples in a batch; None lets accmt count them."""
        return None

    def length_of(self, sample: Any) -> int | None:
        """Return the tokens of a sample as it is read, for `max_tokens` in the hyper-parameters.

        None lets accmt look them up: the sample's entry "length", else the length of its "input_ids".
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive a crash besides model, optimizer and scheduler: JSON values and tensors.

        A checkpoint holds that of each process, where they differ. A run on another number of processes begins with
        that of the main one.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned, on every process, before `on_resume`."""

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model without the wrapper that reduces gradients: for `generate`, `config` and the like."""
        if "accelerator" not in self.__dict__:
            return self.model
        model: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return model

    @property
    def status_dict(self) -> dict[str, Any]:
        """The counters of the run as a dict."""
        return self.state.state_dict()

    def freeze(self, *parts: nn.Module) -> None:
        """Stop training parts of the model: their parameters get no gradients and stay as they are.

        Before `fit`, or between two optimizer steps of it, on every process.

        Dropout and the running statistics of batch norm continue; `part.eval()` in `training_step` stops them.

        Args:
            *parts: Modules of the model; none means all of it.
        """
        for part in parts or (self.model,):
            part.requires_grad_(requires_grad=False)

    def unfreeze(self, *parts: nn.Module) -> None:
        """Train parts of the model again; none means all of it."""
        for part in parts or (self.model,):
            part.requires_grad_(requires_grad=True)

    def load_weights(self, path: str | PathLike[str], *, strict: bool = True) -> None:
        """Load the weights of a model folder into `self.model`.

        Args:
            path: A folder that a Trainer saved, or one of `save_pretrained`. Into a PEFT model its adapters are loaded.
            strict: Whether every weight must be there and fit.

        Raises:
            WeightsError: A file, a name or a shape is missing or does not fit; names and shapes are in the message.
        """
        from accmt.huggingface import load_model_weights

        load_model_weights(self.unwrapped_model, Path(path), strict=strict)

    @classmethod
    def from_hf(
        cls,
        path: str | PathLike[str],
        type: str | type[Any] | None = None,  # noqa: A002
        *,
        in_fit: bool = False,
        **kwargs: Any,
    ) -> AcceleratorModule:
        """Make a module of a transformers model whose forward returns a loss.

        Args:
            path: A model folder, or a name on the hub. From the folder of an adapter the model under it is built, too.
            type: A transformers class or its name, such as "AutoModelForSequenceClassification"; None is AutoModel.
            in_fit: Whether the model is built at the start of a run instead of now. Where FSDP2 shards it, each process
                then reads its own part of the weights.
            **kwargs: For `from_pretrained`, such as `num_labels`; `processor=` is saved beside the model.

        Raises:
            ArgumentError: `type` is no transformers class; the message names the nearest.
            ModuleContractError: `path` is something else, such as a model.
        """
        from accmt.huggingface import load_pretrained

        processor = kwargs.pop("processor", None)
        module = HuggingFaceModule(partial(load_pretrained, path, type, **kwargs), processor)
        if not in_fit:
            module.configure_model()
        return module

    @classmethod
    def from_hps(
        cls,
        hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters,
        *,
        in_fit: bool = False,
        processor: Any = None,
    ) -> AcceleratorModule:
        """Make a module of the transformers model that the section `model` of hyper-parameters describes.

        Args:
            hps_config: The hyper-parameters: a path, a dict or the object.
            in_fit: Whether the model is built at the start of a run instead of now, as in `from_hf`.
            processor: A tokenizer (or the like) that is saved beside the model.

        Raises:
            HyperParameterError: There is no such section, or something in it is wrong.
            MissingPackageError: A package that it asks for is not installed.
        """
        from accmt.options import HyperParameters
        from accmt.registry import addon

        hps = HyperParameters.from_config(hps_config)
        module = HuggingFaceModule(partial(addon("build_from_hps"), hps), processor)
        module.hps = hps
        if not in_fit:
            module.configure_model()
        return module

    @classmethod
    def from_functions(
        cls,
        model: nn.Module,
        train_step: Callable[[Any, Any], Any],
        eval_step: Callable[[Any, Any], Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> AcceleratorModule:
        """Make a module of functions of a batch and the Trainer, in which `trainer.model` is the model to call.

        Args:
            model: The model.
            train_step: Returns what `training_step` does.
            eval_step: Returns what `validation_step` does; None takes `train_step` there, too.
            optim: An optimizer of the model's parameters; None takes the hyper-parameters'.

        Examples:
            >>> def train_step(batch, trainer):
            ...     return {"loss": trainer.model(batch).mean()}
            >>> module = AcceleratorModule.from_functions(nn.Linear(3, 1), train_step)
        """
        return FunctionModule(model, train_step, eval_step, optim)

    def __getattr__(self, name: str) -> Any:
        """Say what a missing attribute is here, where another trainer's module has it."""
        if hasattr(super(), "__getattr__"):  # that of an nn.Module, where the user mixes the two
            return super().__getattr__(name)  # type: ignore[misc]
        if name in _OF_RUN or name == "device":
            do = "use it in a step, or a hook such as on_fit_start; model and batches are moved to the device for you"
            message = explain(f"self.{name}", "there is no run yet, as in __init__", "a run, which lends it", do)
        else:
            from accmt.registry import addon

            message = addon("hint_for_attribute")(self, name)
        raise AttributeError(message, name=name, obj=self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the module without its run, so that loader processes and copies do not drag a run along."""
        return {name: value for name, value in self.__dict__.items() if name not in _OF_RUN}

    def forget_run(self) -> None:
        """Forget what belongs to the last run: its Trainer, optimizer, scheduler and the like."""
        for name in _OF_RUN:
            self.__dict__.pop(name, None)

    def __repr__(self) -> str:
        size = f"{len(self):,} parameters" if isinstance(getattr(self, "model", None), nn.Module) else "no model"
        return f"{type(self).__name__}({size})"

    def __str__(self) -> str:
        return str(self.model)

    def __len__(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __bool__(self) -> bool:
        return True


class ManualSteps(Protocol):
    """What a run gives an `ExtendedAcceleratorModule` to step with."""

    has_gradients: bool

    def backward(self, loss: torch.Tensor, weight: Any = None) -> None: ...
    def step_optimizer(self, *, is_whole: bool = True) -> bool: ...
    def step_scheduler(self, scheduler: Any = None) -> None: ...
    def zero_grad(self) -> None: ...


class ExtendedAcceleratorModule(AcceleratorModule):
    """A module whose `training_step` runs the optimization itself: any number of backwards and steps for a batch.

    `step` is no logic shared by training and validation here: it advances optimizer and scheduler.

    Examples:
        >>> class Manual(ExtendedAcceleratorModule):
        ...     def __init__(self, model):
        ...         self.model = model
        ...     def training_step(self, batch):
        ...         loss = self.model(batch).mean()
        ...         self.backward(loss)
        ...         self.step()
        ...         self.zero_grad()
        ...         return loss
    """

    uses_manual_optimization = True
    manual_steps: ManualSteps

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Add the gradients of a batch's mean loss.

        Processes: collective.

        Args:
            loss: The mean loss of this process's batch.
            weight: What it weighs, such as its target tokens; None is its samples, or the target tokens of a loss that
                a transformers model computed.
        """
        self.manual_steps.backward(loss, weight)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers: those that `get_optimizer` returned or a `ChainedOptimizer` holds, or the only one."""
        from accmt.optimization import ChainedOptimizer

        return list(self.optimizer.optimizers) if isinstance(self.optimizer, ChainedOptimizer) else [self.optimizer]

    @contextmanager
    def toggled_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Let only the parameters of one optimizer have gradients meanwhile, such as those of a GAN's generator."""
        others = [parameter for parameter in _parameters_beside(self, optimizer) if parameter.requires_grad]
        for parameter in others:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's own signature
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)  # noqa: FBT003 - as above

    def step_optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Clip the gradients as the Trainer says, and let the optimizer step.

        Args:
            optimizer: The one of `optimizers()` that steps; None steps all. Gradients of the others stay as they are.

        Returns:
            Whether it really stepped; not where the gradient scaler met inf.
        """
        others = [] if optimizer is None else _parameters_beside(self, optimizer)
        gradients = [parameter.grad for parameter in others]
        for parameter in others:
            parameter.grad = None  # what has no gradient is neither clipped nor stepped
        try:
            return self.manual_steps.step_optimizer(is_whole=all(gradient is None for gradient in gradients))
        finally:
            for parameter, gradient in zip(others, gradients, strict=True):
                parameter.grad = gradient

    def step_scheduler(self, scheduler: LRScheduler | None = None) -> None:
        """Advance the scheduler by one step, if there is one.

        Args:
            scheduler: The one of `schedulers()` that advances; None advances all.
        """
        self.manual_steps.step_scheduler(scheduler)

    def schedulers(self) -> list[LRScheduler]:
        """Return the schedulers: those that `get_scheduler` returned, or the only one; none without."""
        several = getattr(self.scheduler, "schedulers", None)
        return list(several) if several else [self.scheduler] if self.scheduler is not None else []

    def step(self, batch: Any = None) -> None:
        """Let the optimizer step and, if it did, advance the scheduler."""
        if self.step_optimizer():
            self.step_scheduler()

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self.manual_steps.zero_grad()


def _parameters_beside(module: ExtendedAcceleratorModule, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all optimizers but one."""
    optimizers = module.optimizers()
    if not any(one is optimizer for one in optimizers):
        got, do = f"a {type(optimizer).__name__} that the run does not have", "take it from self.optimizers()"
        raise ModuleContractError(explain("an optimizer", got, "one of self.optimizers()", do))
    others = [one for one in optimizers if one is not optimizer]
    return [parameter for one in others for group in one.param_groups for parameter in group["params"]]


def defines(module: AcceleratorModule, name: str) -> bool:
    """Return whether the user's class or object defines `name` itself."""
    return getattr(type(module), name) is not getattr(AcceleratorModule, name) or name in vars(module)


class FunctionModule(AcceleratorModule):
    """A model with functions of a batch and the Trainer in the place of steps.

    Args:
        model: The model.
        train_step: Returns what `training_step` does.
        eval_step: Returns what `validation_step` does; None takes `train_step` there, too.
        optim: An optimizer of the model's parameters, with which every run begins in its first state; None takes the
            hyper-parameters'.
    """

    def __init__(
        self,
        model: nn.Module,
        train_step: Step,
        eval_step: Step | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self._train_step = train_step
        self._eval_step = train_step if eval_step is None else eval_step
        self._optim = optim
        self._first_optim_state = None if optim is None else deepcopy(optim.state_dict())

    def training_step(self, batch: Any) -> Any:
        """Return what the function for training makes of the batch."""
        return self._train_step(batch, self.trainer)

    def validation_step(self, batch: Any) -> Any:
        """Return what the function for evaluation makes of the batch."""
        return self._eval_step(batch, self.trainer)

    def get_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the user's optimizer, without what earlier runs and `tune` have left in it."""
        if self._optim is not None and self._first_optim_state is not None:
            self._optim.load_state_dict(self._first_optim_state)
        return self._optim


class HuggingFaceModule(AcceleratorModule):
    """A transformers model that computes its own loss.

    Args:
        model: The model, or what builds it at the start of a run.
        processor: Tokenizer or other processor that is saved beside it.

    Attributes:
        metric_names: The metrics of each set that is evaluated, as a run lets it know.
        hps: The hyper-parameters that describe the model; None where nothing does.
    """

    metric_names: Mapping[str, Sequence[str]] = MappingProxyType({})
    hps: HyperParameters | None = None

    def __init__(self, model: nn.Module | Callable[[], nn.Module], processor: Any = None) -> None:
        self.processor = processor
        if isinstance(model, nn.Module):
            self.model = model
        else:
            self._build = model

    def configure_model(self) -> None:
        """Build the model."""
        self.model = self._build()

    def step(self, batch: Any) -> Any:
        """Return the loss that the model computes of a batch with labels.

        Raises:
            ModuleContractError: The model computes none: it has no head for a task, or the batch has no labels.
            DataError: The model cannot compute, and the batch has lists where it needs tensors.
        """
        return self._read_loss(self._call_model(batch), batch)

    def validation_step(self, batch: Any, key: str = "") -> Any:
        """Return the loss, and for each metric of the set what the model says of a sample, with the sample's label.

        Where labels are of tokens, a metric would have to know which of them count: it needs a module of its own.
        """
        names, labels = self.metric_names.get(key), batch.get("labels")
        if not names or not isinstance(labels, torch.Tensor) or labels.ndim != 1:
            return self.step(batch)
        outputs = self._call_model(batch)
        result = self._read_loss(outputs, batch)
        entries = result if isinstance(result, dict) else {"loss": result}
        logits = outputs.logits.squeeze(-1)  # of one number for each sample in a regression
        return {**entries, **dict.fromkeys(names, (logits, labels))}

    def _call_model(self, batch: Any) -> Any:
        try:
            return self.model(**batch)
        except (AttributeError, TypeError, ValueError) as error:
            lists = {name: value for name, value in batch.items() if isinstance(value, list)}
            if lists:
                raise _explain_lists(lists) from error
            raise

    def _read_loss(self, outputs: Any, batch: Any) -> Any:
        loss = getattr(outputs, "loss", None)
        if loss is None:
            raise _explain_missing_loss(self.unwrapped_model, batch)
        from accmt.huggingface.loss_targets import count_targets

        weight = count_targets(self.unwrapped_model, batch)
        return loss if weight is None else {"loss": loss, "weight": weight}

    def predict_step(self, batch: Any) -> Any:
        """Return the logits, or by name what else the model computes; a batch may have labels."""
        outputs = self.model(**{name: value for name, value in batch.items() if name != "labels"})
        named = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        return named.get("logits", named)


def _explain_lists(lists: dict[str, list[Any]]) -> DataError:
    """Return what to do about what torch makes of text, and of lists of numbers: it turns rows into columns."""
    got, expected = f"lists under {', '.join(map(repr, lists))}", "a tensor under each name"
    texts = [name for name, values in lists.items() if values and isinstance(values[0], str)]
    steps = [f"dataset.remove_columns({texts})"] if texts else []
    steps += ["Trainer(collate_fn=DataCollatorWithPadding(tokenizer))"] if len(texts) < len(lists) else []
    do = f"write {', and '.join(steps)}"
    return DataError(explain("a batch for the transformers model", got, expected, do))


def _explain_missing_loss(model: nn.Module, batch: Any) -> ModuleContractError:
    expected = "a model with a head that computes its loss"
    do = 'fit((path, "AutoModelForSequenceClassification"), ...), or `type:` in the section `model` of the YAML, with '
    do += '"labels" in each batch'
    if "labels" not in batch and "labels" in signature(model.forward).parameters:
        expected = '"labels" in each batch: the model computes its loss of them'
        do = 'add the targets to the dataset as "labels", such as by dataset.rename_column("label", "labels")'
    where, got = f"the transformers model {type(model).__name__}", f"no loss from a batch with {sorted(batch)}"
    return ModuleContractError(explain(where, got, expected, do))
