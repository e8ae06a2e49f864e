"""Changes of hyper-parameters between a checkpoint and the run that resumes from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from accmt.errors import HyperParameterError, fail
from accmt.options.checks import KeyFault
from accmt.options.hyperparameters import HyperParameters
from accmt.options.optimizer_and_scheduler_arguments import GROUPING, optimizer_arguments, parameters_of
from accmt.options.optimizer_and_scheduler_names import find_optimizer, find_scheduler
from accmt.options.yaml_reader import SECTIONS

Rule = Literal["apply", "keep", "reject"]

_SAID: dict[Rule, str] = {"apply": "applied", "keep": "not applied: the checkpoint's value stays", "reject": "rejected"}
_FINDERS: dict[str, Callable[[Any], Any]] = {"optim": find_optimizer, "scheduler": find_scheduler}


@dataclass(frozen=True)
class Change:
    """A setting that differs from the checkpoint's.

    Attributes:
        key: Its dotted key, `optim.lr`.
        old: The checkpoint's value, or the default where it is not set.
        new: The current value, likewise.
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
    """How a changed key is handled, and why.

    Attributes:
        pattern: The keys it applies to; `*` matches any string, and the first matching rule applies.
        rule: "apply" or "reject".
        why: The reason, used in the documentation.
    """

    pattern: str
    rule: Rule
    why: str


RULES = (
    KeyRule("epochs", "apply", "The run ends at another step, and the scheduler is rescaled to the new end."),
    KeyRule("max_steps", "apply", "Like `epochs`."),
    KeyRule("max_samples", "apply", "Like `epochs`."),
    KeyRule("max_target_tokens", "apply", "The run ends at another step."),
    KeyRule(
        "batch_size",
        "apply",
        "The position is counted in samples, so each sample is still used once per epoch. The number of steps changes, "
        "and the scheduler is rescaled to the new end.",
    ),
    KeyRule("max_micro_batch_size", "apply", "Batches are split differently, but steps stay the same."),
    KeyRule("max_tokens", "apply", "Like `max_micro_batch_size`."),
    KeyRule(
        "model",
        "apply",
        "Names and shapes of the weights are compared with the checkpoint, and frozen weights by digest.",
    ),
    KeyRule("sft", "apply", "The position is counted in samples, regardless of their content."),
    KeyRule("prefer", "apply", "Like `sft`. The reference must be the model that training started from."),
    KeyRule(
        "data",
        "apply",
        "New weights apply from the next step, and each source continues in its order. The sources must not change.",
    ),
    KeyRule("packing", "apply", "Like `max_micro_batch_size`; the first token of a packed document has no label."),
    KeyRule("evaluation", "apply", "It affects only evaluations."),
    KeyRule("step_scheduler_per_epoch", "reject", "The scheduler has counted in the other unit until now."),
    KeyRule("optim.type", "reject", "The optimizer's state belongs to another class."),
    KeyRule(
        "optim.lr",
        "apply",
        "From the next step, the rate is the same as if the run had used the new value from the start.",
    ),
    KeyRule(
        "optim.groups",
        "apply",
        "New values apply from the next step. The parameters of a group and its `type` must not change.",
    ),
    KeyRule("optim.*", "apply", "The new value applies from the next step, and the optimizer's state is kept."),
    KeyRule("scheduler.*", "reject", "A position in the old scheduler has no meaning in the new one."),
    KeyRule("*", "apply", "It is not part of a checkpoint."),
)
"""The first rule whose pattern matches a key applies."""


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, resets_optimizer: bool = False) -> list[Change]:
    """Return the differences, in the order of the keys.

    A missing key equals its default, and `16` equals `[16, 16]` for `batch_size`.

    Args:
        old: `HyperParameters.to_dict()` of the checkpoint, with or without the outer `hps`.
        new: The same for this run.
        resets_optimizer: Whether optimizer and scheduler start over, so that nothing has to be rejected.
    """
    # an older accmt may have written the checkpoint without keys that exist now: those have their defaults
    defaults = HyperParameters().to_dict()["hps"]
    for name in _FINDERS:
        del defaults[name]
    before = {**defaults, **old.get("hps", old)}
    after = {**defaults, **new.get("hps", new)}
    # A default that is written out is no change, but only the same class has the same defaults.
    same_kind = {name for name in _FINDERS if _kind(before, name) == _kind(after, name) is not None}
    was, is_now = _flat(before, same_kind), _flat(after, same_kind)
    changes = []
    for key in dict.fromkeys([*is_now, *was]):
        if not _is_same(key, was.get(key), is_now.get(key)):
            patterns = (item for item in RULES if fnmatchcase(key, item.pattern) or key.startswith(f"{item.pattern}."))
            # The last pattern matches every key.
            rule = next(patterns).rule
            if rule == "reject" and resets_optimizer:
                rule = "apply"
            changes.append(Change(key, was.get(key), is_now.get(key), rule))
    return changes


def changed_arguments(changes: Iterable[Change]) -> dict[str, tuple[Any, Any]]:
    """Return the optimizer arguments to apply: name to (old value, new value).

    If groups changed, this includes all arguments that any group sets, with None for both values.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    about_groups = []
    for change in changes:
        name = change.key.removeprefix("optim.")
        if change.rule != "apply" or name == change.key:
            continue
        if name in GROUPING:
            about_groups += [change.old, change.new]
        else:
            changed[name] = (change.old, change.new)
    # Without groups, each argument has one old and one new value; groups may set it differently.
    if not about_groups:
        return changed
    names = {"lr", "weight_decay", "name"}
    for groups in about_groups:
        if isinstance(groups, list):
            names.update(*(entry for entry in groups if isinstance(entry, Mapping)))
    return {**dict.fromkeys(names, (None, None)), **changed}


def require_allowed(changes: Iterable[Change], where: str) -> None:
    """Check that the run can resume with these changes.

    Args:
        changes: The result of `compare`.
        where: The source of the hyper-parameters, for the message.

    Raises:
        HyperParameterError: A change is rejected; the message lists every one.
    """
    rejected = []
    for change in changes:
        if change.rule == "reject":
            rejected.append(f"{change.key}: {_show(change.old)} -> {_show(change.new)}")
    # All at once: with the first alone, a user would correct and start again for each of them.
    if rejected:
        expected = "the checkpoint's values, which match the saved optimizer and scheduler state"
        do = (
            "restore the old values, start a new run with `resume=False`, or reset optimizer and scheduler: "
            'Trainer(checkpoint_options={"reset_optimizer_on_resume": True})'
        )
        raise fail(
            HyperParameterError,
            where,
            got=f"changed since the checkpoint: {', '.join(rejected)}",
            expected=expected,
            do=do,
        )


def _kind(side: Mapping[str, Any], component: str) -> Any:
    return (side.get(component) or {}).get("type")


def _flat(side: Mapping[str, Any], with_defaults: set[str]) -> dict[str, Any]:
    """Return all settings by dotted key, with argument defaults for the components `with_defaults`."""
    flat = {key: value for key, value in side.items() if key not in _FINDERS and key not in SECTIONS}
    for name, short in SECTIONS.items():
        section = side.get(name)
        if isinstance(section, str):
            section = {short: section}
        flat |= dict(_leaves(name, section or {}))
    for name in _FINDERS:
        arguments = side.get(name) or {}
        if name in with_defaults:
            arguments = _with_defaults(name, arguments)
        for argument, value in arguments.items():
            flat[f"{name}.{argument}"] = value
    return flat


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section at any depth, by dotted key."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _with_defaults(component: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a class's defaults. Only for classes that this run uses: others from the checkpoint are not imported."""
    factory = _FINDERS[component](values["type"])
    if isinstance(factory, KeyFault):  # a class passed as an object, without an import path
        return dict(values)
    parameters = parameters_of(factory)
    defaults = {name: _listed(item.default) for name, item in parameters.items() if item.default is not item.empty}
    # No warm-up, a ratio of 0 and 0 steps are the same schedule.
    if "num_warmup_steps" in parameters:
        defaults |= {"num_warmup_steps": 0, "warmup_ratio": 0}
    arguments = values
    if component == "optim":
        arguments = optimizer_arguments(factory, values)
    return {**values, **defaults, **arguments}


def _is_same(key: str, old: Any, new: Any) -> bool:
    if key == "batch_size":
        return _three_sizes(old) == _three_sizes(new)
    # A checkpoint is JSON, which turns the betas of Adam into a list.
    return bool(_listed(old) == _listed(new))


def _listed(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value


def _three_sizes(size: Any) -> list[int]:
    """Return the sizes for train, validation and test: a missing one equals the one before it."""
    sizes = list(size) if isinstance(size, list | tuple) else [size]
    return [*sizes, *[sizes[-1]] * (3 - len(sizes))]


def _show(value: Any) -> str:
    return "not set" if value is None else str(value)
