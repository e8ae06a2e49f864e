"""The hyper-parameters of a run, checked on creation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from accmt.errors import HyperParameterError, fail
from accmt.options.checks import KeyFault, read_numbers
from accmt.options.yaml_reader import FIELDS, Document
from accmt.secrets import hide, remember

if TYPE_CHECKING:
    import torch


class HyperParameters:
    """Epochs, batch sizes, optimizer and scheduler of a run.

    Numbers may be strings ("1e-3"). Everything is checked on creation, including the arguments of optimizer and
    scheduler against their signatures, and all errors are reported together.

    Args:
        epochs: Passes over the training data; -1 for as many as `max_steps`, `max_samples` or `max_target_tokens`
            needs. None: 1, or -1 with one of those.
        batch_size: Samples per batch on each process (with `same_bits`, on all together): one number, or up to three
            for train, validation and test (a missing one equals the one before it).
        optim: Name, import path or class of the optimizer. None: "SGD".
        optim_kwargs: Optimizer arguments; the others keep the defaults of the class.
        scheduler: Name, import path or class of the learning-rate scheduler. None: the rate is constant.
        scheduler_kwargs: Scheduler arguments, including `warmup_ratio` or `num_warmup_steps` if it warms up.
        max_steps: Optimizer steps after which the run ends, unless `epochs` ends it earlier. None or -1: no limit.
        max_samples: Training samples, over all processes, after which the run ends, at the end of the step that
            reaches them. A scheduler spans the number of full batches with this many samples. None: no limit.
        max_target_tokens: Target tokens (`state.target_tokens_seen`) after which the run ends, likewise. The number of
            steps is unknown in advance, so a scheduler with an end needs another limit. None: no limit.
        step_scheduler_per_epoch: Step the scheduler at the end of each epoch instead of at each step; all its counts
            are then in epochs.
        max_micro_batch_size: Largest number of training samples in one forward pass; larger batches are split evenly
            and accumulated. "auto" halves the micro-batch and doubles the accumulation each time a training step runs
            out of memory; the effective batch, the order of samples and the scheduler stay the same. None: batches
            are not split.
        max_tokens: Largest number of tokens, including padding, in one forward pass: the samples of each step are
            sorted by length and split into micro-batches within this limit, in evaluations too. None: batches as
            loaded.
        packing: Pack the samples of each training step end to end into rows of `max_tokens` instead of padding them.
        model: The transformers model to train: its path, or a dict with `path`, `type`, `dtype`, `quantization`,
            `lora`, `freeze` and any other argument of `from_pretrained`. None: the module defines its model.
        sft: The data for supervised fine-tuning: a path, or a dict with `data`, `validation`, `chat_template`,
            `max_length`, `per_turn` and `merge`. `accmt sft` reads all of them, `SFTModule.from_hps` those that are
            not paths.
        prefer: The data and the loss for preference tuning, reward models and distillation, like `sft`: `accmt prefer`
            and the `from_hps` of their modules read it.
        data: The shares in which several training sets are mixed: a dict with `mix`, `stop` and `unit`. None: one set.
        evaluation: What an evaluation does besides the validation step: a dict with `generate`, arguments of the
            model's `generate` such as `max_new_tokens`, and `table_rows`. None: nothing.
        optimizer: Alias of `optim`.
        optimizer_kwargs: Alias of `optim_kwargs`.

    Attributes:
        scheduler_class: The class or function of the scheduler, or None.

    Raises:
        HyperParameterError: Anything is invalid; the message lists every error.

    Examples:
        >>> hps = HyperParameters(epochs=3, batch_size=(16, 32), optim="AdamW", optim_kwargs={"lr": "1e-4"})
        >>> hps.optim_kwargs, hps.val_batch_size
        ({'lr': 0.0001}, 32)
    """

    def __init__(
        self,
        epochs: int | None = None,
        batch_size: int | tuple[int, ...] | list[int] = 1,
        optim: str | type[torch.optim.Optimizer] | None = None,
        optim_kwargs: Mapping[str, Any] | None = None,
        scheduler: str | Callable[..., Any] | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        max_steps: int | None = None,
        step_scheduler_per_epoch: bool = False,
        max_micro_batch_size: int | Literal["auto"] | None = None,
        *,
        max_samples: int | None = None,
        max_target_tokens: int | None = None,
        max_tokens: int | None = None,
        packing: bool = False,
        model: str | Mapping[str, Any] | None = None,
        sft: str | Mapping[str, Any] | None = None,
        prefer: str | Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        optimizer: str | type[torch.optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        optim = "SGD" if optim is None and optimizer is None else optim
        kwargs = optimizer_kwargs if optim_kwargs is None else optim_kwargs
        has_limit = any(limit is not None for limit in (max_steps, max_samples, max_target_tokens))
        values = {
            "epochs": 1 if epochs is None and not has_limit else epochs,
            "batch_size": batch_size,
            "optim": None if optim is None else _component(optim, kwargs),
            "optimizer": None if optimizer is None else _component(optimizer, kwargs),
            "scheduler": None
            if scheduler is None and scheduler_kwargs is None
            else _component(scheduler, scheduler_kwargs),
            "max_steps": max_steps,
            "max_samples": max_samples,
            "max_target_tokens": max_target_tokens,
            "step_scheduler_per_epoch": step_scheduler_per_epoch,
            "max_micro_batch_size": max_micro_batch_size,
            "max_tokens": max_tokens,
            "packing": packing,
            "model": model,
            "sft": sft,
            "prefer": prefer,
            "data": data,
            "evaluation": evaluation,
        }
        values = {key: read_numbers(value) for key, value in values.items() if value is not None}
        faults = []
        arguments = {"optim": optim_kwargs, "optimizer": optimizer_kwargs, "scheduler": scheduler_kwargs}
        for kind, kind_kwargs in arguments.items():
            # A type among the arguments would replace the one that the class or name stands for.
            if kind_kwargs is not None and "type" in kind_kwargs:
                do = f"pass it as `{kind}=`"
                faults.append(KeyFault((f"{kind}_kwargs", "type"), "a type", "only arguments", do))
        # One would win without a word.
        if optim_kwargs is not None and optimizer_kwargs is not None:
            got = "both `optim_kwargs` and its alias `optimizer_kwargs`"
            faults.append(KeyFault(("optimizer_kwargs",), got, "one of the two", "remove `optimizer_kwargs`"))
        self._take(Document("HyperParameters", values, faults=tuple(faults)))

    @classmethod
    def from_config(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | HyperParameters,
        flags: Mapping[str, Any] | None = None,
    ) -> HyperParameters:
        """Read hyper-parameters from a file or a dict; an object is returned unchanged.

        Args:
            source: A path to a .yaml, .yml or .json file, or a dict (which is not changed), with or without the
                outer `hps`.
            flags: Values that override those of `source`, by dotted key (`optim.lr`), as in `--hps.optim.lr`.

        Raises:
            HyperParameterTypeError: `source` is something else.
            HyperParameterFileError: There is no such file.
            HyperParameterError: Anything in it is invalid; the message lists every error with its line.
        """
        from accmt.options.yaml_reader import read_document
        from accmt.registry import addon

        if isinstance(source, HyperParameters):
            if not flags:
                return source
            source = source.to_dict()
        hps = cls.__new__(cls)
        document = read_document(source)
        hps._take(addon("overlay_flags")(document, flags) if flags else document)
        return hps

    @classmethod
    def from_training_arguments(cls, arguments: Any) -> HyperParameters:
        """Read the hyper-parameters in a `TrainingArguments` of transformers, as `Trainer(arguments)` does.

        Raises:
            HyperParameterError: Anything in it is invalid here.
        """
        return cls.from_config(arguments)

    def _take(self, document: Document) -> None:
        from accmt.options.schema import check

        # Before anything is checked: a message about an invalid value must not show a token.
        remember(document.values)
        checked = check(document)
        schema, optim, scheduler = checked.schema, checked.optim, checked.scheduler
        self.epochs: int = schema.epochs
        self.batch_size: int | tuple[int, ...] = schema.batch_size
        self.optim: str | type[torch.optim.Optimizer] | None = optim.user_value
        self.optim_kwargs = optim.arguments
        self._optimizer_class: type[torch.optim.Optimizer] | None = optim.factory
        self.scheduler: str | Callable[..., Any] | None = scheduler.user_value
        self.scheduler_kwargs = scheduler.arguments
        self.scheduler_class: Callable[..., Any] | None = scheduler.factory
        self.max_steps: int | None = None if schema.max_steps == -1 else schema.max_steps
        self.max_samples = schema.max_samples
        self.max_target_tokens = schema.max_target_tokens
        self.step_scheduler_per_epoch = schema.step_scheduler_per_epoch
        self.max_micro_batch_size = schema.max_micro_batch_size
        self.max_tokens = schema.max_tokens
        self.packing = schema.packing
        self.model: str | dict[str, Any] | None = schema.model
        self.sft: str | dict[str, Any] | None = schema.sft
        self.prefer: str | dict[str, Any] | None = schema.prefer
        self.data: dict[str, Any] | None = schema.data
        self.evaluation: dict[str, Any] | None = schema.evaluation
        self._sections = checked.sections
        self._document = checked.document

    def section(self, name: str) -> Any:
        """Return what the add-on of a section, such as `model` or `sft`, read from it; None without the section."""
        return self._sections.get(name)

    @property
    def optimizer_class(self) -> type[torch.optim.Optimizer]:
        """The optimizer class.

        Raises:
            HyperParameterError: `optim` is missing, and the module does not define `get_optimizer`.
        """
        # It is looked up only if no module defines one.
        if self._optimizer_class is None:
            do = "write `optim: {type: AdamW, lr: 1e-4}`, or def get_optimizer(self) in the module"
            raise fail(HyperParameterError, self.where("optim"), got="nothing", expected="an optimizer", do=do)
        return self._optimizer_class

    @property
    def train_batch_size(self) -> int:
        """Samples per training batch on one process."""
        return self._batch_size_of(0)

    @property
    def val_batch_size(self) -> int:
        """Samples per validation batch on one process."""
        return self._batch_size_of(1)

    @property
    def test_batch_size(self) -> int:
        """Samples per test batch on one process."""
        return self._batch_size_of(2)

    @property
    def train_step_batch_size(self) -> int:
        """Samples per micro-batch: the largest even split of a batch within `max_micro_batch_size`."""
        return self.micro_batch_size_within(None)

    def set_train_batch_size(self, size: int) -> None:
        """Change the training batch size; those of validation and test stay the same."""
        self.batch_size = (size, self.val_batch_size, self.test_batch_size)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the optimizer, for parameters outside groups that set their own."""
        from accmt.options.optimizer_and_scheduler_arguments import standard_rate

        rate = self.optim_kwargs.get("lr")
        return standard_rate(self.optimizer_class) if rate is None and self.optim is not None else rate

    def set_learning_rate(self, rate: float) -> None:
        """Change the learning rate; those of groups keep their proportion to it."""
        before, kwargs = self.learning_rate, dict(self.optim_kwargs)
        # `tune` changes the rate: a group with a tenth of it keeps its tenth.
        if before and kwargs.get("groups"):
            from accmt.options.optimizer_and_scheduler_arguments import standard_rate
            from accmt.options.optimizer_and_scheduler_names import find_optimizer

            kwargs["groups"] = [dict(group) for group in kwargs["groups"]]
            for group in kwargs["groups"]:
                group_rate = group.get("lr")
                if "lr" not in group and "type" in group:
                    group_rate = standard_rate(find_optimizer(group["type"]))
                if group_rate is not None:
                    group["lr"] = group_rate * (rate / before)
        self.optim_kwargs = {**kwargs, "lr": rate}

    @property
    def halves_micro_batches(self) -> bool:
        """Whether running out of memory halves the micro-batch: `max_micro_batch_size: auto`."""
        return self.max_micro_batch_size == "auto"

    @property
    def micro_batch_limit(self) -> int | None:
        """The number in `max_micro_batch_size`; None for "auto", or if it is not set."""
        return None if self.max_micro_batch_size == "auto" else self.max_micro_batch_size

    def micro_batch_size_within(self, limit: int | None) -> int:
        """Return the largest even split of a batch within a limit and `max_micro_batch_size`."""
        size = self.train_batch_size
        largest = min(size, self.micro_batch_limit or size, limit or size)
        return next(part for part in range(largest, 0, -1) if size % part == 0)

    def where(self, *path: str | int) -> str:
        """Return the location of a key for messages: `hps/digits.yaml:7 optim.lr`."""
        return self._document.where(path)

    def reject(self, faults: Iterable[KeyFault]) -> HyperParameterError:
        """Return one error that reports all `faults` with their locations."""
        return self._document.reject(faults)

    def is_from(self, path: str | os.PathLike[str]) -> bool:
        """Return whether these were read from this file, possibly with flags."""
        return Path(self._document.name).resolve() == Path(path).resolve()

    def to_dict(self) -> dict[str, Any]:
        """Return the content of an equivalent YAML file, with names instead of classes, for `from_config`."""
        from accmt.options.optimizer_and_scheduler_names import name_of

        values = {name: _plain(self[name]) for name in FIELDS if not name.endswith("_kwargs")}
        values["packing"] = self.packing or None  # like all unset values
        if self.optim is not None:
            values["optim"] = {"type": name_of(self.optimizer_class), **_plain(self.optim_kwargs)}
        if self.scheduler_class is not None:
            values["scheduler"] = {"type": name_of(self.scheduler_class), **_plain(self.scheduler_kwargs)}
        return {"hps": values}

    def get_config(self, replaced: Mapping[str, Any] | None = None) -> dict[str, int | float | bool | str]:
        """Return a flat dict for trackers: `optim.lr` for nested keys, lists as strings, without None.

        Secrets are hidden.

        Args:
            replaced: Sections that something else than the hyper-parameters decides, with what is used.
        """
        return dict(_flat(hide({**self.to_dict()["hps"], **(replaced or {})}), ""))

    def __getitem__(self, key: str) -> Any:
        # Methods are attributes too: `hps["where"]` would return one.
        if key not in FIELDS:
            raise KeyError(f"{key!r} is not one of {', '.join(FIELDS)}")
        return getattr(self, key)

    def __eq__(self, value: object) -> bool:
        if not isinstance(value, HyperParameters):
            return NotImplemented
        return self.to_dict() == value.to_dict()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"HyperParameters({', '.join(f'{key}={hide({key: self[key]})[key]!r}' for key in FIELDS)})"

    def _batch_size_of(self, stage: int) -> int:
        sizes = self.batch_size if isinstance(self.batch_size, tuple) else (self.batch_size,)
        return sizes[min(stage, len(sizes) - 1)]


def _component(kind: Any, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    return {**(kwargs or {}), "type": kind}


def _plain(value: Any) -> Any:
    if isinstance(value, type):  # the optimizer class of a group
        from accmt.options.optimizer_and_scheduler_names import name_of

        return name_of(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _flat(values: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            pairs.append((f"{prefix}{key}", str(value) if isinstance(value, list) else value))
    return pairs
