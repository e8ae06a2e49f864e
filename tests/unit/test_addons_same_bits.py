"""The same bits on any number of processes: the plan of units, sums in a tree, the norm, and what is rejected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accmt import AcceleratorModule, Callback
from accmt.addons.same_bits import feature
from accmt.addons.same_bits.sums import UnitSum, add_in_tree, total_norm
from accmt.addons.same_bits.units import Layout, UnitPlan
from accmt.data import Shard
from accmt.engine.base import Alone
from accmt.errors import ArgumentError, CheckpointError, ModuleContractError
from tests.toys import ByHand, InterruptAt, InterruptionError, Linear, Stream, make_points, make_trainer

COUNTS = (1, 2, 4, 8)


def plans_of(layout: Layout, num_samples: int, count: int, size: int = 3, **begin: int) -> list[UnitPlan]:
    """Return the plan of each process."""
    return [UnitPlan(num_samples, size, Shard(index, count), layout=layout, **begin) for index in range(count)]


def units_of(plan: UnitPlan) -> dict[int, range]:
    """Return this process's samples by unit, of which each is named by its seed."""
    return {part.unit: part.own for part in plan.cut(plan.first_micro_batch) if part.own and part.unit is not None}


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_samples", [1, 3, 23, 24, 25, 43, 96])
@pytest.mark.parametrize("begin", [{}, {"first_micro_batch": 8, "first_sample": 24}])
def test_units_have_the_same_samples_and_seeds_on_any_number_of_processes(
    num_samples: int, begin: dict[str, int], *, is_interleaved: bool
) -> None:
    layout, num_samples = Layout(8, is_interleaved), num_samples + begin.get("first_sample", 0)
    alone = units_of(plans_of(layout, num_samples, 1, **begin)[0])
    assert sorted(chain(*alone.values())) == list(range(begin.get("first_sample", 0), num_samples))
    for count in COUNTS:
        plans = plans_of(layout, num_samples, count, **begin)
        units = [units_of(plan) for plan in plans]
        assert dict(chain(*(of_process.items() for of_process in units))) == alone
        assert sum(map(len, units)) == len(alone)  # none twice
        parts = [list(plan.cut(plan.first_micro_batch)) for plan in plans]
        for of_round in zip(*parts, strict=True):  # the processes agree in what they do together
            assert len({part._replace(own=range(0), unit=None) for part in of_round}) == 1
            assert of_round[0].is_partial == (not all(part.own for part in of_round))
        assert [plan.count(plan.first_micro_batch) for plan in plans] == list(map(len, units))
        indices = [index for plan in plans for part in plan.cut(plan.first_micro_batch) for index in [part.number]]
        assert all(
            plan.local_indices(part.number) == part.own for plan in plans for part in plan.cut(plan.first_micro_batch)
        )
        assert max(indices) < plans[0].num_micro_batches
        assert sum(part.num_finished for part in parts[0]) == len(alone)
        assert [part.ends_batch for part in parts[0]].count(True) == -(-len(alone) // 8)


def gradients_of(unit: int) -> list[torch.Tensor | None]:
    """Return gradients of which the last is not there in every unit."""
    generator = torch.Generator().manual_seed(unit)
    first, second = torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)
    return [first, second if unit % 3 else None]


def sum_of(units: list[int]) -> list[torch.Tensor]:
    """Return the sum of units as one process adds them up, zeros where it has none."""
    sums = UnitSum()
    for unit in units:
        sums.add(gradients_of(unit))
    taken = sums.take() or [None, None]
    zeros = torch.zeros(5, 3), torch.zeros(7)
    return [zero if part is None else part for part, zero in zip(taken, zeros, strict=True)]


@pytest.mark.parametrize("num_units", range(1, 9))
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_processes_are_those_of_one(num_units: int, count: int) -> None:
    expected = sum_of(list(range(num_units)))
    per_process = 8 // count
    parts = [
        sum_of([unit for unit in range(rank * per_process, (rank + 1) * per_process) if unit < num_units])
        for rank in range(count)
    ]
    for index, whole in enumerate(expected):
        assert torch.equal(add_in_tree([part[index] for part in parts]), whole)
    # Sharded: rounds of neighboring units, each of which is summed over the processes at once.
    rounds = UnitSum()
    for first in range(0, -(-num_units // count) * count, count):
        of_round = [sum_of([unit] if unit < num_units else []) for unit in range(first, first + count)]
        rounds.add([add_in_tree([part[index] for part in of_round]) for index in range(2)])
    for whole, part in zip(expected, rounds.take() or [], strict=True):
        assert part is not None
        assert torch.equal(part, whole)


def test_a_sum_of_units_keeps_a_few_of_them_and_its_order_matters() -> None:
    sums = UnitSum()
    for unit in range(64):
        sums.add(gradients_of(unit))
        assert len(sums._sums) <= 7
    total = sums.take()
    assert total is not None
    assert total[0] is not None
    one_by_one = sum(gradients_of(unit)[0] for unit in range(64))
    assert not torch.equal(total[0], one_by_one)
    torch.testing.assert_close(total[0], one_by_one)
    assert sums.take() is None


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_a_norm_is_that_of_torch_however_rows_are_divided(order: float) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for shape in [(9, 33), (17,), (2, 3, 5), ()]]
    norm = total_norm(whole, order)
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(whole, order))
    assert norm.dtype == torch.float32
    for count in COUNTS:  # rows of one tensor as tensors of their own
        assert torch.equal(norm, total_norm([*whole[0].chunk(count), *whole[1].chunk(count), *whole[2:]], order))


class Averaging(AcceleratorModule):
    """Has a dropout that changes nothing, and gradients that a hook writes down."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def step(self, batch: Any) -> Any:
        inputs, targets = batch
        mask = inputs[:, :1] > 0
        losses = (self.model(inputs) - targets).square()
        return {"loss": (losses * mask).sum() / mask.sum(), "weight": mask.sum()}


class Gradients(Callback):
    """Writes down the gradients of the first step."""

    gradients: tuple[torch.Tensor, ...] = ()

    def on_before_optimizer_step(self, **_: Any) -> None:
        if not self.gradients:
            self.gradients = tuple(p.grad.clone() for p in self.module.model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("num_samples", "accumulation"), [(32, 1), (32, 2), (43, 3)])
def test_gradients_are_those_of_one_big_batch(num_samples: int, accumulation: int) -> None:
    points, seen = make_points(num_samples), Gradients()
    settings = {"same_bits": 8, "grad_accumulation_steps": accumulation, "shuffle_train": False}
    make_trainer({"batch_size": 16}, callbacks=[seen], **settings).fit(Averaging(), points)
    module = Averaging()
    module.step(points[: 16 * accumulation])["loss"].backward()
    for gradient, parameter in zip(seen.gradients, module.model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-6)


class WithSign(Averaging):
    """Has an entry whose gradient is -0."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_parameter("unused", nn.Parameter(torch.ones(1)))

    def step(self, batch: Any) -> Any:
        return self.model(batch[0]).square().mean() - 0.0 * self.model.unused[0]


def test_a_gradient_of_zero_has_no_sign_because_another_process_would_add_zeros() -> None:
    seen = Gradients()
    make_trainer({"batch_size": 8}, same_bits=8, callbacks=[seen]).fit(WithSign(), make_points(8))
    assert seen.gradients[0].tolist() == [0.0]
    assert not any(bool(torch.signbit(gradient[gradient == 0]).any()) for gradient in seen.gradients)


def test_without_it_nothing_is_done() -> None:
    trainer = make_trainer()
    trainer.fit(Linear(), make_points())
    assert type(trainer.run.engine) is Alone


@pytest.mark.parametrize(
    ("settings", "hps", "processes", "advice"),
    [
        ({"same_bits": 6}, {"batch_size": 24}, 4, "same_bits=4 or same_bits=8"),
        ({"same_bits": 2}, {"batch_size": 24}, 4, "same_bits=4 or same_bits=8"),
        ({"same_bits": 12}, {"batch_size": 24}, 1, "same_bits=8 or same_bits=16"),
        ({"same_bits": 8}, {"batch_size": 24}, 3, "start 1, 2, 4 or 8 processes"),
        ({"same_bits": 8}, {"batch_size": 20}, 2, "batch_size: 16 or batch_size: 24"),
        ({"same_bits": 8}, {"batch_size": 5}, 1, "batch_size: 8"),
    ],
)
def test_an_error_names_the_nearest_numbers_that_work(
    settings: dict[str, Any], hps: dict[str, Any], processes: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "num_data_processes", lambda: processes)
    monkeypatch.setattr(feature, "num_processes", lambda: processes)
    with pytest.raises(ArgumentError) as error:
        make_trainer(hps, **settings).fit(Linear(), make_points(24))
    assert f"do: {advice}\n" in f"{error.value}\n"


class Counter(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(3, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs)


class Counting(Linear):
    def __init__(self) -> None:
        self.model = Counter()


@pytest.mark.parametrize(
    ("module", "settings", "error"),
    [
        (ByHand, {}, ArgumentError),
        (Linear, {"compile": True}, ArgumentError),
        (Linear, {"failures": {"spike_guard": 3.0}}, ArgumentError),
        (Linear, {"data_options": {"shard": False}}, ArgumentError),
        (Counting, {}, ModuleContractError),
    ],
)
def test_what_depends_on_the_processes_is_rejected(module: Any, settings: dict[str, Any], error: Any) -> None:
    with pytest.raises(error):
        make_trainer({"batch_size": 8}, same_bits=8, **settings).fit(module(), make_points(16))


def test_loaders_of_the_user_are_rejected() -> None:
    with pytest.raises(ArgumentError):
        make_trainer({"batch_size": 8}, same_bits=8).fit(Linear(), DataLoader(make_points(16), 8))


def test_it_computes_in_one_thread_unless_told() -> None:
    seen: list[int] = []

    class Threads(Callback):
        def on_before_optimizer_step(self, **_: Any) -> None:
            seen.append(torch.get_num_threads())

    torch.set_num_threads(2)
    try:
        for variable in (None, "2"):
            with environment(OMP_NUM_THREADS=variable):
                make_trainer({"batch_size": 8}, same_bits=8, callbacks=[Threads()]).fit(Linear(), make_points(8))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [1, 2]


@pytest.mark.parametrize(("units", "threads"), [(4, 1), (8, 2)])
def test_a_run_is_not_resumed_with_other_units_or_threads(units: int, threads: int) -> None:
    def start(**settings: Any) -> None:
        own = {"checkpoint_every": "step", "resume": "auto", **settings}
        make_trainer({"batch_size": 8}, **own).fit(Linear(), make_points(24))

    with environment(OMP_NUM_THREADS="1"):
        with pytest.raises(InterruptionError):
            start(same_bits=8, callbacks=[InterruptAt(1)])
        torch.set_num_threads(threads)
        try:
            with pytest.raises(CheckpointError):
                start(same_bits=units)
        finally:
            torch.set_num_threads(1)
        start(same_bits=8)


def test_a_run_is_resumed_where_no_number_of_threads_is_set() -> None:
    """A launcher sets one for each of several processes, a plain command does not."""

    def start(**settings: Any) -> None:
        own = {"checkpoint_every": "step", "resume": "auto", "same_bits": 8, **settings}
        make_trainer({"batch_size": 8}, **own).fit(Linear(), make_points(24))

    with environment(OMP_NUM_THREADS="1"), pytest.raises(InterruptionError):
        start(callbacks=[InterruptAt(1)])
    torch.set_num_threads(2)
    try:
        with environment(OMP_NUM_THREADS=None):
            start()
    finally:
        torch.set_num_threads(1)


@contextmanager
def environment(**variables: str | None) -> Iterator[None]:
    """Set variables, or delete them."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.delenv(name, raising=False)
            if value is not None:
                patch.setenv(name, value)
        yield


def test_a_stream_is_divided_into_units() -> None:
    trainer = make_trainer({"batch_size": 8}, same_bits=8)
    trainer.fit(Linear(), Stream([make_points(21)[index] for index in range(21)]))
    assert trainer.state.global_step == 3
    assert trainer.state.samples_seen == 21
