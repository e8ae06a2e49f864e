"""Finding a callback of a Trainer, and the table of who acts when."""

from __future__ import annotations

from accmt import EMA, Callback, LambdaCallback, MainProcessCallback
from accmt.callbacks import HOOKS
from accmt.errors import CallbackNotFoundError
from tests.raising import raises_at
from tests.toys import Linear, make_points, make_trainer


class Counting(Callback):
    def __init__(self, order=0):
        self.order = order

    def on_epoch_end(self):
        pass

    def on_fit_end(self):
        pass


class CountingMore(Counting):
    def on_log(self, values):
        pass


def rows_of(table: str) -> list[list[str]]:
    head, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert head == ["hook", "callback", "order"]
    assert set(rule) == {"---"}
    return rows


def test_the_first_callback_of_a_class_is_found():
    first, second = CountingMore(), Counting()
    trainer = make_trainer(callbacks=[EMA(0.9), first, second])
    assert trainer.get_callback(Counting) is first
    assert trainer.get_callback(MainProcessCallback, default=None) is None
    assert trainer.get_callback(MainProcessCallback, "none") == "none"


def test_a_callback_that_is_not_there_is_a_key_error_that_names_those_that_are():
    with raises_at(KeyError, "get_callback(EMA)", expected="Counting") as caught:
        make_trainer(callbacks=Counting()).get_callback(EMA)
    assert isinstance(caught.value, CallbackNotFoundError)
    with raises_at(CallbackNotFoundError, "get_callback(EMA)"):
        make_trainer().get_callback(EMA)


def test_callbacks_of_the_module_are_found_once_a_run_was_begun():
    own = Counting()

    class WithCallback(Linear):
        def get_callbacks(self):
            return own

        def on_fit_start(self):
            assert self.trainer.get_callback(Counting) is own

    trainer = make_trainer()
    assert trainer.get_callback(Counting, None) is None
    trainer.fit(WithCallback(), make_points())
    assert trainer.get_callback(Counting) is own


def test_the_table_has_each_hook_and_who_acts_at_it_in_order():
    trainer = make_trainer(callbacks=[CountingMore(order=2), LambdaCallback(on_epoch_end=lambda: None, order=0.5)])
    rows = rows_of(trainer.describe_callbacks())
    assert list(dict.fromkeys(hook for hook, *_ in rows)) == list(HOOKS)
    acting = [row for row in rows if row[1] != "(none)"]
    assert acting == [
        ["on_fit_end", "CountingMore", "2"],
        ["on_epoch_end", "LambdaCallback", "0.5"],
        ["on_epoch_end", "CountingMore", "2"],
        ["on_log", "CountingMore", "2"],
    ]
    assert [row[2] for row in rows if row[1] == "(none)"] == [""] * (len(HOOKS) - 3)


def test_once_a_run_was_begun_the_module_and_our_own_callbacks_are_in_the_table():
    class Watching(Linear):
        def on_epoch_end(self):
            pass

    trainer = make_trainer(callbacks=Counting(), model_saving="best_valid_loss")
    trainer.fit(Watching(), make_points(), make_points())
    rows = rows_of(trainer.describe_callbacks())
    assert [name for hook, name, _ in rows if hook == "on_epoch_end"] == ["Counting", "Watching"]
    assert "ModelSaver" in [name for hook, name, _ in rows if hook == "on_evaluation_end"]
