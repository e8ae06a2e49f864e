"""Modules that accmt makes: of a model and functions, and of transformers models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from inspect import signature
from os import PathLike
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from accmt.addons.loss_targets import count_targets
from accmt.addons.model_from_hps import build_from_hps
from accmt.addons.pretrained import load_pretrained
from accmt.addons.token_losses import find_sample_losses
from accmt.errors import DataError, ModuleContractError, fail
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters


class FunctionModule(AcceleratorModule):
    """A model with functions of a batch and the Trainer in place of steps.

    Args:
        model: The model.
        train_step: Used as `training_step`.
        eval_step: Used as `validation_step`; None uses `train_step` for both.
        optim: An optimizer of the model's parameters, reset to its initial state for every run; None uses the
            hyper-parameters'.
    """

    def __init__(
        self,
        model: nn.Module,
        train_step: Callable[[Any, Any], Any],
        eval_step: Callable[[Any, Any], Any] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model = model
        self._train_step = train_step
        self._eval_step = train_step if eval_step is None else eval_step
        self._optim = optim
        self._first_optim_state = None if optim is None else deepcopy(optim.state_dict())

    def training_step(self, batch: Any) -> Any:
        """Call the training function."""
        return self._train_step(batch, self.trainer)

    def validation_step(self, batch: Any) -> Any:
        """Call the evaluation function."""
        return self._eval_step(batch, self.trainer)

    def get_optimizer(self) -> torch.optim.Optimizer | None:
        """Return the user's optimizer, without state from earlier runs and `tune`."""
        # A function module has one optimizer for all its runs; a second fit would start with the momentum of the first.
        if self._optim is not None and self._first_optim_state is not None:
            self._optim.load_state_dict(self._first_optim_state)
        return self._optim


class HuggingFaceModule(AcceleratorModule):
    """A transformers model that computes its own loss.

    Args:
        model: The model, or a function that builds it at the start of a run.
        processor: Tokenizer or other processor that is saved with it.

    Attributes:
        metric_names: The metrics of each evaluated set; set by a run.
        hps: The hyper-parameters that describe the model, or None.
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
        """Return the loss that the model computes from a batch with labels.

        Raises:
            ModuleContractError: The model returns no loss: it has no task head, or the batch has no labels.
            DataError: The model fails, and the batch has lists instead of tensors.
        """
        return self._read_loss(self._call_model(batch), batch)

    def validation_step(self, batch: Any, key: str = "") -> Any:
        """Return the loss, and the logits and labels for each metric of the set.

        Token labels need a custom module: a metric would have to know which tokens count.
        """
        names, labels = self.metric_names.get(key), batch.get("labels")
        # One label per sample: with labels for tokens, a metric needs a custom module.
        if not names or not isinstance(labels, torch.Tensor) or labels.ndim != 1:
            return self.step(batch)
        outputs = self._call_model(batch)
        result = self._read_loss(outputs, batch)
        if not isinstance(result, dict):
            result = {"loss": result}
        logits = outputs.logits.squeeze(-1)  # regression: one number per sample
        return {**result, **dict.fromkeys(names, (logits, labels))}

    def _call_model(self, batch: Any) -> Any:
        try:
            return self.model(**batch)
        except (AttributeError, TypeError, ValueError) as error:
            lists = {name: value for name, value in batch.items() if isinstance(value, list)}
            if not lists:  # an error of the model itself
                raise
            # torch's collate leaves strings, and transposes lists of numbers.
            got, expected = f"lists under {', '.join(map(repr, lists))}", "a tensor for each name"
            texts = [name for name, values in lists.items() if values and isinstance(values[0], str)]
            steps, columns = [], []
            for name in texts:
                if name in ("label", "labels"):
                    steps.append(f"dataset.class_encode_column({name!r}), which maps its texts to numbers")
                else:
                    columns.append(name)
            if columns:
                steps.append(f"dataset.remove_columns({columns})")
            if len(texts) < len(lists):  # token ids of different lengths
                steps.append("Trainer(collate_fn=DataCollatorWithPadding(tokenizer))")
            do = f"write {', and '.join(steps)}"
            raise fail(DataError, "a batch for the transformers model", got=got, expected=expected, do=do) from error

    def _read_loss(self, outputs: Any, batch: Any) -> Any:
        loss = getattr(outputs, "loss", None)
        if loss is None:  # of transformers, only the outputs of models with a head have one
            model = self.unwrapped_model
            expected = "a model with a head that computes its loss"
            do = 'fit((path, "AutoModelForSequenceClassification"), ...), or `type:` in the `model` section of the '
            do += 'YAML, with "labels" in each batch'
            if "labels" not in batch and "labels" in signature(model.forward).parameters:
                expected = '"labels" in each batch: the model computes its loss from them'
                do = 'add the targets to the dataset as "labels", for example with '
                do += 'dataset.rename_column("label", "labels")'
            where, got = f"the transformers model {type(model).__name__}", f"no loss from a batch with {sorted(batch)}"
            raise fail(ModuleContractError, where, got=got, expected=expected, do=do)
        weight = count_targets(self.unwrapped_model, batch)
        if weight is None:
            return loss
        result = {"loss": loss, "weight": weight}
        if self.wants_sample_losses and torch.is_grad_enabled():  # not in an evaluation
            result |= find_sample_losses(self.unwrapped_model, outputs, batch)
        return result

    def predict_step(self, batch: Any) -> Any:
        """Return the logits, or a dict of the model's other outputs; the batch may have labels."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        tensors = {name: value for name, value in self.model(**inputs).items() if isinstance(value, torch.Tensor)}
        return tensors.get("logits", tensors)


def from_hf(
    path: str | PathLike[str],
    kind: str | type[Any] | None = None,
    *,
    in_fit: bool,
    processor: Any = None,
    **kwargs: Any,
) -> HuggingFaceModule:
    """Create a module from a transformers model: `AcceleratorModule.from_hf`."""
    return _make(partial(load_pretrained, path, kind, **kwargs), processor, in_fit=in_fit)


def from_hps(
    hps_config: str | PathLike[str] | Mapping[str, Any] | HyperParameters, *, in_fit: bool, processor: Any
) -> HuggingFaceModule:
    """Create a module from the section `model` of hyper-parameters: `AcceleratorModule.from_hps`."""
    hps = HyperParameters.from_config(hps_config)
    module = _make(partial(build_from_hps, hps), processor, in_fit=in_fit)
    module.hps = hps
    return module


def _make(build: Callable[[], nn.Module], processor: Any, *, in_fit: bool) -> HuggingFaceModule:
    module = HuggingFaceModule(build, processor)
    if not in_fit:
        module.configure_model()
    return module
