"""One case for all rows of a table, which names each that fails."""

from __future__ import annotations

import pytest

from tests.tables import each


def test_each_row_is_looked_at_and_each_that_fails_is_named() -> None:
    seen = []

    @each(("number", "text"), [(1, "a"), (2, "b"), (3, "c")])
    def look(number: int, text: str) -> None:
        seen.append((number, text))
        assert number == 2

    with pytest.raises(ExceptionGroup, match="2 of 3 rows of look") as failure:
        look()
    assert seen == [(1, "a"), (2, "b"), (3, "c")]
    assert [error.__notes__[0] for error in failure.value.exceptions] == [
        "at number=1, text='a'",
        "at number=3, text='c'",
    ]


@each("number", [1, 2])
@each("factor", (3, 4))
def test_tables_may_be_stacked_and_fixtures_are_shared(
    number: int, factor: int, request: pytest.FixtureRequest
) -> None:
    assert number * factor in (3, 4, 6, 8)
    assert request.node.name == "test_tables_may_be_stacked_and_fixtures_are_shared"
