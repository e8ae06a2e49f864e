"""The `prefer` section of the hyper-parameters: the rows, the loss and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from accmt.addons.prefer.losses import LOSSES, Objective
from accmt.addons.sft.section import DATA_KEYS, DataSection, Key, flag_key, path_key, read_keys
from accmt.errors import ArgumentError, describe_value
from accmt.options.checks import KeyFault

REWARD, DISTILLATION = "reward", "distillation"
_NAMES = (*LOSSES, REWARD, DISTILLATION)
_REFERENCES = ("auto", "adapter", "copy")
_OPTIONS = {
    **{name: ("beta", *kind.options) for name, kind in LOSSES.items()},
    REWARD: ("center",),
    DISTILLATION: ("beta", "temperature"),
}


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


_KEYS: Mapping[str, Key] = {
    **DATA_KEYS,
    "loss": Key("loss: dpo", f"one of {', '.join(_NAMES)}", _NAMES.__contains__),
    "reference": Key("reference: copy", f"one of {', '.join(_REFERENCES)}", _REFERENCES.__contains__),
    "reference_folder": path_key("reference_folder: out/reference"),
    "teacher": path_key("teacher: ./larger-model"),
    **{
        name: Key(f"{name}: {example}", "a number", _is_number)
        for name, example in {
            "beta": 0.1,
            "label_smoothing": 0.1,
            "gamma": 1.0,
            "desirable_weight": 1.0,
            "undesirable_weight": 1.0,
            "center": 0.01,
            "temperature": 1.0,
        }.items()
    },
    "merge": flag_key("merge"),
}


@dataclass(frozen=True)
class PreferSection(DataSection):
    """Data and options for preference tuning, reward models and distillation.

    Attributes:
        loss: The loss.
        reference: The reference of DPO and similar losses.
        reference_folder: A folder for the log-probabilities of the reference.
        teacher: The path or name of the teacher, for distillation.
        options: The options of the loss.
    """

    loss: Any = "dpo"
    reference: Any = "auto"
    reference_folder: str | None = None
    teacher: str | None = None
    options: dict[str, float] = field(default_factory=dict)


def read_prefer_section(value: Any) -> tuple[PreferSection | None, list[KeyFault]]:
    """Return the section and its errors; a plain path is the path of the data."""
    values, faults = read_keys("prefer", value, _KEYS)
    if faults:
        return None, faults
    loss, every = values.get("loss", "dpo"), set().union(*_OPTIONS.values())
    options = {name: values.pop(name) for name in [*values] if name in every}
    for name, entry in options.items():
        if name not in _OPTIONS[loss]:
            expected = f"an option of {loss}: {', '.join(_OPTIONS[loss])}"
            faults.append(KeyFault(("prefer", name), f"{name} = {describe_value(entry)}", expected, f"remove `{name}`"))
    if (loss == DISTILLATION) != ("teacher" in values):
        got = "no teacher" if loss == DISTILLATION else "a teacher"
        do = "write `teacher: ./larger-model`" if loss == DISTILLATION else "write `loss: distillation`, or remove it"
        faults.append(KeyFault(("prefer", "teacher"), got, f"a teacher with `loss: {DISTILLATION}` only", do))
    needs_reference = loss in LOSSES and LOSSES[loss].needs_reference
    for name in ("reference", "reference_folder"):
        if name in values and not needs_reference:
            expected = "no reference: this loss needs none"
            faults.append(KeyFault(("prefer", name), f"a reference with {loss}", expected, f"remove `{name}`"))
    if {"reference", "reference_folder"} <= values.keys() and values["reference"] != "auto":
        expected = "one of them: the folder is for the reference that `auto` selects"
        got = f"reference = {values['reference']} and a folder"
        faults.append(KeyFault(("prefer", "reference_folder"), got, expected, "remove `reference`"))
    if not faults and loss in LOSSES:
        try:
            Objective(loss, **options)
        except ArgumentError as error:
            [fault] = error.faults
            faults.append(KeyFault(("prefer", fault.where), fault.got, fault.expected, fault.do))
    return (None if faults else PreferSection(**values, options=options)), faults
