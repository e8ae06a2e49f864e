"""Replicas of a model stay equal whatever a program draws, and a difference between them ends the run, named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accmt.callbacks.callback import HOOKS, ONCE_PER_BATCH
from tests.launching import SCRIPTS, launch

NOISY = ("on_fit_start", "on_epoch_start", "on_before_optimizer_step", "on_update_end", "on_evaluation_start")
NOISY_TEXTS = ("texts noise in on_after_optimizer_step", "texts noise in on_validation_end")
CHANGED = {
    "changed at once": ("2.bias differs between process 0 and process 1 since between step 0 and step 1", []),
    "changed later": ("2.bias differs between process 0 and process 1 since between step 2 and step 4", ["2"]),
    "swapped": ("0.weight differs between process 0 and process 1 since between step 4 and step 6", []),
    "state": ("the optimizer's exp_avg of 0.weight differs between process 0 and process 1", ["2"]),
    "rate": ("lr of the optimizer's group 0 differs between process 0 and process 1", ["2"]),
}
LAUNCHES = {
    "ddp-2": (
        *(f"points noise in {hook}" for hook in NOISY),
        *(
            "gradient noise",
            "langevin",
            "batch norm",
            "manual",
            "on purpose",
            "own backward",
            "max_norm",
            "unused",
            "unused later",
            "dropped",
            "unused and found",
        ),
        *CHANGED,
    ),
    "hsdp-4": (*NOISY_TEXTS, "texts", "texts changed"),
    "tp-2": (*NOISY_TEXTS, "texts", "split texts changed"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = {}
    for way, names in LAUNCHES.items():
        folder = tmp_path_factory.mktemp("replicas")
        path = folder / "result.json"
        launch(SCRIPTS / "replicas.py", str(path), str(folder), *names, processes=way, result=path)
        found[way] = json.loads(path.read_text())
    return found


EQUAL = [
    (way, name)
    for way, names in LAUNCHES.items()
    for name in names
    if "noise" in name or name in ("langevin", "batch norm", "manual", "texts", "unused and found", "dropped")
]


@pytest.mark.parametrize(("way", "name"), EQUAL)
def test_what_hooks_and_optimizers_draw_is_the_same_on_every_process(outcomes, way: str, name: str) -> None:
    every = outcomes[way][name]
    assert [facts["error"] for facts in every] == [""] * len(every)
    assert [facts["step"] for facts in every] == [6] * len(every)
    assert all(facts["weights"] == every[0]["weights"] for facts in every)


def test_what_a_batch_draws_after_a_manual_step_differs_between_processes(outcomes) -> None:
    drawn = [facts["drawn"] for facts in outcomes["ddp-2"]["manual"]]
    assert len(drawn[0]) == 6
    assert not set(drawn[0]) & set(drawn[1])


@pytest.mark.parametrize("name", CHANGED)
def test_a_difference_ends_the_run_and_is_in_no_checkpoint(outcomes, name: str) -> None:
    message, checkpoints = CHANGED[name]
    for facts in outcomes["ddp-2"][name]:
        assert facts["error"].startswith("ReplicasDifferError: replicas of the model")
        assert message in facts["error"]
        assert facts["checkpoints"] == [f"step-{int(step):08}" for step in checkpoints]


def test_replicas_may_differ_where_that_is_asked_for(outcomes) -> None:
    every = outcomes["ddp-2"]["on purpose"]
    assert [facts["error"] for facts in every] == ["", ""]
    assert every[0]["weights"] != every[1]["weights"]


@pytest.mark.parametrize(("way", "name"), [("hsdp-4", "texts changed"), ("tp-2", "split texts changed")])
def test_sharded_and_split_replicas_are_compared(outcomes, way: str, name: str) -> None:
    for facts in outcomes[way][name]:
        assert "ReplicasDifferError" in facts["error"]
        assert "got: model.norm.weight differs between process" in facts["error"]


def test_known_causes_are_refused_before_the_first_step(outcomes) -> None:
    backward, max_norm = (outcomes["ddp-2"][name] for name in ("own backward", "max_norm"))
    for facts in backward:
        assert "calls backward itself: 0.weight has a gradient" in facts["error"]
        assert "ExtendedAcceleratorModule" in facts["error"]
    for facts in max_norm:
        assert "self.model.0\n  got: max_norm=1.0" in facts["error"]
        assert "renorm_(2, 0, 1)" in facts["error"]
    assert all(facts["step"] == 0 for facts in (*backward, *max_norm))


def test_parameters_without_a_gradient_are_named_before_a_step_by_gradients_that_differ(outcomes) -> None:
    for facts in outcomes["ddp-2"]["unused"]:
        assert "ModuleContractError: training_step\n  got: no gradient for pooler.weight, pooler.bias" in facts["error"]
        assert "find_unused_parameters" in facts["error"]
        assert facts["step"] == 0
    for facts in outcomes["ddp-2"]["unused later"]:
        assert facts["error"].startswith("RuntimeError: Expected to have finished reduction")
        assert "[accmt] the previous step's loss did not depend on all trained parameters" in facts["error"]


def test_hooks_of_a_batch_are_hooks() -> None:
    assert set(HOOKS) > ONCE_PER_BATCH
    assert len(ONCE_PER_BATCH) == 6
