"""What changed in the hyper-parameters since a checkpoint, and what becomes of each change when the run continues."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from accmt.errors import HyperParameterError, explain
from accmt.options.grouping import GROUPING
from accmt.options.hyperparameters import HyperParameters
from accmt.options.optimizer_and_scheduler_arguments import optimizer_arguments, parameters_of
from accmt.options.optimizer_and_scheduler_names import find_optimizer, find_scheduler
from accmt.options.yaml_reader import Fault

Rule = Literal["apply", "keep", "reject"]

_SAID: dict[Rule, str] = {"apply": "applied", "keep": "not applied: the checkpoint's stays", "reject": "rejected"}
_FINDERS: dict[str, Callable[[Any], Any]] = {"optim": find_optimizer, "scheduler": find_scheduler}
_SECTIONS = {"model": "path", "sft": "data"}
"""Keys that have others in them, and what a string in their place is."""


@dataclass(frozen=True)
class Change:
    """One setting that differs from the checkpoint's.

    Attributes:
        key: Its dotted key, `optim.lr`.
        old: The value in the checkpoint; where it was left out, the default.
        new: The value now, likewise.
        rule: "apply" the new value, "keep" the old one, or "reject" to continue.
    """

    key: str
    old: Any
    new: Any
    rule: Rule

    def __str__(self) -> str:
        return f"{self.key}: {_show(self.old)} -> {_show(self.new)} ({_SAID[self.rule]})"


@dataclass(frozen=True)
class KeyRule:
    """What becomes of a changed key, and why.

    Attributes:
        pattern: The keys it is for, `*` standing for any string; of several rules the first one counts.
        rule: "apply" or "reject".
        why: The reason, as the documentation gives it.
    """

    pattern: str
    rule: Rule
    why: str


RULES = (
    KeyRule("epochs", "apply", "The run ends elsewhere, and the scheduler is stretched to the new end."),
    KeyRule("max_steps", "apply", "As `epochs`."),
    KeyRule("max_samples", "apply", "As `epochs`."),
    KeyRule("max_target_tokens", "apply", "The run ends elsewhere."),
    KeyRule(
        "batch_size",
        "apply",
        "The position counts samples, so each is still seen once an epoch; the number of steps changes, and the "
        "scheduler is stretched to the new end.",
    ),
    KeyRule("max_micro_batch_size", "apply", "Batches are split differently; steps stay the same."),
    KeyRule("max_tokens", "apply", "As `max_micro_batch_size`."),
    KeyRule("model", "apply", "Its weights are held against the checkpoint's: names, shapes, digests of frozen ones."),
    KeyRule("sft", "apply", "The position counts samples, whatever they hold now."),
    KeyRule("packing", "apply", "As `max_micro_batch_size`; the first token of a document has no label then."),
    KeyRule("step_scheduler_per_epoch", "reject", "The scheduler has counted in the other unit so far."),
    KeyRule("optim.type", "reject", "The optimizer's state belongs to the other class."),
    KeyRule("optim.lr", "apply", "From here on the rate is the one of a run that had the new value from its start."),
    KeyRule(
        "optim.groups",
        "apply",
        "Their values hold from the next step on; which parameters are in a group, and its `type`, have to stay.",
    ),
    KeyRule("optim.*", "apply", "Holds from the next step on; the optimizer's state stays."),
    KeyRule("scheduler.*", "reject", "A position in the old scheduler means nothing in the new one."),
    KeyRule("*", "apply", "It is no part of what a checkpoint holds."),
)
"""The first rule whose pattern fits a key decides about it."""


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, resets_optimizer: bool = False) -> list[Change]:
    """Return what differs, in the order of the keys.

    Leaving a key out and writing its default is the same, as are `16` and `[16, 16]` for `batch_size`.

    Args:
        old: `HyperParameters.to_dict()` of the checkpoint, with or without the outer `hps`.
        new: The same of this run.
        resets_optimizer: Whether optimizer and scheduler start again, so that nothing has to be rejected.
    """
    sides = [{**_standard(), **side.get("hps", side)} for side in (old, new)]
    same_kind = {name for name in _FINDERS if _kind(sides[0], name) == _kind(sides[1], name) is not None}
    was, is_now = (_flat(side, same_kind) for side in sides)
    return [
        Change(key, was.get(key), is_now.get(key), _rule_of(key, resets_optimizer=resets_optimizer))
        for key in dict.fromkeys([*is_now, *was])
        if not _is_same(key, was.get(key), is_now.get(key))
    ]


def changed_arguments(changes: Iterable[Change]) -> dict[str, tuple[Any, Any]]:
    """Return the optimizer's arguments that are to be applied: name to (old value, new value).

    Of changed groups these are all arguments that a group has of its own, with None for both values.
    """
    changed = {
        change.key.removeprefix("optim."): (change.old, change.new)
        for change in changes
        if change.key.startswith("optim.") and change.rule == "apply"
    }
    about_groups = [pair for name, pair in changed.items() if name in GROUPING]
    if not about_groups:
        return changed
    lists = [value for pair in about_groups for value in pair if isinstance(value, list)]
    names = {name for groups in lists for entry in groups if isinstance(entry, Mapping) for name in entry}
    own = dict.fromkeys({"lr", "weight_decay", "name", *names}, (None, None))
    return {**own, **{name: pair for name, pair in changed.items() if name not in GROUPING}}


def require_allowed(changes: Iterable[Change], where: str) -> None:
    """Check that the run can continue with all that changed.

    Args:
        changes: What `compare` returned.
        where: What was changed, for the message: the source of the hyper-parameters.

    Raises:
        HyperParameterError: A change is rejected; the message lists every one.
    """
    wrong = [change for change in changes if _is_rejected(change)]
    rejected = [f"{change.key}: {_show(change.old)} -> {_show(change.new)}" for change in wrong]
    if rejected:
        expected = "the checkpoint's values, which the state of optimizer and scheduler belongs to"
        do = (
            "put the old values back, start optimizer and scheduler again with `reset_optimizer_on_resume=True`, "
            "or begin a new run with `resume=False`"
        )
        raise HyperParameterError(explain(where, f"changed since the checkpoint: {', '.join(rejected)}", expected, do))


def rules_table() -> str:
    """Return the rules as the Markdown table of the documentation."""
    rows = [f"| {_name(item.pattern)} | {_verdict(item.rule)} | {item.why} |" for item in RULES]
    return "\n".join(["| key | when it changed | why |", "|---|---|---|", *rows]) + "\n"


def _name(pattern: str) -> str:
    if pattern == "*":
        return "any other key"
    return f"other `{pattern}`" if pattern == "optim.*" else f"`{pattern}`"


def _verdict(rule: Rule) -> str:
    return "reject, unless `reset_optimizer_on_resume=True`" if rule == "reject" else rule


def _rule_of(key: str, *, resets_optimizer: bool) -> Rule:
    rule = next(item.rule for item in RULES if fnmatchcase(key, item.pattern) or key.startswith(f"{item.pattern}."))
    return "apply" if rule == "reject" and resets_optimizer else rule


def _is_rejected(change: Change) -> bool:
    return change.rule == "reject"


def _standard() -> dict[str, Any]:
    """Return the values of keys that are left out, such as one that the writer of the checkpoint did not know yet."""
    return {key: value for key, value in HyperParameters().to_dict()["hps"].items() if key not in _FINDERS}


def _kind(side: Mapping[str, Any], component: str) -> Any:
    return (side.get(component) or {}).get("type")


def _flat(side: Mapping[str, Any], with_defaults: set[str]) -> dict[str, Any]:
    """Return all settings by dotted key, with the defaults of the arguments of some components."""
    flat = {key: value for key, value in side.items() if key not in _FINDERS and key not in _SECTIONS}
    for name, short in _SECTIONS.items():
        section = side.get(name)
        flat |= dict(_leaves(name, {short: section} if isinstance(section, str) else section or {}))
    for name in _FINDERS:
        arguments = side.get(name) or {}
        if name in with_defaults:
            arguments = _with_defaults(name, arguments)
        flat |= {f"{name}.{argument}": value for argument, value in arguments.items()}
    return flat


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in a section, however deep, by dotted key."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _with_defaults(component: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of a class that this run uses too: one that only a checkpoint names is not imported."""
    factory = _FINDERS[component](values["type"])
    if isinstance(factory, Fault):  # a class that was passed as an object, and has no import path
        return dict(values)
    parameters = parameters_of(factory)
    defaults = {name: _listed(item.default) for name, item in parameters.items() if item.default is not item.empty}
    if "num_warmup_steps" in parameters:
        defaults |= {"num_warmup_steps": 0, "warmup_ratio": 0}
    return {**values, **defaults, **(optimizer_arguments(factory, values) if component == "optim" else values)}


def _is_same(key: str, old: Any, new: Any) -> bool:
    if key == "batch_size":
        return _three_sizes(old) == _three_sizes(new)
    return bool(_listed(old) == _listed(new))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _three_sizes(size: Any) -> list[int]:
    """Return the sizes for train, validation and test: one that is left out equals the one before it."""
    sizes = list(size) if isinstance(size, list | tuple) else [size]
    return [*sizes, *[sizes[-1]] * (3 - len(sizes))]


def _show(value: Any) -> str:
    return "not set" if value is None else str(value)
