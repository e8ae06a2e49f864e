"""What `Trainer.fit` trains where it got no module."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from accmt.errors import ArgumentError, UnknownArgumentError, explain
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters


def as_module(module: Any, kwargs: dict[str, Any], hps: HyperParameters) -> AcceleratorModule:
    """Return the module of what `fit` got: a module, the path of a model, `(path, type)`, or hyper-parameters.

    Args:
        module: One of these.
        kwargs: Further keywords of `fit`, for who builds the model.
        hps: The Trainer's hyper-parameters.

    Raises:
        UnknownArgumentError: There are keywords that nobody reads.
        ArgumentError: The hyper-parameters describe another model than the Trainer's.
    """
    is_file = isinstance(module, str | PathLike) and str(module).endswith((".yaml", ".yml", ".json"))
    if is_file or isinstance(module, Mapping | HyperParameters):
        _require_processor_alone(kwargs)
        return AcceleratorModule.from_hps(_model_of(module, hps), in_fit=True, **kwargs)
    if isinstance(module, str | PathLike):
        return AcceleratorModule.from_hf(module, in_fit=True, **kwargs)
    if isinstance(module, tuple):
        return AcceleratorModule.from_hf(*module, in_fit=True, **kwargs)
    if kwargs:
        got, expected = (
            f"the keywords {sorted(kwargs)}",
            "keywords only where `module` is the path of a transformers model",
        )
        raise UnknownArgumentError(explain("fit", got, expected, "give them to the Trainer, or to your module"))
    from accmt.module import HuggingFaceModule  # imports much that `import accmt` need not

    if isinstance(module, HuggingFaceModule) and module.hps is not None:
        _require_same(module.hps, hps, "AcceleratorModule.from_hps(trainer.hps), or SFTModule.from_hps(trainer.hps)")
    own: AcceleratorModule = module
    return own


def _require_processor_alone(kwargs: Mapping[str, Any]) -> None:
    """Reject keywords for `from_pretrained` beside hyper-parameters, whose section `model` has them."""
    others = {name: value for name, value in kwargs.items() if name != "processor"}
    if others:
        got = f"the keywords {sorted(others)} beside hyper-parameters"
        lines = ", ".join(f"`{name}: {value}`" for name, value in others.items())
        expected = "`processor` alone: arguments of `from_pretrained` stand in the section `model`"
        raise UnknownArgumentError(explain("fit", got, expected, f"write {lines} in `model`"))


def _model_of(source: Any, hps: HyperParameters) -> HyperParameters:
    """Return the hyper-parameters that describe the model of `fit`: the Trainer's, where they come from that source.

    Only they have the flags that were typed, and they are what the run records.
    """
    if not isinstance(source, Mapping | HyperParameters) and hps.is_from(source):
        return hps
    own = HyperParameters.from_config(source)
    _require_same(own, hps, "trainer.fit(trainer.hps, data)")
    return own


def _require_same(own: HyperParameters, hps: HyperParameters, do: str) -> None:
    """Check that a module is what the Trainer's hyper-parameters say, which the run records.

    Raises:
        ArgumentError: They say otherwise, such as by flags.
    """
    for section in ("model", "sft"):
        if hps[section] is not None and own[section] != hps[section]:
            got = f"{own.where(section)}: {own[section]}, and {hps.where(section)}: {hps[section]}"
            do = f"{do}: the Trainer's hyper-parameters, with their flags"
            raise ArgumentError(explain("fit", got, "what the Trainer's hyper-parameters describe", do))
