"""The number of samples in a batch, where a collate function drops some of those that were read."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from accmt import AcceleratorModule, Callback
from accmt.errors import DataError
from tests.raising import raises_at
from tests.toys import ByHand, Linear, Stream, make_points, make_trainer

POINTS = make_points(16)
BAD = {1, 2, 9}
KEPT = [index for index in range(16) if index not in BAD]


class Unreadable(Dataset):
    """Gives None for what it cannot read."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        inputs, targets = POINTS[index]
        return None if index in BAD else (inputs, targets)


def make_stream():
    return Stream(Unreadable())


class FewerAtOnce(Unreadable):
    """Fetches whole batches, and leaves out what it cannot read."""

    def __getitems__(self, indices):
        return [POINTS[index] for index in indices if index not in BAD]


def drop(samples):
    return default_collate([sample for sample in samples if sample is not None])


class Gradients(Callback):
    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self):
        self.seen.append(torch.cat([p.grad.flatten() for p in self.module.model.parameters()]))


def gradient_of(indices):
    module = Linear()
    loss = module.step(default_collate([POINTS[index] for index in indices]))
    loss.backward()
    return torch.cat([p.grad.flatten() for p in module.model.parameters()]), loss.item()


def fit(data, module=None, **settings):
    gradients = Gradients()
    told = {"grad_accumulation_steps": 2, "shuffle_train": False, "callbacks": gradients, **settings}
    trainer = make_trainer({"batch_size": 4, "optim": {"type": "SGD", "lr": 1e-30}}, **told)
    return trainer.fit(module or Linear(), data, data), gradients.seen


SOURCES = {
    "dataset": (Unreadable, {"collate_fn": drop}),
    "dataset, with workers": (Unreadable, {"collate_fn": drop, "dataloader_num_workers": 1}),
    "dataset, bad samples skipped": (Unreadable, {"collate_fn": drop, "failures": {"on_bad_sample": "skip"}}),
    "stream": (make_stream, {"collate_fn": drop}),
    "DataLoader": (lambda: DataLoader(Unreadable(), 4, collate_fn=drop), {}),
    "DataLoader of a stream": (lambda: DataLoader(make_stream(), 4, collate_fn=drop), {}),
}


class Counting(Linear):
    def get_batch_size(self, batch):
        return len(batch[0])


@pytest.mark.parametrize("source", SOURCES)
def test_a_collate_function_that_drops_samples_needs_a_module_that_counts_them(source):
    make, settings = SOURCES[source]
    if source != "DataLoader of a stream":  # whose DataLoader is the only one to know what it collated
        with raises_at(DataError, "the number of samples in a batch", "2, in a batch of 4", do="get_batch_size"):
            fit(make(), **settings)
    state, gradients = fit(make(), Counting(), **settings)
    assert state.samples_seen == 13
    assert state.metrics["val_loss"] == pytest.approx(gradient_of(KEPT)[1], rel=1e-6)
    for got, indices in zip(gradients, [range(8), range(8, 16)], strict=True):
        expected = gradient_of([index for index in indices if index not in BAD])[0]
        assert (got - expected).norm() / expected.norm() < 1e-6


def test_where_the_step_gives_weights_samples_are_only_counted():
    class Packed(AcceleratorModule):
        def __init__(self):
            self.model = nn.Linear(1, 1)

        def step(self, batch):
            loss = self.model(batch["x"].reshape(-1, 1)).square().mean()
            return {"loss": loss, "weight": batch["x"].numel()}

    state, _ = fit(POINTS, Packed(), collate_fn=lambda samples: {"x": torch.cat([x for x, _ in samples])[None]})
    assert state.samples_seen == 16


def test_a_dataset_that_fetches_fewer_than_it_was_asked_for_is_an_error():
    with raises_at(DataError, "the number of samples in a batch", "2, in a batch of 4"):
        fit(FewerAtOnce())


def test_manual_steps_count_what_the_module_says():
    class CountingByHand(ByHand):
        get_batch_size = Counting.get_batch_size

    trainer = make_trainer({"batch_size": 4}, collate_fn=drop)
    assert trainer.fit(CountingByHand(), Unreadable()).samples_seen == 13


@pytest.mark.parametrize(
    "data", [Unreadable(), make_stream(), DataLoader(make_stream(), 4)], ids=["sized", "stream", "loader"]
)
def test_a_collate_function_that_returns_nothing_is_an_error(data):
    if isinstance(data, DataLoader):
        data = DataLoader(make_stream(), 4, collate_fn=lambda samples: None)
    with raises_at(DataError, "a batch of the ", "the collate function"):
        fit(data, collate_fn=None if isinstance(data, DataLoader) else lambda samples: None)
