import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Sampler

from accmt import Callback
from accmt.data.seeding import find_generators
from tests.toys import Linear, make_trainer

KINDS = {
    "torch": lambda: torch.Generator().manual_seed(7),
    "numpy": lambda: np.random.default_rng(7),
    "numpy without a seed": np.random.default_rng,
    "old numpy": lambda: np.random.RandomState(7),
    "random": random.Random,
}


def draw(generator):
    if isinstance(generator, torch.Generator):
        return torch.rand(1, generator=generator).item()
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def draw(self):
        return None


def test_global_generators_and_those_of_the_system_are_left_out():
    assert find_generators(Holder(rng=torch.default_generator, system=random.SystemRandom())) == []
    assert find_generators(3) == []


class Drawing(Dataset):
    """Noise from a generator that nobody saves."""

    def __init__(self, make):
        self.rng = make()

    def __getitem__(self, index):
        return torch.full((3,), index + draw(self.rng)), torch.tensor([draw(self.rng)])

    def __len__(self):
        return 12


class Noisy:
    """A collate function with a generator."""

    def __init__(self, make):
        self.rng = make()

    def __call__(self, samples):
        return [torch.stack(parts) + draw(self.rng) for parts in zip(*samples, strict=True)]


class InOrderOf(Sampler):
    def __init__(self, make):
        self.rng = make()

    def __iter__(self):
        return iter(sorted(range(12), key=lambda _: draw(self.rng)))

    def __len__(self):
        return 12


class WithNoise(Linear):
    """Draws in its steps, and remembers what it saw."""

    def __init__(self, make):
        super().__init__()
        self.rng, self.seen = make(), []

    def step(self, batch):
        self.seen.append([batch[0].tolist(), batch[1].tolist(), draw(self.rng)])
        return super().step(batch)


class Shaken(Callback):
    def __init__(self, make, stop=None):
        self.rng, self.stop = make(), stop

    def on_update_end(self):
        if self.state.global_step == self.stop:
            raise ValueError("stop")
        with torch.no_grad():
            self.module.unwrapped_model.weight += 0.01 * draw(self.rng)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [False, True], ids=["shuffled", "sampler"])
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(kind, sampler):
    make = KINDS[kind]

    def fit(path, stop=None, **settings):
        module = WithNoise(make)
        own = {"sampler": InOrderOf(make)} if sampler else {}
        callbacks = Shaken(make, stop)
        settings = {
            "checkpoint_every": "1 step",
            "checkpoint_options": {"async_checkpointing": False},
            "collate_fn": Noisy(make),
            **own,
            **settings,
        }
        trainer = make_trainer({"epochs": 2}, path, callbacks=callbacks, **settings)
        trainer.fit(module, Drawing(make), Drawing(make))
        return module

    whole = fit("a/m", evaluate_every_n_steps=3)
    with pytest.raises(ValueError, match="stop"):
        fit("b/m", stop=8, evaluate_every_n_steps=3)
    resumed = fit("b/m", resume=True, evaluate_every_n_steps=3)
    assert torch.equal(resumed.model.weight, whole.model.weight)
    assert resumed.seen == whole.seen[-len(resumed.seen) :]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_workers_draw_the_same(kind):
    make = KINDS[kind]

    def seen(workers):
        module = WithNoise(make)
        make_trainer(dataloader_num_workers=workers, collate_fn=Noisy(make)).fit(module, Drawing(make))
        return module.seen

    assert seen(0) == seen(1) == seen(2)
