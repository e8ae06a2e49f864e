"""The schema of hyper-parameters, and one report of everything that violates it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, Strict, ValidationError, field_validator

from accmt.options.checks import is_off, whole
from accmt.options.optimizer_and_scheduler_arguments import check_optimizer, check_scheduler
from accmt.options.optimizer_and_scheduler_names import find_optimizer, find_scheduler
from accmt.options.yaml_reader import SECTIONS, Document, Fault, KeyPath, describe, suggest
from accmt.registry import HPS_SECTIONS, addon, find, is_built_in

_OTHER_NAMES = {"optimizer": "optim"}
_MAPPINGS = ("optim", "optimizer", "scheduler", *SECTIONS)
_LIMITS = ("max_samples", "max_target_tokens", "max_tokens", "max_micro_batch_size")
_NOTHING = "nothing"
"""The value shown for a missing key."""


class ComponentSchema(BaseModel):
    """An optimizer or a scheduler: its `type`, and arguments, which `check` compares with its signature."""

    model_config = ConfigDict(extra="allow")

    type: str | Callable[..., Any]


class Schema(BaseModel):
    """The keys below `hps`. A field's description is the expected value in messages, its example what to write."""

    model_config = ConfigDict(extra="forbid", strict=True)

    epochs: PositiveInt | Literal[-1] = Field(
        default=-1,
        description="a whole number of at least 1, or -1 with max_steps",
        examples=["epochs: 3"],
    )
    batch_size: PositiveInt | Annotated[tuple[PositiveInt, ...], Strict(strict=False), Len(1, 3)] = Field(
        description="a whole number of at least 1, or a list of up to three: train, validation, test",
        examples=["batch_size: 16"],
    )
    optim: ComponentSchema | None = Field(
        default=None, description="an optimizer", examples=["optim: {type: AdamW, lr: 1e-4}"]
    )
    scheduler: ComponentSchema | None = Field(
        default=None,
        description="a scheduler",
        examples=["scheduler: {type: LinearWithWarmup, warmup_ratio: 0.1}"],
    )
    max_steps: PositiveInt | Literal[-1] = Field(
        default=-1,
        description="a whole number of steps from 1, or -1 for no limit",
        examples=["max_steps: 1000"],
    )
    max_samples: PositiveInt | None = Field(
        default=None,
        description="a whole number of samples from 1",
        examples=["max_samples: 1_000_000"],
    )
    max_target_tokens: PositiveInt | None = Field(
        default=None,
        description="a whole number of target tokens from 1",
        examples=["max_target_tokens: 2e9"],
    )
    step_scheduler_per_epoch: bool = Field(
        default=False,
        description="true or false",
        examples=["step_scheduler_per_epoch: true"],
    )
    max_micro_batch_size: PositiveInt | Literal["auto"] | None = Field(
        default=None,
        description='a whole number of at least 1, or "auto"',
        examples=["max_micro_batch_size: 8"],
    )
    max_tokens: PositiveInt | None = Field(
        default=None,
        description="a whole number of at least 1",
        examples=["max_tokens: 4096"],
    )
    packing: bool = Field(
        default=False,
        description="true or false",
        examples=["packing: true"],
    )
    model: Any = Field(default=None, description="a path, or a mapping with `path`", examples=["model: out/base"])
    sft: Any = Field(default=None, description="a path, or a mapping with `data`", examples=["sft: train.jsonl"])
    prefer: Any = Field(default=None, description="a path, or a mapping with `data`", examples=["prefer: train.jsonl"])
    data: Any = Field(
        default=None, description="a mapping with `mix`", examples=["data: {mix: {news: 0.5, code: rest}}"]
    )
    evaluation: Any = Field(
        default=None, description="a mapping with `generate`", examples=["evaluation: {generate: {max_new_tokens: 64}}"]
    )

    @field_validator(
        *("epochs", "batch_size", "max_steps", "max_samples", "max_target_tokens"),
        *("max_micro_batch_size", "max_tokens"),
        mode="before",
    )
    @classmethod
    def _read_whole_floats(cls, value: Any) -> Any:
        return [whole(item) for item in value] if isinstance(value, list | tuple) else whole(value)

    @field_validator("optim", "scheduler", mode="before")
    @classmethod
    def _read_plain_name(cls, value: Any) -> Any:
        return _as_mapping(value)


@dataclass(frozen=True)
class Component:
    """An optimizer or scheduler: the user's value, its factory, and arguments in the types of its signature."""

    user_value: Any = None
    factory: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """Hyper-parameters that passed all checks; `document` uses `optim`, not its alias `optimizer`.

    Attributes:
        sections: What add-ons read from their sections, by key; the core does not use it.
    """

    document: Document
    schema: Schema
    optim: Component
    scheduler: Component
    sections: Mapping[str, Any]


def check(document: Document) -> Checked:
    """Check everything in `document`.

    Raises:
        HyperParameterError: Anything is invalid; the message lists every error.
    """
    # Drop what means "not set", such as `scheduler: none` and `max_samples: -1`.
    kept = {
        key: value
        for key, value in document.values.items()
        if not (key in _MAPPINGS and is_off(value) or key in _LIMITS and (is_off(value) or value == -1))
    }
    sizes = kept.get("batch_size")
    if isinstance(sizes, list | tuple) and sizes and sizes[0] is not None:
        kept["batch_size"] = [size for size in sizes if size is not None]
    document, faults = _with_primary_spelling(replace(document, values=kept))
    schema, schema_faults = None, []
    try:
        schema = Schema.model_validate(dict(document.values))
    except ValidationError as error:
        kinds = {_path(item["loc"]): item["type"] for item in error.errors()}
        schema_faults = [_fault(path, kind, document) for path, kind in kinds.items()]
    optim, optim_faults = _check_component(document, "optim", find_optimizer, check_optimizer)
    scheduler, scheduler_faults = _check_component(document, "scheduler", find_scheduler, check_scheduler)
    faults += [*document.faults, *schema_faults]
    epochs, max_steps = (document.values.get(key, -1) for key in ("epochs", "max_steps"))
    has_budget = any(document.values.get(key) is not None for key in ("max_samples", "max_target_tokens"))
    if epochs == max_steps == -1 and not has_budget:
        got = "-1 without max_steps" if "epochs" in document.values else _NOTHING
        expected = "a whole number of at least 1, or max_steps"
        faults.append(Fault(("epochs",), got, expected, "write `epochs: 3`, or `max_steps: 1000`"))
    if document.values.get("packing") is True and document.values.get("max_tokens") is None:
        expected = "packing together with max_tokens, the length of a row"
        do = "add for example `max_tokens: 4096`"
        faults.append(Fault(("packing",), "true, without max_tokens", expected, do))
    faults += [*optim_faults, *scheduler_faults]

    sections: dict[str, Any] = {}
    for name, value in document.values.items():
        if is_built_in(HPS_SECTIONS, name):
            sections[name], section_faults = find(HPS_SECTIONS, name)(value)
            faults += section_faults
    if faults or schema is None:
        raise document.reject(_without_misspelt(faults))
    return Checked(document, schema, optim, scheduler, sections)


def _without_misspelt(faults: Sequence[Fault]) -> list[Fault]:
    """Leave out missing keys that another error tells to write."""
    advice = " ".join(fault.do for fault in faults if fault.got != _NOTHING)
    kept = []
    for fault in faults:
        name = f"`{fault.path[0]}"
        is_key = fault.got == _NOTHING and len(fault.path) == 1
        if not is_key or (f"{name}`" not in advice and f"{name}:" not in advice):
            kept.append(fault)
    return kept


def _with_primary_spelling(document: Document) -> tuple[Document, list[Fault]]:
    """Return the document with `optim` in place of its alias `optimizer`."""
    if "optimizer" not in document.values:
        return document, []
    if "optim" in document.values:
        got = "both `optim` and its alias `optimizer`"
        rest = {key: value for key, value in document.values.items() if key != "optimizer"}
        return replace(document, values=rest), [Fault(("optimizer",), got, "one of them", "remove `optimizer`")]
    values = {_primary(key): value for key, value in document.values.items()}
    lines = {(_primary(path[0]), *path[1:]) if path else path: line for path, line in document.lines.items()}
    return replace(document, values=values, lines=lines), []


def _primary(key: Any) -> Any:
    return _OTHER_NAMES.get(key, key)


def _path(loc: KeyPath) -> KeyPath:
    """Return the key of a pydantic location, without union branches and list positions."""
    return loc[:2] if loc[1:2] == ("type",) else loc[:1]


def _fault(path: KeyPath, kind: str, document: Document) -> Fault:
    key = str(path[0])
    if kind == "extra_forbidden":
        names = list(Schema.model_fields)
        do = addon("hint_for_key")(key, document.values) or suggest(key, [*names, *_OTHER_NAMES], f"remove `{key}`")
        return Fault(path, f"{key} = {describe(document.values[key])}", f"one of {', '.join(names)}", do)
    info = Schema.model_fields[key]
    value = document.values.get(key)
    got = _NOTHING if kind == "missing" else describe(value["type"] if path[1:] and isinstance(value, dict) else value)
    expected = f"{info.description}, with its `type`" if path[1:] == ("type",) else str(info.description)
    return Fault(path, got, expected, f"write `{(info.examples or [''])[0]}`")


def _check_component(
    document: Document,
    key: str,
    find: Callable[[Any], Any],
    check_arguments: Callable[[Any, dict[str, Any]], tuple[dict[str, Any], list[Fault]]],
) -> tuple[Component, list[Fault]]:
    """Return an optimizer or scheduler and its errors; a value that is not a name is reported by the schema.

    Args:
        document: The hyper-parameters.
        key: "optim" or "scheduler".
        find: Returns the class for a name, or the error.
        check_arguments: Returns the arguments in the types of the class's signature, and their errors.
    """
    value = _as_dict(_as_mapping(document.values.get(key)))
    kind = value.get("type")
    if not (isinstance(kind, str) or callable(kind)):
        return Component(), []
    factory = find(kind)
    if isinstance(factory, Fault):
        return Component(kind), [factory]
    arguments, faults = check_arguments(factory, {str(name): value[name] for name in value if name != "type"})
    return Component(kind, factory, arguments), faults


def _as_dict(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _as_mapping(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) or callable(value) else value
