"""The API for users' modules: the methods they define, and the attributes available during a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import torch
from torch import nn

from accmt.errors import ArgumentError, ModuleContractError, explain, fail, nearest
from accmt.registry import addon

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker
    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    from accmt import Callback, Trainer
    from accmt.options import HyperParameters
    from accmt.state import TrainingState

    Data: TypeAlias = Dataset[Any] | Iterable[Any] | Mapping[str, Any]
    """A dataset, a `datasets` dataset, a stream, a DataLoader, or several of them in a list or dict."""


# ---- Logging of values in addition to losses.


_KEYWORDS = ("value", "step", "reduction", "instant", "prog_bar", "logger")


class LogsValues:
    """The logging methods of `AcceleratorModule`.

    Attributes:
        logs: During a run: the logged values, and the newest rows; a `Logs` of accmt/loop/logging.py.
    """

    logs: Any
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
        **unknown: Any,
    ) -> None:
        """Log a value: during training with the next row, during evaluation with its results.

        It is averaged over the batches that logged it, on all processes, weighted like the batches. You may log it in
        some batches or on some processes only. Logging does not wait for the device, and keeps no graph.

        Args:
            name: Its name; or a dict of values by name, without `value`.
            value: A number, or a tensor with one element; it is not modified.
            step: The step of the row, with `instant`; None is the number of optimizer steps.
            reduction: "mean", or "sum" for the unweighted sum over batches and processes.
            instant: Whether this process writes a separate row with the value now. This waits for the device.
            prog_bar: Whether to show it in the progress bar.
            logger: Whether to send it to trackers and `history.jsonl`.
            **unknown: Not accepted; for keywords of Lightning's `log`, the error suggests what to write.

        Raises:
            ModuleContractError: The value is not a single number, the name is taken, or there is no run.
            ArgumentError: Unknown reduction or keyword, or a `step` without `instant`.
        """
        for keyword in unknown:
            where, expected = f"log({name!r}, {keyword}=...)", f"a keyword of log: {', '.join(_KEYWORDS)}"
            do = addon("hint_for_log")(keyword) or f"did you mean {nearest(keyword, _KEYWORDS, cutoff=0)}?"
            raise fail(ArgumentError, where, got="an unknown keyword", expected=expected, do=do)
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
        """Log images: they are saved in the run folder, and sent from there to trackers that show images.

        Shapes: tensors `[images, channels, height, width]`, NumPy arrays `[images, height, width, channels]`, with 1, 3
        or 4 channels or without that dimension; one image without the first.

        Args:
            images: By name: a tensor, an array, a Pillow image, or a list of images, which may differ in size. Bytes
                (uint8), or floats from 0 to 1; other values are clamped, with a warning.
            step: The optimizer step they belong to; None is the number of optimizer steps.

        Raises:
            ArgumentError: Invalid shape, type or name.
            MissingPackageError: Pillow is not installed.
            ModuleContractError: There has been no run yet.

        Processes: main only; the others return immediately.
        """
        media = self._media("log_images")
        if media is not None:
            media.log_images(images, self._step(step))

    def log_table(
        self, name: str, columns: Sequence[str], data: Iterable[Iterable[Any]], step: int | None = None
    ) -> None:
        """Log a table; it is stored and sent like images.

        Args:
            name: Its name.
            columns: The names of the columns.
            data: The rows: strings, numbers, bools or None; other values are converted to strings.
            step: Like in `log_images`.

        Raises:
            ArgumentError: A row does not match the columns, or a name is invalid.
            ModuleContractError: There has been no run yet.

        Processes: main only; the others return immediately.
        """
        media = self._media("log_table")
        if media is not None:
            media.log_table(name, columns, data, self._step(step))

    def log_artifact(self, path: str | PathLike[str], step: int | None = None) -> None:
        """Log a copy of a file; it is stored and sent like images.

        Args:
            path: The file; you may change or delete it afterwards.
            step: Like in `log_images`.

        Raises:
            ArgumentError: It does not exist, or is a folder.
            ModuleContractError: There has been no run yet.

        Processes: main only; the others return immediately.
        """
        media = self._media("log_artifact")
        if media is not None:
            media.log_artifact(path, self._step(step))

    def log_artifacts(self, folder: str | PathLike[str], step: int | None = None) -> None:
        """Log copies of all files in a folder, under the folder's name.

        Args:
            folder: The folder.
            step: Like in `log_images`.

        Raises:
            ArgumentError: It does not exist, is a file, or contains the run folder.
            ModuleContractError: There has been no run yet.

        Processes: main only; the others return immediately.
        """
        media = self._media("log_artifacts")
        if media is not None:
            media.log_artifacts(folder, self._step(step))

    def _step(self, step: int | None) -> int:
        return self.state.global_step if step is None else step

    def _media(self, method: str) -> Any:
        self._require_run(method)
        return self.logs.media(method)

    def _require_run(self, where: str) -> None:
        if "logs" not in self.__dict__:
            raise fail(ModuleContractError, where, got="no run", expected="a call during a run", do="log in a step")


OF_RUN = ("trainer", "state", "accelerator", "optimizer", "scheduler", "tracker", "logs", "manual_steps")
"""The attributes that a module has only during a run."""

Step = Callable[[Any, Any], Any]
"""A function of a batch and the Trainer; `Any`, so that users can annotate the latter as `accmt.Trainer`."""


class AcceleratorModule(LogsValues):
    """A model and its training logic. Derive from it, set `self.model`, and define `training_step`.

    No `super().__init__()` is needed. You can also define any hook (`accmt.callbacks.HOOKS`) on the module.

    Examples:
        >>> class Classifier(AcceleratorModule):
        ...     def __init__(self, model):
        ...         self.model = model
        ...     def training_step(self, batch):
        ...         inputs, labels = batch
        ...         return torch.nn.functional.cross_entropy(self.model(inputs), labels)
        ...     validation_step = training_step

    Attributes:
        model: The `nn.Module` to train. During training, it is wrapped to reduce gradients over processes; afterwards,
            it is the original again.
        teacher: A second `nn.Module` that is never trained.
        processor: Tokenizer or other processor that is saved with a transformers model.
        optimizer: During a run: the optimizer.
        scheduler: During a run: the scheduler, or None.
        state: During a run: the counters, `TrainingState`.
        trainer: During a run: the Trainer.
        accelerator: During a run: the `accelerate.Accelerator`.
        device: During a run: the device of model and batches.
        tracker: During a run: the first tracker, or None.
        collate_fn: Turns samples into a batch; takes precedence over the Trainer's.
        collate_fn_train: The same for training data only.
        collate_fn_val: The same for validation data only.
        process_state: The names of attributes that differ between processes, such as hidden states that are carried
            over batches: a checkpoint contains each process's, and a run resumes on as many processes.
        uses_manual_optimization: Whether `training_step` calls backward and optimizer itself; derive from
            `ExtendedAcceleratorModule` for this.
        brings_feature: The name of the feature that a run of this module has, for add-ons of accmt.
        wants_sample_losses: During a run that mixes data sets: whether `training_step` may also return the loss of each
            sample as "losses", and their weights as "weights".
        metric_names: The names of the metrics of each evaluated set, which a run sets in a class that declares a
            mapping here: its validation step then returns predictions only for these.
    """

    process_state: tuple[str, ...] = ()
    uses_manual_optimization: ClassVar[bool] = False
    brings_feature: ClassVar[str | None] = None
    wants_sample_losses: bool = False
    metric_names: Mapping[str, Sequence[str]] | None = None

    model: nn.Module
    teacher: nn.Module | None = None
    processor: Any = None
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None
    state: TrainingState
    trainer: Trainer
    accelerator: Accelerator
    device: torch.device
    tracker: GeneralTracker | None

    collate_fn: Callable[..., Any] | None = None
    collate_fn_train: Callable[..., Any] | None = None
    collate_fn_val: Callable[..., Any] | None = None

    def training_step(self, batch: Any) -> Any:
        """Compute the loss of one batch.

        May take the further parameters `batch_idx`, `state` and `status_dict`.

        Args:
            batch: The output of the collate function, on the device.

        Returns:
            The mean loss, a tensor of shape `[]`; or a dict with "loss", optionally its "weight" (such as the number
            of target tokens), and further scalars to log.
        """
        return self.step(batch)

    def validation_step(self, batch: Any) -> Any:
        """Compute the loss of one validation batch, and predictions for metrics; gradients are off.

        May take the validation set's key as the first parameter, `validation_step(self, key, batch)`, and the further
        parameters of `training_step`.

        Returns:
            The mean loss; or a dict with "loss", further scalars, and `(predictions, references)` by metric name.
        """
        return self.step(batch)

    def step(self, batch: Any) -> Any:
        """Shared logic of training and validation; used for each step that is not defined.

        Raises:
            NotImplementedError: `step` is not defined either.
        """
        raise NotImplementedError("define training_step(self, batch), or step(self, batch) for training and validation")

    def test_step(self, batch: Any) -> Any:
        """Compute the results of one test batch, like `validation_step`, which is the default.

        The loss is reported as `test_loss`.
        """
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        """Compute the predictions for one batch; gradients are off. The default calls `forward`.

        May take the key and the further parameters of `validation_step`.

        Returns:
            One prediction per sample: a tensor `[samples, ...]`, a list, or a dict or tuple of these.
        """
        return self(batch)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; `module(...)` calls this."""
        return self.model(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`."""
        return self.forward(*args, **kwargs)

    def configure_model(self) -> None:
        """Create `self.model` at the start of a run, after the process group, if `__init__` has not.

        With sharding, no process then needs the whole model: `AcceleratorModule.from_hf` with `in_fit=True` does this,
        and so do `from_pretrained(..., distributed_config=...)` and `fully_shard` in this method. A model from scratch
        is created on the meta device here, and initialized when it is sharded.

        Processes: all.
        """

    def get_optimizer(self) -> torch.optim.Optimizer | None:
        """Return a custom optimizer; None uses the hyper-parameters'.

        An `ExtendedAcceleratorModule` may return a list of optimizers and step them itself.
        """
        return None

    def get_scheduler(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int, epochs: int) -> LRScheduler | None:
        """Return a custom scheduler, stepped once per optimizer step; None uses the hyper-parameters'.

        An `ExtendedAcceleratorModule` with several optimizers may return a list with a scheduler for each.

        Args:
            optimizer: The optimizer; several are the `optimizers` of one `ChainedOptimizer`.
            steps_per_epoch: Optimizer steps per epoch in this run.
            epochs: Epochs in this run.
        """
        return None

    def get_train_dataloader(self) -> Data | None:
        """Return training data to use instead of `fit`'s, which a parameter `dataset` receives."""
        return None

    def get_validation_dataloader(self) -> Data | None:
        """Return validation data to use instead of `fit`'s, which a parameter `dataset` receives."""
        return None

    def get_test_dataloader(self) -> Data | None:
        """Return test data to use instead of `test`'s, which a parameter `dataset` receives."""
        return None

    def get_predict_dataloader(self) -> Data | None:
        """Return data to predict instead of `predict`'s, which a parameter `dataset` receives."""
        return None

    def get_callbacks(self) -> Callback | Sequence[Callback] | None:
        """Return callbacks to add; they replace the Trainer's callbacks of the same class."""
        return None

    def get_batch_size(self, batch: Any) -> int | None:
        """Return the number of samples in a batch; None lets accmt count them."""
        return None

    def length_of(self, sample: Any) -> int | None:
        """Return the number of tokens in a sample as loaded, for `max_tokens` in the hyper-parameters.

        None lets accmt find it: the sample's "length", else the length of its "input_ids".
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return further state to checkpoint: JSON values and tensors.

        Model, optimizer and scheduler are in the checkpoint anyway, and so are attributes that hold plain data, tensors
        or modules and that training changes. The main process's state is saved; name attributes that differ between
        processes in `process_state`.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore state from `state_dict`, on every process, before `on_resume`."""

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model without the wrapper that reduces gradients, for example for `generate` or `config`."""
        if "accelerator" not in self.__dict__:  # no run has wrapped it
            return self.model
        model: nn.Module = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        return model

    @property
    def status_dict(self) -> dict[str, Any]:
        """The counters of the run as a dict."""
        return self.state.state_dict()

    def freeze(self, *parts: nn.Module) -> None:
        """Stop training parts of the model: their parameters get no gradients and do not change.

        Call it before `fit`, or between two optimizer steps, on every process.

        Dropout and the running statistics of batch norm stay active; `part.eval()` in `training_step` stops them.

        Args:
            *parts: Modules of the model; without any, the whole model.
        """
        for part in parts or (self.model,):
            part.requires_grad_(requires_grad=False)

    def unfreeze(self, *parts: nn.Module) -> None:
        """Train parts of the model again; without any, the whole model."""
        for part in parts or (self.model,):
            part.requires_grad_(requires_grad=True)

    def load_weights(self, path: str | PathLike[str], *, strict: bool = True) -> None:
        """Load the weights of a model folder into `self.model`.

        Args:
            path: A folder saved by a Trainer or by `save_pretrained`. For a PEFT model, its adapters are loaded.
            strict: Whether every weight must be present and match.

        Raises:
            WeightsError: A file, a name or a shape is missing or does not match; the message lists names and shapes.
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
        """Create a module from a transformers model whose forward returns a loss.

        Args:
            path: A model folder, or a model name on the Hub. For an adapter folder, its base model is loaded too.
            type: A transformers class or its name, such as "AutoModelForSequenceClassification"; None is AutoModel.
            in_fit: Whether to build the model at the start of a run instead of now. With FSDP2, each process then reads
                only its shards.
            **kwargs: For `from_pretrained`, such as `num_labels`; `processor=` is saved with the model.

        Raises:
            ArgumentError: `type` is not a transformers class; the message suggests the closest name.
            ModuleContractError: `path` is something else, such as a model.
        """
        module: AcceleratorModule = addon("module_from_hf")(path, type, in_fit=in_fit, **kwargs)
        return module

    @classmethod
    def from_hps(
        cls,
        hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters,
        *,
        in_fit: bool = False,
        processor: Any = None,
    ) -> AcceleratorModule:
        """Create a module from the transformers model in the `model` section of hyper-parameters.

        Args:
            hps_config: The hyper-parameters: a path, a dict or the object.
            in_fit: Whether to build the model at the start of a run instead of now, as in `from_hf`.
            processor: A tokenizer or other processor that is saved with the model.

        Raises:
            HyperParameterError: The section is missing or invalid.
            MissingPackageError: A package that it requires is not installed.
        """
        module: AcceleratorModule = addon("module_from_hps")(hps_config, in_fit=in_fit, processor=processor)
        return module

    @classmethod
    def from_functions(
        cls,
        model: nn.Module,
        train_step: Callable[[Any, Any], Any],
        eval_step: Callable[[Any, Any], Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> AcceleratorModule:
        """Create a module from functions of a batch and the Trainer, which call the model as `trainer.model`.

        Args:
            model: The model.
            train_step: Used as `training_step`.
            eval_step: Used as `validation_step`; None uses `train_step` for both.
            optim: An optimizer of the model's parameters; None uses the hyper-parameters'.

        Examples:
            >>> def train_step(batch, trainer):
            ...     return {"loss": trainer.model(batch).mean()}
            >>> module = AcceleratorModule.from_functions(nn.Linear(3, 1), train_step)
        """
        module: AcceleratorModule = addon("function_module")(model, train_step, eval_step, optim)
        return module

    def __getattr__(self, name: str) -> Any:
        """Return a tool of the original accmt, or raise an error that suggests what to use in place of an attribute."""
        if hasattr(super(), "__getattr__"):  # nn.Module's, if the user derives from both
            return super().__getattr__(name)  # type: ignore[misc]
        # A module is usable before a run, for example in a notebook: these attributes come with the run.
        if name in OF_RUN or name == "device":
            do = "use it in a step or a hook such as on_fit_start; accmt moves model and batches to the device"
            got, expected = "no run has started, for example in __init__", "access to it only during a run"
            raise AttributeError(explain(f"self.{name}", got, expected, do), name=name, obj=self)
        return addon("find_attribute")(self, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the module's state without its run, so that loader processes and copies do not include the run."""
        # A Trainer holds threads and file handles that cannot be pickled.
        return {name: value for name, value in self.__dict__.items() if name not in OF_RUN}

    def forget_run(self) -> None:
        """Remove the attributes of the last run: Trainer, optimizer, scheduler and so on."""
        for name in OF_RUN:
            self.__dict__.pop(name, None)

    def __repr__(self) -> str:
        size = "no model"
        # Before `fit`, a module with `configure_model` has none.
        if isinstance(getattr(self, "model", None), nn.Module):
            size = f"{len(self):,} parameters"
        return f"{type(self).__name__}({size})"

    def __str__(self) -> str:
        return str(self.model)

    def __len__(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __bool__(self) -> bool:
        return True


class ManualSteps(Protocol):
    """The run's interface for the steps of an `ExtendedAcceleratorModule`."""

    def backward(self, loss: torch.Tensor, weight: Any = None) -> None: ...
    def step_optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> bool: ...
    def step_scheduler(self, scheduler: Any = None) -> None: ...
    def zero_grad(self) -> None: ...


class ExtendedAcceleratorModule(AcceleratorModule):
    """A module with manual optimization: `training_step` calls backward and optimizer, any number of times per batch.

    Here, `step` is not shared by training and validation: it steps optimizer and scheduler.

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
    brings_feature = "manual_optimization"
    manual_steps: ManualSteps

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Accumulate the gradients of a batch's mean loss.

        Processes: collective.

        Args:
            loss: The mean loss of this process's batch.
            weight: Its weight, such as the number of target tokens; None is the number of samples, or of target tokens
                if a transformers model computed the loss.
        """
        self.manual_steps.backward(loss, weight)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers: those from `get_optimizer` or in a `ChainedOptimizer`, or the only one."""
        from accmt.optimization import ChainedOptimizer

        if isinstance(self.optimizer, ChainedOptimizer):
            return list(self.optimizer.optimizers)
        return [self.optimizer]

    @contextmanager
    def toggled_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Temporarily compute gradients only for the parameters of one optimizer, such as a GAN's generator."""
        frozen = [parameter for parameter in _parameters_beside(self, optimizer) if parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_(False)  # noqa: FBT003 - torch's signature
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)  # noqa: FBT003 - as above

    def step_optimizer(self, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Clip the gradients according to the Trainer, and step the optimizer.

        Args:
            optimizer: One of `optimizers()`; None steps all. Gradients of the others do not change.

        Returns:
            Whether it stepped; False if the gradient scaler found inf.
        """
        unstepped = [] if optimizer is None else _parameters_beside(self, optimizer)
        gradients = [parameter.grad for parameter in unstepped]
        for parameter in unstepped:
            parameter.grad = None  # without a gradient, it is neither clipped nor stepped
        try:
            return self.manual_steps.step_optimizer(optimizer)
        finally:
            for parameter, gradient in zip(unstepped, gradients, strict=True):
                parameter.grad = gradient

    def step_scheduler(self, scheduler: LRScheduler | None = None) -> None:
        """Step the scheduler, if there is one.

        Args:
            scheduler: One of `schedulers()`; None steps all.
        """
        self.manual_steps.step_scheduler(scheduler)

    def schedulers(self) -> list[LRScheduler]:
        """Return the schedulers: those from `get_scheduler`, the only one, or an empty list."""
        schedulers = getattr(self.scheduler, "schedulers", None)
        if schedulers:
            return list(schedulers)
        if self.scheduler is None:
            return []
        return [self.scheduler]

    def step(self, batch: Any = None) -> None:
        """Step the optimizer and, if it stepped, the scheduler."""
        # The gradient scaler may have skipped the step.
        if self.step_optimizer():
            self.step_scheduler()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.manual_steps.zero_grad()


def _parameters_beside(module: ExtendedAcceleratorModule, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the parameters of all other optimizers."""
    from accmt.options.optimizer_and_scheduler_arguments import weights_of

    optimizers = module.optimizers()
    # The gradients of all optimizers would be left out, and nothing would be trained.
    if not any(member is optimizer for member in optimizers):
        got, do = f"a {type(optimizer).__name__} that is not part of the run", "use one of self.optimizers()"
        raise fail(ModuleContractError, "an optimizer", got=got, expected="one of self.optimizers()", do=do)
    parameters: list[nn.Parameter] = []
    for member in optimizers:
        if member is not optimizer:
            parameters += weights_of(member)
    return parameters


def defines(module: AcceleratorModule, name: str) -> bool:
    """Return whether the user's class or object defines `name` itself."""
    return getattr(type(module), name) is not getattr(AcceleratorModule, name) or name in vars(module)
