"""Few cases of a grid in which each two values of two of its factors still stand together.

What goes wrong goes wrong by one value, or by two together; by three hardly ever. So a grid of 5 x 3 x 2 is as good in
15 cases as in 30. Source: https://csrc.nist.gov/projects/automated-combinatorial-testing-for-software
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return some tuples of the product, in its order; each two values of two factors are in one of them."""
    values = [list(factor) for factor in factors]
    cases = list(product(*(range(len(of_one)) for of_one in values)))
    pairs_of = {case: set(combinations(enumerate(case), min(2, len(values)))) for case in cases}
    missing, chosen = set().union(*pairs_of.values()), set()
    while missing:
        best = max(cases, key=lambda case: len(pairs_of[case] & missing))
        chosen.add(best)
        missing -= pairs_of[best]
    return [tuple(of_one[index] for of_one, index in zip(values, case, strict=True)) for case in sorted(chosen)]
