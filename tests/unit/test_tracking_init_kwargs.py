import pytest
from accelerate.tracking import GeneralTracker

from accmt.errors import UnknownArgumentError
from accmt.tracking.init_kwargs import kwargs_of_each
from accmt.tracking.specs import MLFlow, TensorBoard, resolve_trackers


class Greedy(GeneralTracker):
    name = "greedy"
    requires_logging_directory = False
    tracker = None

    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = kwargs


BOTH = [TensorBoard(), MLFlow()]


@pytest.mark.feature("A56")
def test_a_keyword_goes_to_every_tracker_that_takes_it():
    assert kwargs_of_each(BOTH, {"tags": {"a": "b"}, "flush_secs": 5}) == [{"flush_secs": 5}, {"tags": {"a": "b"}}]


@pytest.mark.feature("A56")
def test_a_keyword_reaches_every_tracker_that_takes_anything():
    specs = resolve_trackers([MLFlow, Greedy])
    assert kwargs_of_each(specs, {"description": "x"}) == [{"description": "x"}, {"description": "x"}]


@pytest.mark.feature("A56")
def test_a_dict_under_a_trackers_name_goes_to_that_one_only():
    given = {"mlflow": {"description": "x"}, "tensorboard": {"purge_step": 3}}
    assert kwargs_of_each(BOTH, given) == [{"purge_step": 3}, {"description": "x"}]


def test_the_nearer_the_tracker_the_stronger_the_keyword():
    given = {"description": "for all", "nested_run": True}
    assert kwargs_of_each([MLFlow(description="of the instance")], given) == [
        {"description": "of the instance", "nested_run": True}
    ]
    given["mlflow"] = {"description": "of the dict"}
    assert kwargs_of_each([MLFlow(description="of the instance")], given)[0]["description"] == "of the dict"


def test_a_keyword_that_no_tracker_takes_is_an_error_with_the_nearest():
    with pytest.raises(UnknownArgumentError, match=r"descripton=[\s\S]*do: description=\.\.\.\?"):
        kwargs_of_each([MLFlow()], {"descripton": "x"})
    with pytest.raises(UnknownArgumentError, match=r"mlflow=\{\.\.\.\}[\s\S]*tagz"):
        kwargs_of_each([MLFlow()], {"mlflow": {"tagz": {}}})


def test_a_keyword_without_any_tracker_is_an_error():
    with pytest.raises(UnknownArgumentError, match="colour"):
        kwargs_of_each([], {"colour": "red"})


def test_keywords_of_a_tracker_that_is_not_used_are_an_error():
    with pytest.raises(UnknownArgumentError, match="mlflow"):
        kwargs_of_each([TensorBoard()], {"mlflow": {"description": "x"}})
