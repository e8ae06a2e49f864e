"""What `fit` takes in place of a module: a transformers model, its path, `(path, type)`, or hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, cast

from accmt.addons.made_modules import HuggingFaceModule
from accmt.checks.table import require_module
from accmt.errors import ArgumentError, UnknownArgumentError, fail
from accmt.huggingface.model_kinds import is_peft_model, is_transformers_model
from accmt.module import AcceleratorModule
from accmt.options import HyperParameters
from accmt.registry import addon


def as_module(module: Any, kwargs: dict[str, Any], hps: HyperParameters) -> AcceleratorModule:
    """Return the module for an argument of `fit`: a module, a transformers model or its path, or hyper-parameters.

    Args:
        module: One of these.
        kwargs: Further keywords of `fit`, used to build the model.
        hps: The Trainer's hyper-parameters.

    Raises:
        UnknownArgumentError: There are unused keywords.
        ModuleContractError: It is something else, such as a class.
        ArgumentError: The hyper-parameters describe a different model than the Trainer's.
    """
    is_path = isinstance(module, str | PathLike)
    is_hps_file = is_path and str(module).endswith((".yaml", ".yml", ".json"))
    if is_hps_file or isinstance(module, Mapping | HyperParameters):
        if kwargs.keys() - {"processor"}:
            got = f"the keywords {sorted(kwargs)} together with hyper-parameters"
            expected = "only `processor`: arguments of `from_pretrained` belong in the `model` section"
            raise fail(UnknownArgumentError, "fit", got=got, expected=expected, do="write them in the section `model`")
        model_hps = hps  # if from the same source: only the Trainer's include the flags, and the run records them
        if not is_hps_file or not hps.is_from(module):
            model_hps = HyperParameters.from_config(module)
            _require_same_model(model_hps, hps, "trainer.fit(trainer.hps, data)")
        return AcceleratorModule.from_hps(model_hps, in_fit=True, **kwargs)
    if is_path or isinstance(module, tuple):
        return AcceleratorModule.from_hf(*(module if isinstance(module, tuple) else (module,)), in_fit=True, **kwargs)
    if kwargs.keys() <= {"processor"} and (is_transformers_model(module) or is_peft_model(module)):
        return HuggingFaceModule(module, **kwargs)
    if kwargs:
        got, expected = f"the keywords {sorted(kwargs)}", "keywords only if `module` is the path of a model"
        foreign = [addon("hint_for_argument")(name, value) for name, value in kwargs.items()]
        advice = dict.fromkeys(hint[1] for hint in foreign if hint) or ["pass them to the Trainer, or to your module"]
        raise fail(UnknownArgumentError, "fit", got=got, expected=expected, do="; ".join(advice))
    if isinstance(module, HuggingFaceModule) and module.hps is not None:
        name = "AcceleratorModule" if type(module) is HuggingFaceModule else type(module).__name__
        _require_same_model(module.hps, hps, f"{name}.from_hps(trainer.hps)")
    require_module(module, "fit")  # before the run sets attributes of it: a class would keep them for later modules
    return cast(AcceleratorModule, module)


def _require_same_model(own: HyperParameters, hps: HyperParameters, do: str) -> None:
    """Check that a module matches the Trainer's hyper-parameters, which the run records.

    Raises:
        ArgumentError: They differ, for example because of flags.
    """
    for section in ("model", "sft", "prefer"):
        if hps[section] is not None and own[section] != hps[section]:
            got = f"{own.where(section)}: {own[section]}, and {hps.where(section)}: {hps[section]}"
            do = f"{do}: the Trainer's hyper-parameters include the flags"
            raise fail(ArgumentError, "fit", got=got, expected="the model of the Trainer's hyper-parameters", do=do)
