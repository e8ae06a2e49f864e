"""What the Trainer's `profiler` may be."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import ProfileKwargs

from accmt import Trainer
from tests.toys import make_trainer


@pytest.mark.parametrize("given", [None, "simple", "advanced", "pytorch"])
def test_names_come_back_from_the_configuration(given):
    config = make_trainer(profiler=given).config()
    assert Trainer.from_config(config).settings.running.profiler == given
    assert ("profiler" in config) == (given is not None)


def test_objects_of_accelerate_and_torch_are_kept():
    for given in (ProfileKwargs(with_stack=True), torch.profiler.profile()):
        assert make_trainer(profiler=given).settings.running.profiler is given
