"""What can be read off a Trainer, and what people of other trainers look for there."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import DistributedDataParallelKwargs

from accmt import EMA, Callback, OutputCollector, Trainer
from accmt.compat import OtherHookNames, OtherTrainerNames
from tests.toys import Linear, logged, make_points, make_trainer


def test_callback_metrics_are_the_newest_values_of_each_name():
    seen = []

    class Logging(Linear):
        def training_step(self, batch):
            self.log("a_val", 2)
            self.log("hidden", 3, logger=False, prog_bar=True)
            return self.step(batch)

        def on_evaluation_end(self, metrics):
            seen.append(self.trainer.callback_metrics)

    trainer = make_trainer()
    trainer.fit(Logging(), make_points(), make_points(4))
    values = trainer.callback_metrics
    assert (values["a_val"], values["hidden"]) == (2.0, 3.0)
    assert values["train_loss"] == logged(trainer, "train_loss")[-1][1]
    assert values["val_loss"] == trainer.state.metrics["val_loss"]
    assert seen == [values]


def test_without_a_launcher_one_process_works_on_the_device_that_is_asked_for():
    module = Linear()
    trainer = make_trainer(accelerator=Accelerator(cpu=True))
    trainer.fit(module, make_points())
    assert trainer.device == module.device == trainer.run.accelerator.device == torch.device("cpu")
    assert (trainer.state.num_processes, trainer.is_distributed, trainer.is_main) == (1, False, True)
    assert trainer.is_main_process


def test_the_model_is_the_one_in_work():
    seen = []

    class Looking(Linear):
        def step(self, batch):
            seen.append(self.trainer.model is self.model)
            return super().step(batch)

    trainer, first, second = make_trainer(), Looking(), Looking()
    trainer.validate(first, make_points(2))
    trainer.fit(first, make_points(2), make_points(2))
    trainer.validate(second, make_points(2))
    assert seen == [True] * 5
    assert trainer.model is first.model


class Stop(Callback):
    """Asks for the end at once."""

    def on_fit_start(self):
        self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("minimum", "updates"),
    [
        ({}, 1),
        ({"min_length": "2 epochs"}, 8),
        ({"min_length": "5 steps"}, 5),
        ({"min_length": ["2 epochs", "5 steps"]}, 8),
        ({"min_length": ["1 epoch", "5 steps"]}, 5),
    ],
    ids=str,
)
def test_should_stop_waits_for_every_minimum_that_is_given(minimum, updates):
    trainer = make_trainer({"epochs": 10}, callbacks=Stop(), **minimum)
    assert trainer.fit(Linear(), make_points()).global_step == updates
    assert trainer.state.finished


def test_handlers_of_accelerate_reach_the_accelerator():
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=77))
    trainer = make_trainer(accelerator={"kwargs_handlers": [handler]}, parallelism={"ddp": {"static_graph": True}})
    trainer.fit(Linear(), make_points())
    accelerator = trainer.run.accelerator
    assert accelerator.init_handler.timeout == timedelta(seconds=77)
    assert isinstance(accelerator.ddp_handler, DistributedDataParallelKwargs)
    assert accelerator.ddp_handler.static_graph


@pytest.mark.parametrize("is_placed", [True, False])
def test_batches_reach_the_device_unless_told_otherwise(is_placed):
    trainer = make_trainer(data_options={"device_placement": is_placed})
    trainer.fit(Linear(), make_points())
    elsewhere = replace(trainer.run, accelerator=SimpleNamespace(device=torch.device("meta")))
    batch = {"inputs": [torch.ones(2)]}
    assert elsewhere.place(batch)["inputs"][0].device.type == ("meta" if is_placed else "cpu")


def test_hooks_get_the_batch_the_loss_and_what_the_step_returned():
    returned, seen = [], []

    class Returning(Linear):
        def training_step(self, batch):
            returned.append({"loss": self.step(batch), "batch": batch[0].sum()})
            return returned[-1]

    class Watch(Callback):
        def on_before_backward(self, loss):
            assert loss is returned[-1]["loss"]

        def on_after_training_step(self, batch, outputs):
            assert outputs is returned[-1]
            seen.append(batch[0].sum())

    make_trainer(callbacks=Watch()).fit(Returning(), make_points())
    assert seen == [one["batch"] for one in returned]
    assert len(seen) == 4


def test_callbacks_of_a_pymarlin_module_are_called_and_can_gather_what_its_steps_made():
    class OfPyMarlin(OtherHookNames, Linear):
        def on_begin_train_epoch(self):
            self.calls = []
            self.collector = OutputCollector()

        def training_step(self, batch):
            self.collector.collect(self.model(batch[0]))
            return self.step(batch)

        def on_end_backward(self, loss):
            self.calls.append("backward")

        def on_end_train_step(self):
            self.calls.append(self.trainer.global_step)

        def on_end_train_epoch(self):
            self.calls.append(len(self.collector.all_outputs[0]))

        def on_end_val_epoch(self, key, outputs):
            self.calls.append((key, list(outputs)))

        def on_end_train(self):
            self.calls.append("end")

    module = OfPyMarlin()
    make_trainer({"batch_size": 4}).fit(module, make_points(7), make_points(3))
    updates = ["backward", 1, "backward", 2]
    assert module.calls == [*updates, ("", ["val_loss"]), 7, "end"]


def test_names_of_other_trainers_work_where_they_are_asked_for():
    class Ported(OtherTrainerNames, Trainer):
        pass

    hps = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}
    callback = EMA(0.9)
    trainer = Ported(hps, "out/model", callbacks=callback, model_saving=None, verbose=False)
    assert trainer.is_global_zero
    assert trainer.get_hook(EMA) is callback
    assert trainer.describe_hooks() == trainer.describe_callbacks()
    assert trainer.train(Linear(), make_points()).epoch == 1
    assert not hasattr(Trainer, "is_global_zero")
