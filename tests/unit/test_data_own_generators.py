import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset

from accmt import Callback
from accmt.data.seeding import OWN, call_first, find_generators, keeping_generators, seed_generators, seed_with_global
from tests.tables import each
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


class Slotted:
    __slots__ = ("generator",)


of_the_file = np.random.default_rng(0)


class UsesGlobal:
    def __getitem__(self, index):
        return of_the_file.random()


def nested(generator):
    slotted = Slotted()
    slotted.generator = generator
    default = Holder()
    default.itself = default
    default.rng = generator

    def closure():
        return generator

    return {
        "attribute": Holder(rng=generator),
        "list": Holder(parts=[1, (None, {"a": {"b": generator}})]),
        "partial": partial(print, rng=generator),
        "bound": Holder(inner=Holder(rng=generator)).draw,
        "closure": closure,
        "default": lambda x=generator: x,
        "slots": slotted,
        "circle": default,
        "subset": Subset(Holder(rng=generator), [0]),
    }


@each("place", list(nested(None)))
def test_a_generator_is_found_wherever_it_is_held(place):
    generator = np.random.default_rng()
    assert find_generators(nested(generator)[place]) == [generator]


def test_a_generator_of_the_file_is_found_where_a_method_or_a_function_uses_it():
    assert find_generators(UsesGlobal()) == find_generators(lambda: of_the_file.random()) == [of_the_file]


def test_global_generators_large_containers_and_what_is_read_through_are_left_out():
    class Stream(IterableDataset):
        def __init__(self):
            self.rng = np.random.default_rng()

        def __iter__(self):
            return iter(())

    stream = Stream()
    left_out = [torch.default_generator, random.SystemRandom(), [np.random.default_rng()] * 1000, torch.ones(1), stream]
    assert find_generators(Holder(parts=left_out)) == []
    assert find_generators(stream, through_streams=True) == [stream.rng]


@each("kind", KINDS)
def test_they_are_seeded_with_the_global_ones_and_given_back(kind):
    generator, untouched = KINDS[kind](), KINDS[kind]()
    holder = Holder(rng=generator)
    drawn = []
    with keeping_generators():
        assert len(seed_with_global(holder)) == 1
        assert seed_with_global(holder) == []
        for seed in (1, 2, 1):
            seed_generators(seed)
            drawn.append(draw(generator))
    assert OWN == []
    assert drawn[0] == drawn[2] != drawn[1]
    if kind not in ("numpy without a seed", "random"):
        assert draw(generator) == draw(untouched)


class MadeWhenCalled:
    """Makes its generator when it is first called, as transformers' collators do, and takes samples apart."""

    generator = None

    def __call__(self, samples):
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(42)
        popped = [sample.pop() for sample in samples]
        return popped, draw(self.generator), random.random()


def test_a_generator_that_is_made_at_the_first_call_draws_as_in_a_later_one():
    def call(collate, *, is_first):
        seed_generators(5)
        return call_first(collate, [[1], [2]], collate) if is_first else collate([[1], [2]])

    with keeping_generators():
        collate = MadeWhenCalled()
        assert call(collate, is_first=True) == call(collate, is_first=False)
        assert call(MadeWhenCalled(), is_first=True) == call(collate, is_first=False)


class Drawing(Dataset):
    """Noise from generators that nobody saves: one at hand, one that is made when it is first needed."""

    late = None

    def __init__(self, make):
        self.rng, self.make = make(), make

    def __getitem__(self, index):
        self.late = self.late or self.make()
        return torch.full((3,), index + draw(self.rng)), torch.tensor([draw(self.late)])

    def __len__(self):
        return 12


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

    rng = make()

    def collate(samples):
        return [torch.stack(parts) + draw(rng) for parts in zip(*samples, strict=True)]

    def fit(path, stop=None, **settings):
        module = WithNoise(make)
        own = {"sampler": InOrderOf(make)} if sampler else {}
        callbacks = Shaken(make, stop)
        settings = {
            "checkpoint_every": "1 step",
            "checkpoint_options": {"async_checkpointing": False},
            "collate_fn": collate,
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
        make_trainer(dataloader_num_workers=workers, collate_fn=CollateWithLate(make)).fit(module, Drawing(make))
        return module.seen

    assert seen(0) == seen(1) == seen(2)


class CollateWithLate:
    rng = None

    def __init__(self, make):
        self.make = make

    def __call__(self, samples):
        self.rng = self.rng or self.make()
        return [torch.stack(parts) + draw(self.rng) for parts in zip(*samples, strict=True)]


def test_a_model_with_thousands_of_parts_costs_no_search_without_end():
    module = Holder(model=nn.Sequential(*(nn.Linear(1, 1) for _ in range(3000))), rng=np.random.default_rng())
    assert find_generators(module) == [module.rng]
    assert find_generators(DataLoader([1])) == []
