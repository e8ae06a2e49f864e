from accmt.callbacks import ALIASES, HOOKS, Callback, Hooks
from accmt.callbacks.callback import HOOK_PREFIXES, reject_unknown_hook
from accmt.compat import HOOK_NAMES, OtherHookNames
from accmt.errors import ModuleContractError
from tests.raising import raises_at
from tests.tables import each

OF_OTHERS = {
    "PyMarlin": [
        ("on_end_train", "on_fit_end"),
        ("on_begin_train_epoch", "on_epoch_start"),
        ("on_end_train_epoch", "on_epoch_end"),
        ("on_end_train_step", "on_update_end"),
        ("on_end_backward", "on_after_backward"),
        ("on_end_val_epoch", "on_validation_end"),
    ],
    "trainer_tools": [
        ("before_fit", "on_fit_start"),
        ("begin_fit", "on_fit_start"),
        ("after_fit", "on_fit_end"),
        ("before_epoch", "on_epoch_start"),
        ("begin_epoch", "on_epoch_start"),
        ("after_epoch", "on_epoch_end"),
        ("before_step", "on_before_training_step"),
        ("after_step", "on_after_training_step"),
        ("after_backward", "on_after_backward"),
        ("before_valid", "on_evaluation_start"),
        ("after_cancel", "on_keyboard_interrupt"),
    ],
    "Lightning": [
        ("on_train_start", "on_fit_start"),
        ("on_train_end", "on_fit_end"),
        ("on_train_batch_start", "on_before_training_step"),
    ],
}


def test_every_hook_of_the_table_is_an_attribute_of_the_dispatch():
    assert {name for name in vars(Hooks([])) if name.startswith("on_")} == set(HOOKS)
    hooks = Hooks([])
    assert {name: getattr(hooks, name) for name in HOOKS} == dict.fromkeys(HOOKS, ())


def test_names_of_hooks_begin_as_a_misspelt_one_is_recognized_by():
    assert all(name.startswith(HOOK_PREFIXES) for name in (*HOOKS, *ALIASES, *HOOK_NAMES))


def test_every_alias_is_another_name_of_a_hook():
    assert {*ALIASES.values(), *HOOK_NAMES.values()} <= set(HOOKS)
    assert len({*ALIASES, *HOOK_NAMES, *HOOKS}) == len(ALIASES) + len(HOOK_NAMES) + len(HOOKS)


@each(("alias", "hook"), [pair for pairs in OF_OTHERS.values() for pair in pairs])
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


def test_a_name_that_is_no_hook_is_refused_with_the_nearest():
    with raises_at(ModuleContractError, "Callback.on_epoch_ends"):
        reject_unknown_hook(Callback(), "on_epoch_ends")
