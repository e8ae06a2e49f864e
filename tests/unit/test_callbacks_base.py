import pytest

from accmt.callbacks import Hooks, LambdaCallback
from accmt.errors import ModuleContractError
from tests.raising import raises_at


def test_a_callback_of_functions_calls_them_with_the_keywords_that_they_name():
    seen = []
    callback = LambdaCallback(on_epoch_end=lambda: seen.append("end"), on_log=lambda step: seen.append(step), order=3)
    hooks = Hooks([callback])
    hooks.on_epoch_end[0]()
    hooks.on_log[0](values={}, step=7)
    assert seen == ["end", 7]
    assert callback.order == 3


def test_a_callback_of_functions_takes_builtins():
    values = []
    hooks = Hooks([LambdaCallback(on_epoch_end=values.clear, on_log=lambda values, step: None)])
    values.append(1)
    hooks.on_epoch_end[0]()
    assert values == []


@pytest.mark.parametrize(("name", "nearest"), [("on_epoch_ends", "on_epoch_end"), ("epoch_end", "on_epoch_end")])
def test_a_callback_of_functions_refuses_what_is_no_hook(name, nearest):
    with raises_at(ModuleContractError, f"LambdaCallback.{name}", do=f"did you mean {nearest}?"):
        LambdaCallback(**{name: lambda: None})
