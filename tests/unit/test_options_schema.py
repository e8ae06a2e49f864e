import pytest
import yaml

from accmt.errors import HyperParameterError
from accmt.options.checks import Expected, hints_of, read_numbers
from accmt.options.schema import Schema, check
from accmt.options.yaml_reader import Document
from tests.raising import raises_at
from tests.tables import each

RIGHT = {"epochs": 2, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}


def expected_of(name):
    return next(note for note in hints_of(Schema)[name].__metadata__ if isinstance(note, Expected))


@each("name", list(hints_of(Schema)))
def test_what_an_error_tells_to_write_is_accepted(name):
    advice = read_numbers(yaml.safe_load(expected_of(name).example))
    assert getattr(check(Document("x", {**RIGHT, "max_tokens": 8, **advice})).schema, name) not in (None, -1, False)


def test_faults_of_the_schema_hide_none_of_the_arguments_and_none_is_said_twice():
    document = Document("x", {"batch_size": 0, "optim": {"type": "SGD", "lrr": 1}, "scheduler": {"step_size": 3}})
    with pytest.raises(HyperParameterError) as caught:
        check(document)
    places = [line for line in str(caught.value).splitlines() if line.startswith("x ")]
    assert sorted(places) == ["x batch_size", "x epochs", "x optim.lrr", "x scheduler.type"]


def test_a_missing_argument_is_not_hidden_by_a_line_about_its_optimizer():
    document = Document(
        "x", {**RIGHT, "learning_rate": 0.1, "scheduler": {"type": "StepLR"}, "lr_scheduler_type": "linear"}
    )
    with raises_at(HyperParameterError, "x scheduler.step_size"):
        check(document)


def test_the_document_is_left_as_it_was_written():
    values = {"epochs": 1, "batch_size": 1, "optimizer": {"type": "AdamW", "betas": [0.9, 0.99]}}
    document = Document("x", values, {("optimizer", "betas"): 5})
    checked = check(document)
    assert values["optimizer"] == {"type": "AdamW", "betas": [0.9, 0.99]}
    assert checked.optim.arguments["betas"] == (0.9, 0.99)
    assert checked.document.where(("optim", "betas")) == "x:5 optim.betas"


@each("sizes", [[None, 16], [None]])
def test_the_size_of_the_validation_batches_is_not_taken_for_that_of_training(sizes):
    with raises_at(HyperParameterError, "x batch_size"):
        check(Document("x", {**RIGHT, "batch_size": sizes}))
    assert check(Document("x", {**RIGHT, "batch_size": [16, None]})).schema.batch_size == (16,)
