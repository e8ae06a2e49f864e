"""Arguments whose behaviour is not built yet say so, instead of doing nothing."""

from __future__ import annotations

import pytest

from accmt import Trainer
from accmt.settings import Settings
from accmt.settings.pending import PENDING

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
DEFAULTS = Settings.defaults()
NUMBERS = {"preempt_exit_code": 3}


def another_value(name):
    default = DEFAULTS[name]
    return NUMBERS.get(name, not default if isinstance(default, bool) else "another")


@pytest.mark.parametrize("name", PENDING)
def test_a_pending_argument_raises_and_names_itself(name):
    with pytest.raises(NotImplementedError, match=rf"Trainer\({name}=.*leave `{name}` out"):
        Trainer(HPS, "out", **{name: another_value(name)})


@pytest.mark.parametrize("name", PENDING)
def test_a_pending_argument_at_its_default_is_accepted(name):
    assert name not in Trainer(HPS, "out", **{name: DEFAULTS[name]}).config()


def test_every_pending_name_is_an_argument_with_a_default():
    assert set(PENDING) <= set(DEFAULTS)
