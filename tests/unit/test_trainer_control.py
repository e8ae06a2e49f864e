"""Closing a Trainer, and letting its optimizer begin anew. Of several processes: tests/distributed/test_runs.py."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist

from accmt import Callback
from tests.toys import Linear, make_points, make_trainer

ADAM = {"optim": {"type": "Adam", "lr": 0.1}}


def test_a_closed_trainer_holds_no_run_and_may_be_closed_again():
    trainer = make_trainer()
    trainer.fit(Linear(), make_points())
    trainer.close()
    trainer.close()
    with pytest.raises(RuntimeError, match="there is no run yet"):
        _ = trainer.run
    assert trainer.state.global_step == 4
    assert not dist.is_initialized()


def test_a_closed_trainer_keeps_neither_data_nor_the_optimizers_memory_while_the_module_lives():
    trainer, module, data, other = make_trainer(ADAM), Linear(), make_points(), make_points(4)
    trainer.fit(module, data)
    trainer.test(test_dataset=other)
    held = [weakref.ref(thing) for thing in (data, other, module.optimizer)]
    del data, other
    trainer.close()
    gc.collect()
    assert [thing() for thing in held] == [None, None, None]
    with make_trainer(ADAM) as again:
        again.fit(module, make_points())
        trainer.close()
        assert module.trainer is again, "another Trainer's module is let be"


def test_an_error_in_the_block_goes_on_and_the_run_is_given_back():
    trainer = make_trainer()

    def work():
        with trainer:
            trainer.fit(Linear(), make_points())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert trainer._run is None


def test_a_run_in_work_cannot_be_closed():
    class Closing(Callback):
        def on_epoch_end(self):
            self.trainer.close()

    with pytest.raises(RuntimeError, match="a run has not finished yet"):
        make_trainer(callbacks=Closing()).fit(Linear(), make_points())


@pytest.fixture
def own_group():
    """A process group of one process that the program made itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_the_program_made_stays(own_group):
    with make_trainer() as trainer:
        trainer.fit(Linear(), make_points())
    assert dist.is_initialized()


@pytest.mark.parametrize("is_reset", [True, False])
def test_a_reset_optimizer_has_no_state_and_goes_on_as_a_new_one(is_reset):
    counts = []

    class Watch(Callback):
        def on_update_end(self):
            if is_reset and self.state.global_step == 2:
                self.trainer.reset_optimizer()
                assert not self.module.optimizer.state
            counts.extend(int(kept["step"]) for kept in list(self.module.optimizer.state.values())[:1])

    trainer, module = make_trainer(ADAM, callbacks=Watch()), Linear()
    trainer.fit(module, make_points())
    assert counts == ([1, 1, 2] if is_reset else [1, 2, 3, 4])
    assert module.optimizer.param_groups[0]["lr"] == 0.1


def test_a_checkpoint_after_a_reset_continues_bit_for_bit():
    class Reset(Callback):
        def on_update_end(self):
            if self.state.global_step == 2:
                self.trainer.reset_optimizer()

    def train(path, epochs, resume):
        module = Linear()
        settings = {"callbacks": Reset(), "checkpoint_every": "step", "resume": resume}
        make_trainer({**ADAM, **epochs}, path, **settings).fit(module, make_points())
        return module.model.weight.detach()

    unbroken = train("out/a", {"epochs": 1}, False)
    train("out/b", {"epochs": 1, "max_steps": 2}, False)
    assert torch.equal(train("out/b", {"epochs": 1}, True), unbroken)


def test_a_trainer_is_pickled_after_a_run_as_before_it():
    trainer = make_trainer()
    trainer.fit(Linear(), make_points())
    again = pickle.loads(pickle.dumps(trainer))  # noqa: S301 - our own
    assert again.settings == trainer.settings
    assert again.state.global_step == 4
    assert copy.deepcopy(trainer).state.global_step == 4
    again.fit(Linear(), make_points())
    assert trainer.run.state.global_step == 4
