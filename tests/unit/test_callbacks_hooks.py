from accmt.callbacks import ALIASES, HOOKS, Callback, Hooks
from accmt.compat import HOOK_NAMES, OtherHookNames
from accmt.errors import ModuleContractError
from tests.raising import raises_at
from tests.tables import each

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
