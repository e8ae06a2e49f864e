"""Modules that need no class of the user's: of a transformers model, and of functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from accmt.errors import DataError, ModuleContractError, explain
from accmt.huggingface.own_loss import count_targets
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters

Step = Callable[[Any, Any], Any]
"""A function of a batch and the Trainer; `Any` lets a user annotate the second as `accmt.Trainer`."""


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
