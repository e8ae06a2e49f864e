"""Data that change with the epoch: what evaluations, workers and growth do to what is trained on."""

import datasets
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from accmt import Callback
from tests.toys import InterruptAt, InterruptionError, Linear, make_points, make_trainer

POINTS = make_points(24)


class Scheduled(Dataset):
    """Is harder in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 24

    def __getitem__(self, index):
        inputs, targets = POINTS[index]
        return inputs * (1 + self.epoch), targets


class ScheduledStream(IterableDataset):
    def __init__(self):
        self.samples = Scheduled()

    def set_epoch(self, epoch):
        self.samples.set_epoch(epoch)

    def __iter__(self):
        return (self.samples[index] for index in range(24))


class PartOf(Dataset):
    """Hands the epoch on to what it is a part of."""

    def __init__(self, data):
        self.part, self.set_epoch = Subset(data, range(8)), data.set_epoch

    def __len__(self):
        return len(self.part)

    def __getitem__(self, index):
        return self.part[index]


class Look(Callback):
    def __init__(self, stop=None, **also):
        self.epochs, self.stop, self.also = [], stop, also

    def on_before_training_step(self, batch):
        if self.state.global_step == self.stop:
            raise RuntimeError("stopped")
        self.epochs.append(round(float(batch[0].norm()) / float(self.norms[len(self.epochs) % 6])))

    def on_update_end(self):
        for method in self.also if self.state.global_step == 8 else ():
            getattr(self.trainer, method)(self.module, self.also[method])


def train(data, val_data, look, folder, **settings):
    batches = torch.stack([inputs for inputs, _ in POINTS]).split(4)
    look.norms = [batch.norm() for batch in batches]
    trainer = make_trainer(
        {"epochs": 2, "batch_size": 4},
        model_path=folder,
        shuffle_train=False,
        checkpoint_every="1 step",
        callbacks=look,
        **settings,
    )
    module = Linear()
    trainer.fit(module, data, val_data)
    return module.model.weight.detach().clone()


SHARED = {
    "one dataset": lambda: [Scheduled()] * 2,
    "a part of it": lambda: (lambda data: [data, PartOf(data)])(Scheduled()),
    "a loader of it": lambda: (lambda data: [data, DataLoader(data, 5)])(Scheduled()),
    "loaders": lambda: (lambda data: [DataLoader(data, 4), DataLoader(data, 5)])(Scheduled()),
    "one stream": lambda: [ScheduledStream()] * 2,
}


@pytest.mark.parametrize("name", SHARED)
def test_an_evaluation_of_the_training_data_leaves_their_epoch_alone(name, tmp_path):
    look = Look()
    whole = train(*SHARED[name](), look, tmp_path / "whole", evaluate_every_n_steps=4)
    assert look.epochs == [1] * 6 + [2] * 6
    with pytest.raises(RuntimeError, match="stopped"):
        train(*SHARED[name](), Look(stop=9), tmp_path / "part", evaluate_every_n_steps=4)
    again = train(*SHARED[name](), Look(), tmp_path / "part", evaluate_every_n_steps=4, resume=True)
    assert torch.equal(whole, again)


def test_evaluating_in_the_middle_by_hand_leaves_the_epoch_alone(tmp_path):
    data = Scheduled()
    look = Look(validate=data, predict=DataLoader(data, 3), test=data)

    class Predicting(Linear):
        def predict_step(self, batch):
            return self.model(batch[0])

    look.norms = [batch.norm() for batch in torch.stack([inputs for inputs, _ in POINTS]).split(4)]
    make_trainer({"epochs": 2, "batch_size": 4}, shuffle_train=False, callbacks=look).fit(Predicting(), data)
    assert look.epochs == [1] * 6 + [2] * 6


class Levelled(Dataset):
    level = 0

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(self.level)), torch.zeros(1)


def levels(workers, **settings):
    data, seen = Levelled(), []

    class Module(Linear):
        def step(self, batch):
            seen.append(float(batch[0].mean()))
            return super().step(batch)

        def on_epoch_start(self):
            data.level = self.state.epoch

    make_trainer({"epochs": 3, "batch_size": 4}, dataloader_num_workers=workers, **settings).fit(Module(), data)
    return seen


def test_workers_see_what_changed_in_the_dataset_between_epochs():
    assert levels(0) == levels(1) == [0, 0, 1, 1, 2, 2]
    assert levels(1, data_options={"persistent_workers": True}) == [0] * 6  # as was asked for


class Drawing(IterableDataset):
    def __iter__(self):
        return ((torch.randn(3), torch.randn(1)) for _ in range(8))


@pytest.mark.parametrize("kind", [DataLoader, type("OwnLoader", (DataLoader,), {"__iter__": DataLoader.__iter__})])
def test_workers_of_a_stream_draw_the_same_in_each_evaluation_and_after_a_resume(kind, tmp_path, caplog):
    def make():
        return kind(Drawing(), batch_size=4, num_workers=1, persistent_workers=True)

    losses = []

    class Losses(Callback):
        def on_evaluation_end(self, metrics):
            losses.append(metrics["val_loss"])

    frozen = {"epochs": 3, "optim": {"type": "SGD", "lr": 1e-30}}
    given = make()
    make_trainer(frozen, callbacks=Losses()).fit(Linear(), make_points(), given)
    assert len(losses) == 3
    assert len(set(losses)) == 1
    assert given.persistent_workers
    assert given._iterator is None

    def run(stop, **settings):
        module = Linear()

        trainer = make_trainer({"epochs": 3}, checkpoint_every="1 step", callbacks=InterruptAt(stop), **settings)
        try:
            trainer.fit(module, make())
        except InterruptionError:
            assert trainer.state.global_step == stop
        return module.model.weight.detach().clone()

    whole = run(None, model_path=tmp_path / "whole")
    run(3, model_path=tmp_path / "part")
    assert torch.equal(run(None, model_path=tmp_path / "part", resume=True), whole)
    assert caplog.text.count("persistent_workers=True has no effect") > 0


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dataset_that_has_grown_is_read_to_its_end_in_the_next_epoch(shuffle, caplog):
    points = [POINTS[index] for index in range(4)]
    seen = []

    class Growing(Linear):
        def training_step(self, batch):
            seen.append(len(batch[0]))
            if self.state.train_step == 0:
                points.extend(POINTS[index] for index in range(4))
            return self.step(batch)

    state = make_trainer({"epochs": 3}, shuffle_train=shuffle, verbose=True).fit(Growing(), points, points)
    assert sum(seen) == state.samples_seen == 4 + 8 + 12
    assert "the training data now have 8 samples instead of 4" in caplog.text


def stream_of_points():
    rows = {"x": [x.tolist() for x, _ in POINTS], "y": [y.tolist() for _, y in POINTS]}
    return datasets.Dataset.from_dict(rows).to_iterable_dataset()


def as_batch(samples):
    return torch.tensor([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])


DERIVED = {
    "the same": lambda data: data,
    "a part": lambda data: data.take(8),
    "a loader": lambda data: DataLoader(data, 4, collate_fn=as_batch),
    "mapped": lambda data: data.map(lambda row: row),
}


@pytest.mark.parametrize("name", DERIVED)
def test_a_stream_that_evaluations_read_resumes_where_training_was(name, tmp_path, caplog):
    def run(stop, **settings):
        data, module = stream_of_points(), Linear()

        told = {"evaluate_every_n_steps": 1, "checkpoint_every": "1 step", "collate_fn": as_batch, "verbose": True}
        trainer = make_trainer({"batch_size": 4, "epochs": 2}, callbacks=InterruptAt(stop), **{**told, **settings})
        try:
            trainer.fit(module, data, DERIVED[name](data))
        except InterruptionError:
            assert trainer.state.global_step == stop
        return module.model.weight.detach().clone()

    whole = run(None, model_path=tmp_path / "whole")
    run(9, model_path=tmp_path / "part")
    assert torch.equal(run(None, model_path=tmp_path / "part", resume=True), whole)
    assert "evaluations also read them" in caplog.text
