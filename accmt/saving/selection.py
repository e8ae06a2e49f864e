"""Which evaluations' weights are kept, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accmt.saving.rules import TRAIN_LOSS, Argument, IsBetter, Quantities, Quantity, Rule

_MODEL_SAVING = Argument("model_saving")
LAST = "last"
"""The name of the weights at the end of a run, among those that could not be written."""

Limit = float | Mapping[str, float] | None
"""A number for every value that decides, one for each by name, or None."""


@dataclass(frozen=True)
class _Saving:
    """One rule, and the bounds between which it saves.

    Attributes:
        lower: What values must be above, by the label of their quantity.
        upper: What they must be below.
    """

    rule: Rule
    lower: Mapping[str, float]
    upper: Mapping[str, float]

    def allows(self, values: Mapping[str, float]) -> bool:
        return all(
            self.lower.get(quantity.label, -math.inf) < quantity.read(values) < self.upper.get(quantity.label, math.inf)
            for quantity in self.rule.quantities
        )


class Selection:
    """Remembers the best values of what models are saved by, and says when the model should be saved.

    A value that is not finite is never best; of equal ones the first stays, unless the metric compares with >= or <=.
    Thresholds hold back saving, not the best value: a best one that is not between them is remembered all the same.

    Args:
        rule: "best_valid_loss", "best_train_loss", "best_<metric>", "always", None for never, or a list of them.
            Of several validation sets "best_<metric>" is the mean, "best_<metric>@<set>" (or "__<set>") one of them;
            "best_<metric>/<metric>" saves if both are better than at its last best.
        below: Saves only while the value that decides is below this; a dict names the values.
        above: Saves only while the value that decides is above this; a dict names the values.

    Attributes:
        best: The best values so far: by a rule's name, or `<rule>[<metric>]` of a rule with several.
        unsaved: By the rule's name, or `LAST`, each step whose model could not be written, and why.
    """

    def __init__(
        self,
        rule: str | Sequence[str] | None,
        directions: Mapping[str, IsBetter],
        *,
        sets: Sequence[str] | None = None,
        below: Limit = None,
        above: Limit = None,
    ) -> None:
        self._quantities = Quantities(directions, sets)
        self._savings: list[_Saving] = []
        self._chosen: set[str] = set()
        self._saved_at: dict[str, int] = {}
        self.unsaved: dict[str, dict[int, str]] = {}
        self.best: dict[str, float] = {}
        self._add(self._quantities.read_rules(rule, _MODEL_SAVING), below, above, _MODEL_SAVING)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the rules, each with its one spelling: "best_accuracy@en" for "best_accuracy__en"."""
        return tuple(saving.rule.name for saving in self._savings)

    @property
    def rule(self) -> str | None:
        """The rules, joined by commas; None where nothing is ever saved."""
        return ", ".join(self.names) or None

    @property
    def directions(self) -> Mapping[str, IsBetter]:
        """Whether a new value is better than an old one, by the label of each quantity that there is."""
        return self._quantities.directions

    def find_quantity(self, name: str) -> Quantity | None:
        """Return a value of evaluations by its name, such as "accuracy" or "valid_loss"; None if there is none."""
        return self._quantities.find_quantity(name)

    @property
    def has_saved(self) -> bool:
        """Whether a rule has had the model saved since the start of the run."""
        return bool(self._chosen)

    @property
    def needs_validation(self) -> bool:
        """Whether a rule looks at results of validation."""
        return any(quantity.key != TRAIN_LOSS for saving in self._savings for quantity in saving.rule.quantities)

    def register(self, name: str, *, below: Limit = None, above: Limit = None) -> None:
        """Add a rule with thresholds of its own."""
        argument = Argument("name", call="register_model_saving")
        rules = self._quantities.read_rules([name], argument)
        if rules[0].name in self.names:
            argument.reject(repr(name), f"another rule than {self.rule}, already there", "leave it out")
        self._add(rules, below, above, Argument("saving", call="register_model_saving"))

    def folder(self, model_path: Path, name: str) -> Path:
        """Return where the model of a rule is saved: `model_path` itself if it is the only rule, else a folder in it.

        The folder has the name of the rule, with "+" for "/".
        """
        return model_path if len(self._savings) == 1 else model_path / name.replace("/", "+")

    def consider(self, values: Mapping[str, float], *, step: int = 0) -> list[str]:
        """Take note of an evaluation, and return the names of the rules by which the weights should be saved.

        Args:
            values: Its results as `name_by_rules` gives them. Where one that decides is missing, nothing is noted.
            step: The optimizer step that it came after.
        """
        self.require(values)
        new_best = [saving for saving in self._savings if saving.rule.update(self.best, values)]
        chosen = [saving.rule.name for saving in new_best if saving.allows(values)]
        self._chosen.update(chosen)
        for saving in new_best:  # a best value that thresholds held back has no model, whatever an earlier one has
            self._saved_at.pop(saving.rule.name, None)
        self._saved_at |= dict.fromkeys(chosen, step)
        return chosen

    def saved_at(self, key: str) -> int | None:
        """Return the optimizer step of the model that has a best value, by its key in `best`; None if there is none."""
        return self._saved_at.get(key.partition("[")[0])

    def require(self, values: Mapping[str, float]) -> None:
        """Check that all values that decide are among the results of an evaluation."""
        for saving in self._savings:
            saving.rule.require(values, _MODEL_SAVING)

    def explain_unsaved(self) -> list[str]:
        """Return, for each rule that saved nothing since the start of the run, why it did not."""
        return [
            f"{rule.name} was never between its thresholds when it was best (its best: {self._describe_best(rule)})"
            if rule.keys[0] in self.best
            else f"{rule.name} was never finite"
            for rule in (saving.rule for saving in self._savings)
            if rule.quantities and rule.name not in self._chosen
        ]

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "best": dict(self.best),
            "chosen": sorted(self._chosen),
            "saved_at": dict(self._saved_at),
        }
        if self.unsaved:
            state["unsaved"] = {name: dict(steps) for name, steps in self.unsaved.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned; a rule that was not there starts over, one that is gone is dropped."""
        keys = {key for saving in self._savings for key in saving.rule.keys}
        self.best.clear()
        self.best.update({key: value for key, value in state["best"].items() if key in keys})
        self._chosen = set(state["chosen"]) & set(self.names)
        self._saved_at = {name: step for name, step in state["saved_at"].items() if name in self.names}
        unsaved = state.get("unsaved", {})
        self.unsaved = {name: dict(unsaved[name]) for name in unsaved if name in (*self.names, LAST)}

    def forget(self, holds_its_model: Callable[[str], bool]) -> list[str]:
        """Forget the best values of models that are not where they were saved, so that the next one is the best.

        What is returned names these rules, and what each had.
        """
        gone = [
            saving.rule
            for saving in self._savings
            if saving.rule.quantities and saving.rule.name in self._chosen and not holds_its_model(saving.rule.name)
        ]
        described = [f"{rule.name} ({self._describe_best(rule)})" for rule in gone]
        for rule in gone:
            self._chosen.discard(rule.name)
            self._saved_at.pop(rule.name, None)
            for key in rule.keys:
                self.best.pop(key, None)
        return described

    def _describe_best(self, rule: Rule) -> str:
        return ", ".join(f"{self.best[key]:.6g}" for key in rule.keys)

    def _add(self, rules: list[Rule], below: Limit, above: Limit, argument: Argument) -> None:
        lower = self._read_limit(above, rules, replace(argument, name=f"{argument.name}_above"))
        upper = self._read_limit(below, rules, replace(argument, name=f"{argument.name}_below"))
        for label in lower.keys() & upper.keys():
            if lower[label] >= upper[label]:
                got = f"{label} above {lower[label]} and below {upper[label]}"
                argument.reject(got, "a lower bound below the upper one", "swap them, or leave one out")
        self._savings += [_Saving(rule, lower, upper) for rule in rules]

    def _read_limit(self, limit: Limit, rules: list[Rule], argument: Argument) -> dict[str, float]:
        if limit is None or not rules:  # where nothing is saved, all that is saved keeps the bounds
            return {}
        labels = [quantity.label for rule in rules for quantity in rule.quantities]
        if isinstance(limit, Mapping):
            bounds = {self._read_label(name, labels, argument): bound for name, bound in limit.items()}
        else:
            bounds = dict.fromkeys(labels, limit)
        if not bounds:
            got = f"{limit!r}, and {', '.join(rule.name for rule in rules)}, which looks at no value"
            argument.reject(got, "a value for each name, and a rule that looks at one", "leave it out")
        for bound in bounds.values():
            if isinstance(bound, bool) or not isinstance(bound, int | float) or math.isnan(bound):
                argument.reject(f"{bound!r} ({type(bound).__name__})", "a number", f"{argument.name}=0.5, for example")
        return bounds

    def _read_label(self, name: str, labels: list[str], argument: Argument) -> str:
        label = self._quantities.read_rule(name, argument).name.removeprefix("best_")
        if label not in labels:
            expected = f"a value that decides: {', '.join(labels) or 'there is none'}"
            argument.reject(repr(name), expected, "name one of these, or leave it out")
        return label
