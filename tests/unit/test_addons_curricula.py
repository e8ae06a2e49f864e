"""Datasets one after the other: their order, as a function of the position in the run."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from torch.utils.data import DataLoader

from accmt import RangeCurriculum, RatioCurriculum, StepsCurriculum
from accmt.data import Shard, SourceOptions, build_source
from accmt.data.samplers import Order
from accmt.errors import DataError
from tests.raising import raises_at
from tests.tables import each
from tests.toys import Numbers, SizedStream

EASY, HARD, HARDEST = Numbers(range(5)), Numbers(range(100, 107)), Numbers(range(200, 203))


def draw(curriculum, max_steps, samples_per_step=2, *, shuffle=False, epoch=0, seed=1):
    """Return the values of the samples of an epoch, in order."""
    order = curriculum.order(max_steps, samples_per_step=samples_per_step, seed=seed, shuffle=shuffle)
    return [int(curriculum[index]) for index in Order(len(curriculum), seed, sampler=order).at(epoch).tolist()]


@each(
    ("curriculum", "max_steps", "updates"),
    [
        (StepsCurriculum([(3, EASY), (-1, HARD)]), 10, [3, 7]),
        (StepsCurriculum([(3, EASY), (7, HARD)]), 10, [3, 7]),
        (StepsCurriculum([(-1, HARD)]), 4, [4]),
        (RatioCurriculum([(0.3, EASY), (0.7, HARD)]), 10, [3, 7]),
        (RatioCurriculum([(0.25, EASY), (-1, HARD)]), 8, [2, 6]),
        (RatioCurriculum([(1, HARD)]), 8, [8]),
        (RangeCurriculum([(range(3), EASY), (range(3, 10), HARD)]), 10, [3, 7]),
        # The end of the run comes first.
        (StepsCurriculum([(3, EASY), (4, HARD), (5, HARDEST)]), 5, [3, 2, 0]),
        (StepsCurriculum([(3, EASY), (-1, HARD)]), 2, [2, 0]),
        (RangeCurriculum([(range(3), EASY), (range(3, 10), HARD)]), 4, [3, 1]),
    ],
)
def test_each_stage_has_its_updates(curriculum, max_steps, updates):
    assert curriculum.updates(max_steps) == updates


@each("max_steps", [1, 2, 3, 7, 10, 99, 1000, 12_345])
def test_ratios_become_whole_updates_that_sum_to_those_of_the_run(max_steps):
    ratios = [1 / 3, 1 / 7, 0.2, 1 - 1 / 3 - 1 / 7 - 0.2]
    updates = RatioCurriculum([(ratio, EASY) for ratio in ratios]).updates(max_steps)
    assert sum(updates) == max_steps
    ends = [Fraction(1, 3), Fraction(10, 21), Fraction(71, 105), Fraction(1)]
    assert [*accumulate(updates)] == [round(end * max_steps) for end in ends], "the nearest whole updates"


@each(
    ("ratios", "max_steps", "updates"),
    [
        ((0.29, 0.71), 100, [29, 71]),  # 0.29 * 100 is 28.999999999999996
        ((0.39, 0.61), 10, [4, 6]),
        ((0.31, 0.69), 10, [3, 7]),
        ((0.57, 0.43), 100, [57, 43]),
        ((0.28, 0.29, -1), 100, [28, 29, 43]),
    ],
)
def test_a_stage_ends_at_the_nearest_whole_update(ratios, max_steps, updates):
    assert RatioCurriculum([(ratio, EASY) for ratio in ratios]).updates(max_steps) == updates


def test_the_stages_follow_one_another_in_as_many_passes_as_they_take():
    read = draw(StepsCurriculum([(4, EASY), (-1, HARD)]), 6)
    assert read == [0, 1, 2, 3, 4, 0, 1, 2, 100, 101, 102, 103]
    shuffled = draw(StepsCurriculum([(5, EASY), (7, HARD)]), 12, shuffle=True)
    passes = [shuffled[:5], shuffled[5:10], shuffled[10:17], shuffled[17:]]
    assert [sorted(one) for one in passes] == [[*range(5)]] * 2 + [[*range(100, 107)]] * 2
    assert passes[0] != passes[1]
    assert passes[2] != passes[3]


def test_the_order_follows_from_the_seed_alone():
    def read(seed):
        torch.rand(seed)
        return draw(StepsCurriculum([(5, EASY), (-1, HARD)]), 12, shuffle=True, seed=seed)

    assert read(1) == read(1) != read(2)


def test_further_epochs_make_up_for_what_was_left_out_with_the_last_stage():
    curriculum = StepsCurriculum([(2, EASY), (1, HARD)])
    assert draw(curriculum, 3) == [0, 1, 2, 3, 100, 101]
    assert draw(curriculum, 3, epoch=1) == [102, 103, 104, 105, 106, 100]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_all_processes_change_over_at_the_same_update(count):
    curriculum = StepsCurriculum([(3, EASY), (-1, HARD)])
    order = curriculum.order(5, samples_per_step=6, seed=4, shuffle=True)  # batches of 6, 3 or 2
    loaders = [
        build_source(
            curriculum,
            SourceOptions(purpose="train", batch_size=6 // count, shard=Shard(i, count), seed=4, sampler=order),
        )
        for i in range(count)
    ]
    micro_batches = [
        [value for part in parts for value in part.batch.tolist()]
        for parts in zip(*(loader.micro_batches(0) for loader in loaders), strict=True)
    ]
    assert micro_batches == [
        draw(curriculum, 5, 6, shuffle=True, seed=4)[begin : begin + 6] for begin in range(0, 30, 6)
    ]
    assert [all(value >= 100 for value in one) for one in micro_batches] == [False] * 3 + [True] * 2
    assert all(value < 100 for one in micro_batches[:3] for value in one)


@each("kind", [StepsCurriculum, RatioCurriculum, RangeCurriculum])
@each(
    ("stages", "got"),
    [
        ([], "no stages"),
        ([EASY], "stage 1 is a Numbers"),
        ([(1, SizedStream(1))], "stage 1 has a SizedStream"),
        ([(1, DataLoader(EASY))], "stage 1 has a DataLoader"),
        ({1: EASY}, "an object of type dict"),
        (EASY, "an object of type Numbers"),
        ([(1, Numbers(0))], "stage 1 has an empty Numbers"),
    ],
)
def test_what_is_no_stage_is_rejected(kind, stages, got):
    with raises_at(DataError, kind.__name__, got):
        kind(stages)


@each(
    ("kind", "lengths", "got"),
    [
        (StepsCurriculum, [0], "stage 1 has 0 steps"),
        (StepsCurriculum, [-1, 3], "stage 1 has -1 steps"),
        (StepsCurriculum, [0.5], "stage 1 has 0.5 steps"),
        (RatioCurriculum, [0.5, 0.4], "ratios that sum to 0.9"),
        (RatioCurriculum, [0.7, 0.4, -1], "ratios that sum to 1.1"),
        (RatioCurriculum, [30, 70], "stage 1 has the ratio 30"),
        (RatioCurriculum, [0.0, 1.0], "stage 1 has the ratio 0.0"),
        (RangeCurriculum, [range(1, 3)], "stage 1 has range(1, 3)"),
        (RangeCurriculum, [range(3), range(4, 5)], "stage 2 has range(4, 5)"),
        (RangeCurriculum, [range(0, 6, 2)], "stage 1 has range(0, 6, 2)"),
    ],
)
def test_lengths_that_cannot_be_are_rejected(kind, lengths, got):
    with raises_at(DataError, kind.__name__, got):
        kind([(length, EASY) for length in lengths])


@pytest.mark.parametrize(
    "curriculum", [StepsCurriculum([(3, EASY), (4, HARD)]), RangeCurriculum([(range(3), EASY), (range(3, 7), HARD)])]
)
def test_stages_that_end_before_the_run_are_rejected(curriculum):
    with raises_at(DataError, type(curriculum).__name__, "7 steps", expected="10 steps (max_steps)"):
        curriculum.updates(10)
