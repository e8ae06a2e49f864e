"""The few cases that stand for a whole grid, in the tests themselves."""

from itertools import combinations, product

import pytest

from tests.pairs import pairs


@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2), (15, 3, 2), (5, 3, 2), (2, 2, 2, 2), (3,)])
def test_each_two_values_of_two_factors_stand_together_in_few_cases(sizes: tuple[int, ...]) -> None:
    factors = [[f"{number}{letter}" for letter in range(size)] for number, size in enumerate(sizes)]
    chosen = pairs(*factors)
    together = {pair for case in chosen for pair in combinations(case, 2)}
    assert len(sizes) > 1 or chosen == [(value,) for value in factors[0]]
    assert together == {pair for one, other in combinations(factors, 2) for pair in product(one, other)}
    assert len(chosen) <= len(list(product(*factors)))
    assert len(chosen) < 10 or len(chosen) <= 1.5 * sizes[0] * sizes[1]
