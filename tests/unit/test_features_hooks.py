"""The hooks of features: which there are, in which order they act, and that the loop knows none of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accmt.callbacks import callback
from accmt.features.listed import all_features
from accmt.run.features import HOOKS, Feature, Features

PACKAGE = Path(__file__).parents[2] / "accmt"
KNOWS_NONE = [*sorted((PACKAGE / "loop").glob("*.py")), PACKAGE / "run" / "run.py", PACKAGE / "setup" / "build.py"]
NAMES = re.compile(
    r"own_?loss|counts_targets|packing|bad_samples?|batch_(notes|faults)|trained_padding|quantized|crash_?loop"
    r"|loss_?guard|is_judged|ran_out_of_memory|OutOfMemory|halves_micro_batches|may_halve|roll_?back\b|spike"
    r"|manual_?steps|ExtendedAcceleratorModule|WeightAverage|using_average",
    re.IGNORECASE,
)
"""What features are called, in identifiers and imports."""


def every_feature() -> tuple[type[Feature], ...]:
    settings: Any = SimpleNamespace(is_set=lambda argument: True)
    return all_features(settings)


def test_the_order_of_features() -> None:
    assert [feature.name for feature in every_feature()] == [
        "out_of_memory",
        "loss_guard",
        "missing_gradients",
        "quantized_weights",
        "bad_samples",
        "packing_check",
        "own_loss",
        "batch_notes",
        "crash_loop",
        "changed_data",
        "launches",
        "fork_point",
        "flight_recorder",
        "examiner",
        "generation",
        "tasks",
        "timed_checkpoints",
        "goodput",
        "same_bits",
        "sources",
        "window_sums",
        "remote_models",
        "remote_checkpoints",
    ]


def test_every_feature_defines_a_hook_and_nothing_that_looks_like_one() -> None:
    for feature in every_feature():
        assert any(hook in vars(kind) for kind in feature.__mro__[:-2] for hook in HOOKS), feature


@pytest.mark.parametrize(
    ("owner", "known"),
    [("features", {*HOOKS, *vars(Features([], None)), *dir(Features)}), ("hooks", {*callback.HOOKS, "callbacks"})],
)
def test_the_hooks_that_are_called_exist(owner: str, known: set[str]) -> None:
    called = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and getattr(node.value, "attr", None) == owner:
                called.add(node.attr)
    assert len(called) > 5
    assert called <= known


def names_in(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        own = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module")]
        found |= {one for one in own if isinstance(one, str)}
    return {name for name in found if NAMES.search(name)}


@pytest.mark.parametrize("path", KNOWS_NONE, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_loop_and_the_building_of_a_run_name_no_feature(path: Path) -> None:
    assert names_in(path.read_text(encoding="utf-8")) == set()


def test_the_check_of_names_sees_imports_attributes_and_arguments() -> None:
    source = "from accmt.addons.own_loss import OwnLoss\nrun.own_loss\ndef f(own_loss): pass\nf(counts_targets=1)\n"
    assert names_in(source) == {"accmt.addons.own_loss", "OwnLoss", "own_loss", "counts_targets"}


class Noting(Feature):
    name = "noting"

    def __init__(self, run: Any) -> None:
        self.notes = run.notes

    @classmethod
    def for_run(cls, run: Any) -> Noting:
        return cls(run)

    def before_forward(self, batch: Any) -> None:
        self.notes.append(type(self).__name__)


class Other(Noting):
    name = "other"


class Absent(Noting):
    name = "absent"

    @classmethod
    def for_run(cls, run: Any) -> None:  # type: ignore[override]
        return None


def test_a_hook_is_a_tuple_of_the_methods_that_define_it_in_the_order_of_the_list() -> None:
    run: Any = SimpleNamespace(notes=[])
    features = Features((Other, Absent, Noting), run)
    assert [type(feature) for feature in features.all] == [Other, Noting]
    for hook in features.before_forward:
        hook(None)
    assert run.notes == ["Other", "Noting"]
    assert all(getattr(features, hook) == () for hook in HOOKS if hook != "before_forward")
