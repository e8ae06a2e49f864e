"""What goes wrong in real scripts: wrong results must not pass in silence, and nothing may be left behind."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accmt import AcceleratorModule, Accuracy, Callback
from accmt.errors import DataError, ModuleContractError
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Scripted, logged, make_points, make_trainer


def test_an_optimizer_of_foreign_parameters_is_refused():
    class Foreign(Linear):
        def get_optimizer(self):
            return torch.optim.SGD([*self.model.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)

    with raises_at(TypeError, "Foreign.get_optimizer"):
        make_trainer().fit(Foreign(), make_points())


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"model_saving": "best_accuracy", "metrics": Accuracy()}, "Trainer(model_saving='best_accuracy')"),
        ({"patience": {"valid_loss": 2}}, "Trainer(patience={'valid_loss': 2})"),
        ({"hps": {"scheduler": "ReduceLROnPlateau"}}, "scheduler"),
    ],
)
def test_what_looks_at_validation_needs_validation_data(settings, where):
    with raises_at(ValueError, where):
        make_trainer(**settings).fit(Linear(), make_points())


def test_a_loss_that_is_not_finite_is_told_once_and_so_is_that_nothing_was_saved(caplog):
    class Exploding(Linear):
        def training_step(self, batch):
            return self.step(batch) * math.inf

        def validation_step(self, batch):
            return torch.tensor(math.nan)

    settings = {"model_saving": "best_valid_loss", "num_sanity_val_steps": 0, "failures": {"on_nonfinite": None}}
    trainer = make_trainer({"epochs": 2}, **settings)
    trainer.fit(Exploding(), make_points(), make_points())
    assert caplog.text.count("on process 0, samples [") == 1
    assert "at step 1" in caplog.text
    assert "no model was saved: best_valid_loss was never finite" in caplog.text


def test_an_iterator_is_refused_before_training_where_it_would_be_read_twice():
    with raises_at(DataError, "the training data", "an iterator"):
        make_trainer({"epochs": 2}).fit(Linear(), iter(make_points()))
    assert make_trainer({"epochs": 1}).fit(Linear(), iter(make_points())).global_step == 4


def test_a_batch_that_weighs_nothing_cannot_poison_its_window():
    class Masked(Linear):
        def training_step(self, batch):
            inputs, targets = batch
            mask = torch.full((len(inputs),), float(self.state.train_step != 1))
            errors = (self.model(inputs) - targets).square().squeeze(1) * mask
            return {"loss": errors.sum() / mask.sum(), "weight": mask.sum()}  # 0 / 0 in the second batch

    module = Masked()
    trainer = make_trainer(grad_accumulation_steps=2)
    trainer.fit(module, make_points())
    assert torch.isfinite(module.model.weight).all()
    assert all(math.isfinite(value) for _, value in logged(trainer, "train_loss"))


def test_gradients_of_a_broken_run_do_not_reach_the_next():
    seen = []

    class Breaking(Linear):
        breaks = True

        def training_step(self, batch):
            if self.breaks and self.state.train_step == 1:
                raise ValueError("broken")
            return self.step(batch)

        def on_before_optimizer_step(self):
            seen.append(self.model.weight.grad.clone())

    module = Breaking()
    with pytest.raises(ValueError, match="broken"):
        make_trainer(grad_accumulation_steps=4).fit(module, make_points())
    assert module.model.weight.grad is not None
    module.breaks = False
    make_trainer(grad_accumulation_steps=4).fit(module, make_points())
    make_trainer(grad_accumulation_steps=4).fit(Linear_like(module), make_points())
    assert torch.equal(seen[0], seen[1])


def Linear_like(module):  # noqa: N802 - a module of the same class, untouched
    fresh = type(module)()
    fresh.breaks = False
    return fresh


def test_logged_parameters_are_those_of_the_step_not_of_the_log():
    class Tempered(Linear):
        def __init__(self):
            self.model = nn.Linear(3, 1)
            self.temperatures = []

        def training_step(self, batch):
            self.temperatures.append(self.model.bias.item())
            return {"loss": self.step(batch), "temperature": self.model.bias}

    module = Tempered()
    trainer = make_trainer(log_every=4)
    trainer.fit(module, make_points())
    expected = sum(module.temperatures) / 4
    assert logged(trainer, "temperature")[0][1] == pytest.approx(expected, rel=1e-6)


class Offset(Dataset):
    """Numbers with an offset that a worker sets."""

    offset = 0.0

    def __getitem__(self, index):
        return torch.tensor(index + self.offset)

    def __len__(self):
        return 4


def set_offset(worker_id: int) -> None:
    get_worker_info().dataset.offset = 100.0


def test_a_workers_start_sees_the_users_own_dataset():
    module = Scripted()
    loader = DataLoader(Offset(), batch_size=2, num_workers=1, worker_init_fn=set_offset)
    make_trainer().fit(module, loader)
    assert module.seen == [[100, 101], [102, 103]]


def test_a_run_that_can_never_end_is_refused_after_an_epoch():
    class Weightless(Linear):
        def training_step(self, batch):
            return {"loss": self.step(batch), "weight": 0.0}

    with raises_at(DataError, "training until max_steps"):
        make_trainer({"epochs": -1, "max_steps": 3}).fit(Weightless(), make_points())


def test_parameter_groups_added_later_are_clipped_too():
    norms = []

    class Thawing(Linear):
        def __init__(self):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

        def get_optimizer(self):
            return torch.optim.SGD(self.model[1].parameters(), lr=0.1)

        def on_epoch_start(self):
            self.optimizer.add_param_group({"params": list(self.model[0].parameters())})

        def on_before_optimizer_step(self):
            norms.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).norm().item())

    make_trainer(clip_grad=1e-3).fit(Thawing(), make_points())
    assert max(norms) <= 1e-3 * (1 + 1e-4)


def test_a_module_can_be_copied_and_pickled_during_a_run():
    copies = []

    class Copy(Callback):
        def on_epoch_end(self):
            copies.append(copy.deepcopy(self.module))
            pickle.dumps(self.module)

    module = Linear()
    make_trainer(callbacks=Copy()).fit(module, make_points())
    assert torch.equal(copies[0].model.weight, module.model.weight)
    assert "trainer" not in vars(copies[0])


def test_what_a_model_caches_in_the_trial_evaluation_can_be_trained_with():
    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 1)
            self.cache = None

        def forward(self, inputs):
            if self.cache is None:
                self.cache = torch.ones(1) * 2
            return self.linear(inputs) * self.cache

    module = Linear()
    module.model = Caching()
    assert make_trainer().fit(module, make_points(), make_points()).global_step == 4


def test_a_given_accelerator_keeps_what_the_user_prepared():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    own = accelerator.prepare(nn.Linear(2, 2))
    make_trainer(accelerator=accelerator).fit(Linear(), make_points())
    assert any(model is own for model in accelerator._models)


def test_hooks_that_fail_hide_neither_the_error_nor_one_another(caplog):
    closed = []

    class Clumsy(Callback):
        def on_exception(self, error):
            raise KeyError("clumsy")

        def on_fit_end(self):
            raise RuntimeError("clumsy end")

    class Last(Callback):
        order = 10

        def on_fit_end(self):
            closed.append(True)

    class Failing(Linear):
        def training_step(self, batch):
            raise ValueError("the true error")

    with pytest.raises(RuntimeError, match="clumsy end") as caught:
        make_trainer(callbacks=[Clumsy(), Last()]).fit(Failing(), make_points())
    assert isinstance(caught.value.__context__, ValueError)
    assert closed == [True]
    assert "an error hook raised KeyError" in caplog.text


def test_a_seed_set_before_is_the_runs_seed_and_generators_are_left_alone():
    from accmt import set_seed

    def train() -> tuple[list[list[float]], float]:
        set_seed(11)
        module = Scripted()
        make_trainer({"batch_size": 1}, seed=None).fit(module, Numbers(9))
        return module.seen, torch.rand(1).item()

    set_seed(11)
    expected = torch.rand(1).item()
    first, second = train(), train()
    assert first == second
    assert isinstance(Scripted(), AcceleratorModule)
    set_seed(11)
    Scripted()
    assert first[1] == torch.rand(1).item() != expected


class FitsWithin(Callback):
    """Begins another run during a run."""

    def __init__(self, fit: Any) -> None:
        self.fit = fit
        self.done = 0

    def on_update_end(self) -> None:
        self.fit(self)
        self.done += 1


def another(callback: Any) -> Any:
    """Train a model of another module within the run, with a Trainer of its own."""
    return make_trainer({"epochs": 1}, "other/model").fit(Linear(), make_points(2))


def same_model(callback: Any) -> Any:
    module = Linear()
    module.model = callback.module.unwrapped_model
    make_trainer({"epochs": 1}, "other/model").fit(module, make_points(2))


@pytest.mark.parametrize(
    ("fit", "what"),
    [
        (lambda callback: callback.trainer.fit(Linear(), make_points(2)), "Trainer"),
        (lambda callback: make_trainer({}, "other/model").fit(callback.module, make_points(2)), "module"),
        (same_model, "module"),
    ],
)
def test_a_run_within_a_run_of_the_same_trainer_or_module_is_refused(fit: Any, what: str) -> None:
    with raises_at(ModuleContractError, "fit", f"same {what}"):
        make_trainer(callbacks=FitsWithin(fit)).fit(Linear(), make_points())
    make_trainer().fit(Linear(), make_points())  # afterwards nothing is held


def test_another_trainer_may_train_another_module_within_a_run() -> None:
    make_trainer(callbacks=(within := FitsWithin(another))).fit(Linear(), make_points())
    assert within.done == 4
