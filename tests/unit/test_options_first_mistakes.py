"""What people get wrong at first is said when the Trainer is made, or when its run begins, in four parts."""

import pytest

from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


@pytest.mark.parametrize("options", [{"mode": "fastest"}, {"backend": "inductr"}])
def test_a_mode_or_backend_that_the_compiler_does_not_have(options):
    trainer = make_trainer(compile=options)
    with raises_at(ArgumentError, f"Trainer(compile={options})"):
        trainer.fit(Linear(), make_points())
