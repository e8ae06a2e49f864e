"""What people get wrong at first is said when the Trainer is made, or when its run begins, in four parts."""

import pytest

from accmt.errors import ArgumentError, UnknownArgumentError, explain
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


@pytest.mark.parametrize(
    ("settings", "error", "do"),
    [
        ({"monitor": "nope.yaml"}, FileNotFoundError, 'monitor=["grad_norm"]'),
        ({"sampler": "random"}, ArgumentError, "sampler=my_sampler"),
        ({"data_options": {"batch_sampler": 8}}, ArgumentError, 'data_options={"batch_sampler": my_sampler}'),
        ({"collate_fn": {"val": "pad"}}, ArgumentError, 'collate_fn={"val": my_function}'),
        ({"max_time": "1 moon"}, ArgumentError, 'max_time="1h"'),
        ({"failures": {"on_nonfinite": True}}, ArgumentError, """failures={"on_nonfinite": 'stop'}"""),
        ({"early_stopping": 3}, UnknownArgumentError, "Trainer(patience=3)"),
        ({"ckpt_path": "x"}, UnknownArgumentError, "Trainer(resume="),
    ],
)
def test_when_the_trainer_is_made(settings, error, do):
    with raises_at(error, f"Trainer({next(iter(settings))}=", do=do):
        make_trainer(**settings)


@pytest.mark.parametrize("options", [{"mode": "fastest"}, {"backend": "inductr"}])
def test_a_mode_or_backend_that_the_compiler_does_not_have(options):
    trainer = make_trainer(compile=options)
    with raises_at(ArgumentError, f"Trainer(compile={options})"):
        trainer.fit(Linear(), make_points())


def test_a_message_inside_a_message_is_set_in():
    inner = explain("the model", "NaN", "numbers", "find the step")
    assert explain("checkpoint", inner, "a file", "see the cause") == (
        "checkpoint\n  got: the model\n      got: NaN\n      expected: numbers\n      do: find the step\n"
        "  expected: a file\n  do: see the cause"
    )
