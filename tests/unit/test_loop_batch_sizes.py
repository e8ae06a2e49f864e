"""What is trained on is what counts, where batches hold other samples than were read for them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule
from accmt.errors import DataError
from tests.toys import Linear, make_points, make_trainer

POINTS = make_points(16)
BAD = {1, 2, 9}
KEPT = [index for index in range(16) if index not in BAD]


class Unreadable(Dataset):
    """Gives None for what it cannot read."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return None if index in BAD else POINTS[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Unreadable()[index] for index in range(16)])


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
    "stream": (Stream, {"collate_fn": drop}),
    "DataLoader": (lambda: DataLoader(Unreadable(), 4, collate_fn=drop), {}),
    "DataLoader of a stream": (lambda: DataLoader(Stream(), 4, collate_fn=drop), {}),
}


@pytest.mark.feature("T22", "A25")
@pytest.mark.parametrize("source", SOURCES)
def test_samples_that_a_collate_function_leaves_out_weigh_nothing(source, caplog):
    make, settings = SOURCES[source]
    state, gradients = fit(make(), **settings)
    assert state.samples_seen == 13
    assert state.metrics["val_loss"] == pytest.approx(gradient_of(KEPT)[1], rel=1e-6)
    for got, indices in zip(gradients, [range(8), range(8, 16)], strict=True):
        expected = gradient_of([index for index in indices if index not in BAD])[0]
        assert (got - expected).norm() / expected.norm() < 1e-6
    assert caplog.text.count("read from the batch: here 2, but 4 samples") == 1


@pytest.mark.feature("T22")
def test_a_batch_of_one_row_or_of_time_first_is_an_error_before_anything_is_logged():
    def time_first(samples):
        inputs, targets = default_collate(samples)
        return inputs.T, targets.T

    class TimeFirst(Linear):
        def step(self, batch):
            return super().step((batch[0].T, batch[1].T))

    with pytest.raises(DataError, match=r"a batch of shapes \[3, 4\], \[1, 4\], made from 4 samples"):
        fit(POINTS, TimeFirst(), collate_fn=time_first)

    class Told(TimeFirst):
        def get_batch_size(self, batch):
            return batch[0].shape[1]

    state, gradients = fit(POINTS, Told(), collate_fn=time_first)
    assert state.samples_seen == 16
    torch.testing.assert_close(gradients[0], gradient_of(range(8))[0])


@pytest.mark.feature("T22")
def test_where_the_step_gives_weights_samples_are_only_counted():
    class Packed(AcceleratorModule):
        def __init__(self):
            self.model = nn.Linear(1, 1)

        def step(self, batch):
            loss = self.model(batch["x"].reshape(-1, 1)).square().mean()
            return {"loss": loss, "weight": batch["x"].numel()}

    state, _ = fit(POINTS, Packed(), collate_fn=lambda samples: {"x": torch.cat([x for x, _ in samples])[None]})
    assert state.samples_seen == 16


@pytest.mark.feature("T22", "A25")
def test_a_dataset_that_fetches_fewer_than_it_was_asked_for_does_not_pass_where_weights_are_planned():
    with pytest.raises(DataError, match="a batch of 2 samples, collated from 4, although batch weights are planned"):
        fit(FewerAtOnce())
    state, _ = fit(FewerAtOnce(), grad_accumulation_steps=1)  # a batch alone weighs all
    assert state.samples_seen == 13


@pytest.mark.feature("T22", "A25")
def test_manual_steps_count_what_batches_hold():
    class Manual(ExtendedAcceleratorModule):
        def __init__(self):
            self.model = Linear().model

        def step(self, batch):
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

        def training_step(self, batch):
            loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
            self.backward(loss)
            self.step_optimizer()
            self.zero_grad()
            return loss

    trainer = make_trainer({"batch_size": 4}, collate_fn=drop)
    assert trainer.fit(Manual(), Unreadable()).samples_seen == 13


@pytest.mark.feature("T22")
def test_of_a_batch_nothing_may_be_left_where_no_other_process_waits():
    def drop_all(samples):
        samples = [sample for sample in samples if sample is not None]
        return default_collate(samples) if len(samples) == 4 else None

    state, _ = fit(Unreadable(), collate_fn=drop_all)
    assert state.samples_seen == 8


def test_samples_that_only_weights_stand_for_are_counted_with_a_message(caplog):
    class Weighted(Linear):
        def step(self, batch):
            return {"loss": (self.model(batch[:, :1]) - 1).square().mean(), "weight": 2.0}

    trainer = make_trainer({"batch_size": 3}, collate_fn=lambda rows: torch.stack(rows[:2])[:, :3], verbose=True)
    module = Weighted()
    module.model = nn.Linear(1, 1)
    assert trainer.fit(module, torch.ones(6, 3)).samples_seen == 6
    assert (
        caplog.text.count("samples_seen counts collated samples; to change this, define get_batch_size(self, batch)")
        == 1
    )
