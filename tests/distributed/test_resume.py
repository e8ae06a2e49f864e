"""Runs that continue on another number of processes, or on the same: every sample once, in one global order."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.scripts.resume import EPOCHS, SAMPLES
from tests.launching import SCRIPTS, launch

Outcome = dict[str, Any]


def train(folder: Path, processes: int | str, *parts: tuple[Any, ...]) -> list[Outcome]:
    """Train parts (folder, batch size, accumulation, update to stop at, settings) in one launch."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    placed = [[str(folder / name), *part] for name, *part in parts]
    launch(SCRIPTS / "resume.py", str(result), json.dumps(placed), processes=processes, result=result)
    outcomes: list[Outcome] = json.loads(result.read_text())
    return outcomes


def order_of(outcome: dict[str, Any], *, until: dict[str, Any] | None = None) -> list[list[int]]:
    """Return the samples of each epoch in the global order: micro-batch by micro-batch, process by process.

    Args:
        outcome: What the script wrote.
        until: Counters of the checkpoint that the next part began from; what was trained on later is left out.
    """
    places = [
        (epoch, micro_batch, process, samples)
        for process, seen in enumerate(outcome["seen"])
        for epoch, micro_batch, samples in seen
        if until is None or (epoch, micro_batch) < (until["epoch"], until["train_step"])
    ]
    order: list[list[int]] = [[] for _ in range(EPOCHS)]
    for epoch, group in groupby(sorted(places), key=lambda place: place[0]):
        order[epoch] = [sample for *_, samples in group for sample in samples]
    return order


def test_four_two_three_and_one_process_see_every_sample_once_in_one_order(tmp_path) -> None:
    parts = [
        *train(tmp_path, 4, ("a", 3, 1, 4)),
        *train(tmp_path, 2, ("a", 3, 2, 7)),
        *train(tmp_path, 3, ("a", 4, 1, 13)),
        *train(tmp_path, 1, ("a", 12, 1, None), ("unbroken", 12, 1, None)),
    ]
    unbroken = parts.pop()
    began = [part["began"] for part in parts]
    assert [counters["global_step"] for counters in began] == [0, 4, 7, 13]
    assert [counters["samples_seen"] for counters in began] == [0, 48, 84, SAMPLES + 36]
    order: list[list[int]] = [[] for _ in range(EPOCHS)]
    for part, until in zip(parts, [*began[1:], None], strict=True):
        order = [before + here for before, here in zip(order, order_of(part, until=until), strict=True)]
    assert order == order_of(unbroken)
    assert [sorted(epoch) for epoch in order] == [list(range(SAMPLES))] * EPOCHS
    assert {part["total"] for part in parts} == {20}
    assert parts[-1]["ended"]["global_step"] == unbroken["ended"]["global_step"] == 20
    assert parts[-1]["ended"]["samples_seen"] == EPOCHS * SAMPLES


KEPT_GRADIENTS = {"set_to_none": False, "parallelism": {"ddp": {"gradient_as_bucket_view": True}}}


def num_data_of(processes: int | str) -> int:
    """Return over how many processes the data of a launch are divided."""
    number = int(str(processes)[-1])
    return number // 2 if str(processes).startswith("tp") else number


@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (3, {}),
        pytest.param(3, KEPT_GRADIENTS, marks=pytest.mark.slow),
        ("fsdp-2", {}),
        pytest.param("tpfsdp-4", {}, marks=[pytest.mark.slow, pytest.mark.repeats]),
    ],
)
def test_the_same_processes_end_with_the_same_bits(tmp_path, processes, settings) -> None:
    settings = {**settings, "drifts": True}
    parts = [(name, 5, 2, stop, settings) for name, stop in (("a", None), ("b", 2), ("b", 4), ("b", None))]
    whole, *_, resumed = train(tmp_path, processes, *parts)
    assert resumed["began"]["global_step"] == 4
    assert (resumed["weights"], resumed["ended"]) == (whole["weights"], whole["ended"])


def test_the_effective_batch_decides_how_many_updates_are_left(tmp_path) -> None:
    train(tmp_path, 2, ("a", 6, 1, 4))
    (rest,) = train(tmp_path, 1, ("a", 6, 1, None))
    assert rest["began"]["lr"] < 1e-3
    assert rest["total"] == 4 + 12 + 20  # 70 samples of the first epoch are left, and 118 of the second, by 6
    assert rest["ended"]["global_step"] == rest["total"]
    assert rest["ended"]["samples_seen"] == EPOCHS * SAMPLES


@pytest.mark.parametrize(
    "launches",
    [
        ("fsdp-2", 1, "hsdp-4", "fsdp-3", 2),
        pytest.param(("tp-2", "tpfsdp-4", 1, "tp-2"), marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_from_one_engine_and_number_of_processes_to_another(tmp_path, launches) -> None:
    size, parts, settings = 12, [], {"dropout": 0.0}
    for stop, processes in zip([*range(3, 3 * len(launches), 3), None], launches, strict=True):
        parts += train(tmp_path, processes, ("a", size // num_data_of(processes), 1, stop, settings))
    (unbroken,) = train(tmp_path, 1, ("unbroken", size, 1, None, settings))
    order: list[list[int]] = [[] for _ in range(EPOCHS)]
    for part, until in zip(parts, [*(part["began"] for part in parts[1:]), None], strict=True):
        order = [before + here for before, here in zip(order, order_of(part, until=until), strict=True)]
    assert order == order_of(unbroken)
    assert parts[-1]["last_loss"] == pytest.approx(unbroken["last_loss"], rel=1e-5)
