import random

import numpy as np
import pytest
import torch

from accmt.data import derive_seed, draw_seed, seed_generators, set_seed
from accmt.data.seeding import find_generators, seeded_generators


def draw():
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_seeds_differ_by_seed_purpose_and_each_part_of_the_place():
    places = [
        (seed, purpose, a, b) for seed in (0, 1, 2**40) for purpose in ("x", "y") for a in range(20) for b in range(20)
    ]
    seeds = {derive_seed(*place) for place in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "x") != derive_seed(0, "x", 0) != derive_seed(0, "x", 0, 0)


def test_a_derived_seed_is_the_same_in_every_version_of_the_program():
    assert derive_seed(42, "train", 1, 64) == 8969929308970975554
    assert derive_seed(-1, "order", 0) == derive_seed(2**64 - 1, "order", 0)


def test_a_number_that_a_generator_has_drawn_ahead_is_dropped():
    """Normal numbers are made in pairs, and the second one is kept for the next call."""

    def draw_normal():
        return random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(1, dtype=torch.float64).item()

    drawn = []
    for _ in range(3):
        seed_generators(5)
        drawn.append(draw_normal())
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.parametrize("workers", [True, False])
def test_set_seed_repeats_all_draws_and_returns_the_seed(workers):
    assert set_seed(42, workers=workers) == 42
    first = draw()
    set_seed(42)
    assert draw() == first
    set_seed(43)
    assert draw() != first


def draw_and_fail():
    draw()
    raise ZeroDivisionError


def test_drawing_under_a_seed_leaves_the_generators_as_they_were_even_after_an_error():
    set_seed(1)
    expected = draw()
    set_seed(1)
    with seeded_generators(9):
        draw()
    with pytest.raises(ZeroDivisionError), seeded_generators(9):
        draw_and_fail()
    assert draw() == expected


def test_without_a_seed_each_drawn_one_is_another():
    torch.default_generator.manual_seed(67280421310721)  # as torch begins
    seeds = {draw_seed() for _ in range(4)}
    assert len(seeds) == 4
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_an_object_that_raises_whatever_is_read_of_it_is_passed_over():
    class Proxy:
        @property
        def __dict__(self):
            raise RuntimeError("there is no request")

    class Owner:
        def __init__(self):
            self.proxy, self.generator = Proxy(), torch.Generator()

    owner = Owner()
    assert find_generators(owner) == [owner.generator]
