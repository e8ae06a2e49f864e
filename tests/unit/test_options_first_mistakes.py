"""What people get wrong at first is said when the Trainer is made, or when its run begins, in four parts."""

import re

import pytest

from accmt.errors import ArgumentError, UnknownArgumentError, explain
from tests.toys import Linear, make_points, make_trainer


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"monitor": "nope.yaml"}, FileNotFoundError, "no such file; the working directory is"),
        ({"sampler": "random"}, ArgumentError, "do: sampler=my_sampler"),
        ({"data_options": {"batch_sampler": 8}}, ArgumentError, "got: 8 (int)"),
        ({"collate_fn": {"val": "pad"}}, ArgumentError, 'do: collate_fn={"val": my_function}'),
        ({"max_time": "1 moon"}, ArgumentError, 'do: max_time="1h"'),
        ({"failures": {"on_nonfinite": True}}, ArgumentError, """do: failures={"on_nonfinite": 'stop'}"""),
        ({"early_stopping": 3}, UnknownArgumentError, "do: write Trainer(patience=3)"),
        ({"ckpt_path": "x"}, UnknownArgumentError, "do: write Trainer(resume="),
    ],
)
def test_when_the_trainer_is_made(settings, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make_trainer(**settings)


@pytest.mark.parametrize("options", [{"mode": "fastest"}, {"backend": "inductr"}])
def test_a_mode_or_backend_that_the_compiler_does_not_have(options):
    trainer = make_trainer(compile=options)
    with pytest.raises(ArgumentError, match=re.escape(f"Trainer(compile={options})\n  got: ")):
        trainer.fit(Linear(), make_points())


def test_a_message_inside_a_message_is_set_in():
    inner = explain("the model", "NaN", "numbers", "find the step")
    assert explain("checkpoint", inner, "a file", "see the cause") == (
        "checkpoint\n  got: the model\n      got: NaN\n      expected: numbers\n      do: find the step\n"
        "  expected: a file\n  do: see the cause"
    )
