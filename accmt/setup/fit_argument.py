"""The module that `Trainer.fit` trains if it receives a path or hyper-parameters instead."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from accmt.errors import ArgumentError, UnknownArgumentError, explain
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters


def as_module(module: Any, kwargs: dict[str, Any], hps: HyperParameters) -> AcceleratorModule:
    """Return the module for an argument of `fit`: a module, a model's path, `(path, type)`, or hyper-parameters.

    Args:
        module: One of these.
        kwargs: Further keywords of `fit`, used to build the model.
        hps: The Trainer's hyper-parameters.

    Raises:
        UnknownArgumentError: There are unused keywords.
        ArgumentError: The hyper-parameters describe a different model than the Trainer's.
    """
    is_file = isinstance(module, str | PathLike) and str(module).endswith((".yaml", ".yml", ".json"))
    if is_file or isinstance(module, Mapping | HyperParameters):
        # Reject keywords for `from_pretrained` with hyper-parameters: they belong in the `model` section.
        others = {name: value for name, value in kwargs.items() if name != "processor"}
        if others:
            got = f"the keywords {sorted(others)} together with hyper-parameters"
            lines = ", ".join(f"`{name}: {value}`" for name, value in others.items())
            expected = "only `processor`: arguments of `from_pretrained` belong in the `model` section"
            raise UnknownArgumentError(explain("fit", got, expected, f"write {lines} in `model`"))
        if isinstance(module, Mapping | HyperParameters) or not hps.is_from(module):
            own_hps = HyperParameters.from_config(module)
            _require_same(own_hps, hps, "trainer.fit(trainer.hps, data)")
        else:
            own_hps = hps  # from the same source; only the Trainer's include the flags, and the run records them
        return AcceleratorModule.from_hps(own_hps, in_fit=True, **kwargs)
    if isinstance(module, str | PathLike):
        return AcceleratorModule.from_hf(module, in_fit=True, **kwargs)
    if isinstance(module, tuple):
        return AcceleratorModule.from_hf(*module, in_fit=True, **kwargs)
    if kwargs:
        got, expected = (
            f"the keywords {sorted(kwargs)}",
            "keywords only if `module` is the path of a transformers model",
        )
        raise UnknownArgumentError(explain("fit", got, expected, "pass them to the Trainer, or to your module"))
    from accmt.module import HuggingFaceModule  # a slow import, which `import accmt` avoids

    if isinstance(module, HuggingFaceModule) and module.hps is not None:
        name = "AcceleratorModule" if type(module) is HuggingFaceModule else type(module).__name__
        _require_same(module.hps, hps, f"{name}.from_hps(trainer.hps)")
    own: AcceleratorModule = module
    return own


def _require_same(own: HyperParameters, hps: HyperParameters, do: str) -> None:
    """Check that a module matches the Trainer's hyper-parameters, which the run records.

    Raises:
        ArgumentError: They differ, for example because of flags.
    """
    for section in ("model", "sft", "prefer"):
        if hps[section] is not None and own[section] != hps[section]:
            got = f"{own.where(section)}: {own[section]}, and {hps.where(section)}: {hps[section]}"
            do = f"{do}: the Trainer's hyper-parameters include the flags"
            raise ArgumentError(explain("fit", got, "the model of the Trainer's hyper-parameters", do))
