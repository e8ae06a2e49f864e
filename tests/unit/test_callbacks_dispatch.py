from functools import partial

import pytest
from torch import nn

from accmt import AcceleratorModule
from accmt.callbacks import (
    ALIASES,
    HOOKS,
    Callback,
    Hooks,
    LambdaCallback,
    MainProcessCallback,
    build_callbacks,
    find_hooks,
)
from accmt.compat import HOOK_NAMES, OtherHookNames
from accmt.errors import ModuleContractError
from tests.raising import raises_at
from tests.tables import each


def told(hooks, name, **data):
    for hook in getattr(hooks, name):
        hook(**data)


def make_callback(kind=Callback, **methods):
    return type("Made", (kind,), methods)()


def named(names, **attributes):
    """Make a callback that writes its name at the end of an epoch."""
    callback = LambdaCallback(on_epoch_end=lambda: names.append(attributes["name"]))
    for attribute, value in attributes.items():
        setattr(callback, attribute, value)
    return callback


def test_callbacks_run_by_order_and_equal_ones_as_they_were_given():
    names = []
    callbacks = [
        named(names, name=n, order=o) for n, o in [("a", 5), ("b", -1), ("c", 0), ("d", 5), ("e", 0), ("f", 0.5)]
    ]
    told(Hooks(callbacks), "on_epoch_end")
    assert names == ["b", "c", "e", "f", "a", "d"]


def test_an_order_of_the_module_that_means_something_else_is_not_ours():
    names = []
    module = make_callback(AcceleratorModule, order="ascending", on_epoch_end=lambda self: names.append("module"))
    told(Hooks([named(names, name="a", order=1), module, named(names, name="b", order=-1)]), "on_epoch_end")
    assert names == ["b", "module", "a"]


def test_a_main_process_callback_acts_on_the_main_process_only():
    names = []
    everywhere = make_callback(on_epoch_end=lambda self: names.append("everywhere"))
    main_only = make_callback(MainProcessCallback, on_epoch_end=lambda self: names.append("main"))
    told(Hooks([main_only, everywhere], is_main_process=True), "on_epoch_end")
    told(Hooks([main_only, everywhere], is_main_process=False), "on_epoch_end")
    assert names == ["main", "everywhere", "everywhere"]


def test_hooks_take_any_of_the_keywords_of_the_table():
    seen = []
    batch, outputs, both = object(), object(), {}
    methods = (
        lambda self: seen.append(()),
        lambda self, batch: seen.append((batch,)),
        lambda self, outputs: seen.append((outputs,)),
        lambda self, outputs, batch: seen.append((batch, outputs)),
        lambda self, outputs, extra=1: seen.append((outputs, extra)),
        lambda self, batch=None, outputs=None: seen.append((batch, outputs)),
        lambda self, *, outputs: seen.append((outputs,)),
        lambda self, *args: seen.append(args),
        lambda self, **data: both.update(data),
        lambda self, batch, **data: seen.append((batch, *data)),
    )
    callbacks = [make_callback(on_after_training_step=method) for method in methods]
    told(Hooks(callbacks), "on_after_training_step", batch=batch, outputs=outputs)
    expected = [(), (batch,), (outputs,), (batch, outputs), (outputs, 1), (batch, outputs), (outputs,), ()]
    assert seen == [*expected, (batch, "outputs")]
    assert both == {"batch": batch, "outputs": outputs}


@pytest.mark.parametrize(
    "wrong", [lambda self, loss: None, lambda self, loss, **data: None, lambda self, batch, /: None]
)
def test_a_parameter_that_nothing_fills_is_an_error_that_shows_the_line_to_write(wrong):
    with raises_at(
        ModuleContractError, "Made.on_after_training_step", do="def on_after_training_step(self, batch, outputs)"
    ):
        Hooks([make_callback(on_after_training_step=wrong)])


@each("kind", [Callback, AcceleratorModule, object])
@each(
    ("misspelt", "nearest"),
    [
        ("on_epoch_ends", "on_epoch_end"),
        ("on_fit_begin", "on_fit_start"),
        ("on_after_optimizer", "on_after_optimizer_step"),
    ],
)
def test_a_misspelt_hook_is_an_error_that_names_the_nearest(kind, misspelt, nearest):
    with raises_at(ModuleContractError, f"Made.{misspelt}", do=f"did you mean {nearest}?"):
        find_hooks(make_callback(kind, **{misspelt: lambda self: None}))


def test_what_only_looks_like_a_hook_is_none():
    names = ("before_norm", "on_gpu", "after_all", "on_epoch_end", "on_fit_end", "after_step", "on_time")
    values = (nn.LayerNorm(2), True, "text", False, None, nn.Linear(2, 2), partial(print))
    module = make_callback(AcceleratorModule)
    for name, value in zip(names, values, strict=True):
        setattr(module, name, value)
    assert find_hooks(module) == {}


def test_a_hook_defined_under_several_names_is_called_under_each():
    seen = []
    names = ("on_fit_start", "on_train_start", "before_fit")
    methods = {name: lambda self, name=name, **data: seen.append(name) for name in names}
    told(Hooks([type("Made", (OtherHookNames, Callback), methods)()]), "on_fit_start")
    assert sorted(seen) == sorted(names)


def test_the_module_has_hooks_too_and_inherited_ones_count():
    seen = []
    module = type("Child", (type(make_callback(AcceleratorModule, on_epoch_end=lambda self: seen.append("m"))),), {})()
    told(Hooks([module]), "on_epoch_end")
    assert seen == ["m"]
    assert find_hooks(make_callback(AcceleratorModule)) == {}


def test_a_hook_can_be_turned_off_in_a_subclass():
    parent = type(make_callback(on_epoch_end=lambda self: None))
    assert find_hooks(make_callback(parent, on_epoch_end=None)) == {}


def test_every_hook_is_called_with_the_keywords_of_its_row():
    seen = {}
    methods = {name: lambda self, name=name, **data: seen.update({name: tuple(data)}) for name in HOOKS}
    hooks = Hooks([make_callback(**methods)])
    for name, keywords in HOOKS.items():
        told(hooks, name, **dict.fromkeys(keywords))
    assert seen == HOOKS


@pytest.mark.parametrize("value", [MainProcessCallback, [Callback(), MainProcessCallback]])
def test_a_class_in_the_place_of_a_callback_is_an_error(value):
    with raises_at(ModuleContractError, "Trainer(callbacks=...)"):
        build_callbacks(value)


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


OF_OTHERS = [
    ("on_end_train_step", "on_update_end"),  # of PyMarlin
    ("before_step", "on_before_training_step"),  # of trainer_tools
    ("after_cancel", "on_keyboard_interrupt"),
    ("on_train_start", "on_fit_start"),  # of Lightning
    ("on_train_batch_start", "on_before_training_step"),
]


def test_every_hook_of_the_table_is_an_attribute_of_the_dispatch():
    assert {name for name in vars(Hooks([])) if name.startswith("on_")} == set(HOOKS)
    hooks = Hooks([])
    assert {name: getattr(hooks, name) for name in HOOKS} == dict.fromkeys(HOOKS, ())


def test_every_alias_is_another_name_of_a_hook():
    assert {*ALIASES.values(), *HOOK_NAMES.values()} <= set(HOOKS)
    assert len({*ALIASES, *HOOK_NAMES, *HOOKS}) == len(ALIASES) + len(HOOK_NAMES) + len(HOOKS)


@each(("alias", "hook"), OF_OTHERS)
def test_a_name_of_another_trainer_reaches_our_hook_where_it_is_asked_for(alias, hook):
    called = []
    methods = {alias: lambda self: called.append(alias)}
    with raises_at(ModuleContractError, f"Watcher.{alias}", do=f"def {hook}("):
        Hooks([type("Watcher", (Callback,), methods)()])
    watcher = type("Watcher", (OtherHookNames, Callback), methods)()
    for name, keywords in HOOKS.items():
        for method in getattr(Hooks([watcher]), name):
            method(**dict.fromkeys(keywords))
            assert name == hook
    assert called == [alias]
