"""A whole run: order of hooks, planned lengths, endings, and what a run leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accmt import AcceleratorModule, Callback, read_history
from accmt.errors import DataError, ModuleContractError, UnknownArgumentError
from tests.raising import raises_at
from tests.toys import Linear, Numbers, Recorder, Scripted, Stream, logged, make_points, make_trainer

UPDATE = [
    "on_before_training_step",
    "on_before_backward",
    "on_after_backward",
    "on_after_training_step",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
    "on_before_scheduler_step",
    "on_after_scheduler_step",
    "on_before_zero_grad",
    "on_after_zero_grad",
    "on_update_end",
    "on_log",
]
EVALUATION = [
    "on_evaluation_start",
    "on_validation_start",
    "on_before_validation_step",
    "on_after_validation_step",
    "on_validation_end",
    "on_evaluation_end",
    "on_log",
]


def status_of(trainer) -> str:
    return [row["status"] for row in read_history(trainer.log_dir) if "status" in row][-1]


def test_hooks_come_in_the_documented_order():
    recorder = Recorder()
    trainer = make_trainer(
        {"epochs": 2, "batch_size": 4, "scheduler": {"type": "StepLR", "step_size": 1}},
        callbacks=recorder,
        model_saving="always",
    )
    trainer.fit(Linear(), make_points(4), make_points(4))
    epoch = ["on_epoch_start", *UPDATE, *EVALUATION, "on_save_model", "on_epoch_end"]
    assert recorder.calls == ["on_fit_start", *epoch, *epoch, "on_fit_end"]


def test_a_module_is_a_callback_of_its_own():
    class Watching(Linear):
        def __init__(self):
            super().__init__()
            self.calls = []

        def before_eval(self):
            self.calls.append("before_eval")

        def on_epoch_end(self):
            self.calls.append("on_epoch_end")

    module = Watching()
    make_trainer({"epochs": 2}).fit(module, make_points(), make_points())
    assert module.calls == ["before_eval", "on_epoch_end"] * 2


def test_callbacks_of_the_module_replace_those_of_the_same_class():
    class Counting(Callback):
        def __init__(self):
            self.epochs = 0

        def on_epoch_end(self):
            self.epochs += 1

    of_trainer, of_module = Counting(), Counting()

    class WithCallback(Linear):
        def get_callbacks(self):
            return of_module

    trainer = make_trainer(callbacks=[of_trainer])
    trainer.fit(WithCallback(), make_points())
    trainer.fit(WithCallback(), make_points())
    assert (of_trainer.epochs, of_module.epochs) == (0, 2)


def test_state_shows_what_runs_and_what_is_finished():
    seen = []

    class Watch(Callback):
        def on_after_training_step(self):
            state = self.state
            seen.append((state.epoch, state.train_step, state.global_step, state.stage, state.is_last_training_batch))

        def on_before_validation_step(self):
            assert (self.state.fn, self.state.stage, self.state.status) == ("fit", "validate", "running")

    trainer = make_trainer({"epochs": 2, "batch_size": 4}, callbacks=Watch())
    state = trainer.fit(Linear(), make_points(8), make_points(4))
    expected = [
        (0, 0, 0, "train", False),
        (0, 1, 1, "train", True),
        (1, 0, 2, "train", False),
        (1, 1, 3, "train", True),
    ]
    assert seen == expected
    assert (state.status, state.finished, state.epoch, state.global_step, state.evaluations_done) == (
        "finished",
        True,
        2,
        4,
        2,
    )
    assert state is trainer.state
    assert trainer.current_epoch == 2


@pytest.mark.parametrize(
    ("hps", "updates"),
    [({"epochs": 5, "max_steps": 3}, 3), ({"epochs": 1, "max_steps": 9}, 4), ({"epochs": -1, "max_steps": 7}, 7)],
)
def test_the_earlier_of_epochs_and_max_steps_ends_the_run(hps: dict, updates: int):
    trainer = make_trainer(hps)
    state = trainer.fit(Linear(), make_points(8))
    assert state.global_step == updates
    assert trainer.estimated_stepping_batches == updates


@pytest.mark.parametrize("accumulation", [None, 3, {1: 2}])
def test_estimated_updates_equal_the_counted_ones(accumulation):
    trainer = make_trainer({"epochs": 3}, grad_accumulation_steps=accumulation)
    state = trainer.fit(Linear(), make_points(9))
    assert trainer.estimated_stepping_batches == state.global_step


def test_fit_can_be_called_again_and_gives_the_model_back():
    module, trainer = Linear(), make_trainer()
    own = module.model
    first = trainer.fit(module, make_points())
    second = trainer.fit(module, make_points())
    assert module.model is own
    assert first is not second
    assert first.global_step == second.global_step == 4


def test_equal_seeds_give_equal_bits_and_other_seeds_others():
    class Dropout(Linear):
        def __init__(self):
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def train(seed: int) -> torch.Tensor:
        torch.rand(seed)  # the global generator's state before a run must not matter
        module = Dropout()
        make_trainer({"epochs": 2}, seed=seed).fit(module, make_points(), make_points())
        return torch.cat([parameter.detach().flatten() for parameter in module.model.parameters()])

    assert torch.equal(train(3), train(3))
    assert not torch.equal(train(3), train(4))


def test_evaluating_in_between_changes_no_weight():
    def train(**settings) -> torch.Tensor:
        module = Linear()
        make_trainer({"epochs": 2}, **settings).fit(module, make_points(), make_points(5))
        return module.model.weight.detach()

    often = train(evaluate_every_n_steps=1, eval_when_start=True)
    assert torch.equal(often, train(num_sanity_val_steps=0))
    assert torch.equal(often, train(limit_batches={"val": 0}))


@pytest.mark.parametrize(
    ("error", "status", "hooks"),
    [
        (ValueError("boom"), "FAILED", ["on_exception"]),
        (RuntimeError("boom"), "FAILED", ["on_runtime_error", "on_exception"]),
        (RuntimeError("CUDA out of memory"), "FAILED", ["on_cuda_out_of_memory", "on_runtime_error", "on_exception"]),
        (KeyboardInterrupt(), "KILLED", ["on_keyboard_interrupt"]),
    ],
    ids=["value", "runtime", "memory", "keyboard"],
)
def test_an_error_reaches_the_caller_after_hooks_and_trackers_were_told(error, status, hooks):
    class Failing(Linear):
        def training_step(self, batch):
            if self.state.global_step == 2:
                raise error
            return self.step(batch)

    recorder = Recorder()
    module, trainer = Failing(), make_trainer(callbacks=recorder)
    own = module.model
    with pytest.raises(type(error)) as caught:
        trainer.fit(module, make_points())
    assert caught.value is error
    assert recorder.calls[-len(hooks) - 1 :] == [*hooks, "on_fit_end"]
    assert status_of(trainer) == status
    assert module.model is own
    assert trainer.interrupted == isinstance(error, KeyboardInterrupt)
    assert trainer.state.status == ("interrupted" if trainer.interrupted else "failed")


def test_a_finished_run_is_marked_finished_and_tells_its_configuration():
    trainer = make_trainer({"batch_size": 4}, grad_accumulation_steps=2, tracker_options={"config": {"note": "x"}})
    trainer.fit(Linear(), make_points())
    config = next(row["config"] for row in read_history(trainer.log_dir) if "config" in row)
    assert status_of(trainer) == "FINISHED"
    expected = {"batch_size": 4, "optim.lr": 0.1, "effective_batch_size": 8, "num_processes": 1, "seed": 0, "note": "x"}
    assert expected.items() <= config.items()
    assert config["model_path"].endswith("out/model")


def test_a_quiet_run_prints_nothing(capfd):
    make_trainer(verbose=False).fit(Linear(), make_points(), make_points())
    assert capfd.readouterr() == ("", "")


def test_a_run_without_saving_makes_no_model_folder():
    trainer = make_trainer()
    assert not list(Path().iterdir())
    trainer.fit(Linear(), make_points())
    assert [path.name for path in Path().iterdir()] == ["logs"]


def test_subclasses_replace_backward_step_and_zero_grad():
    from accmt import Trainer

    class Own(Trainer):
        backwards = zeroed = 0

        def do_backward(self, loss):
            self.backwards += 1
            super().do_backward(loss)

        def do_opt_step(self):
            return False

        def do_zero_grad(self):
            self.zeroed += 1
            super().do_zero_grad()

    module = Linear()
    before = module.model.weight.detach().clone()
    trainer = Own(
        {
            "epochs": 1,
            "batch_size": 2,
            "optim": {"type": "SGD", "lr": 0.1},
            "scheduler": {"type": "StepLR", "step_size": 1},
        },
        "out/m",
        model_saving=None,
        checkpoint_every=None,
        verbose=False,
    )
    with raises_at(ModuleContractError, "training"):
        trainer.fit(module, make_points())
    state = trainer.state
    assert (trainer.backwards, trainer.zeroed, state.global_step, state.skipped_steps) == (4, 4, 0, 4)
    assert module.scheduler.get_last_lr() == [0.1]
    assert torch.equal(module.model.weight, before)


def test_an_accelerator_of_ones_own_class_does_the_backward():
    from accelerate import Accelerator

    class Counting(Accelerator):
        backwards = 0

        def backward(self, loss, **kwargs):
            self.backwards += 1
            super().backward(loss, **kwargs)

    accelerator = Counting(cpu=True)
    make_trainer(accelerator=accelerator).fit(Linear(), make_points())
    assert accelerator.backwards == 4


def test_an_accelerator_that_accumulates_itself_is_refused():
    from accelerate import Accelerator

    trainer = make_trainer(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4))
    with raises_at(ValueError, "Trainer(accelerator=...)"):
        trainer.fit(Linear(), make_points())


def test_accumulation_in_the_environment_changes_nothing(monkeypatch):
    def train() -> torch.Tensor:
        module, trainer = Linear(), make_trainer()
        trainer.fit(module, make_points())
        assert trainer.run.accelerator.gradient_accumulation_steps == 1  # it would divide scaled losses by it
        return module.model.weight.detach()

    plain = train()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert torch.equal(train(), plain)


def test_bf16_runs_the_training_step_in_autocast_and_keeps_weights_in_fp32():
    kinds = []

    class Looking(Linear):
        def training_step(self, batch):
            kinds.append((torch.is_autocast_enabled("cpu"), self.model(batch[0]).dtype))
            return self.step(batch)

    module = Looking()
    make_trainer(mixed_precision="bf16").fit(module, make_points())
    assert {enabled for enabled, _ in kinds} == {True}
    assert module.model.weight.dtype == torch.float32
    assert not hasattr(module.model.forward, "__wrapped__"), "autocast must not stay on the user's model"


def test_fp16_on_a_cpu_is_refused():
    with raises_at(ValueError, "mixed_precision"):
        make_trainer(mixed_precision="fp16").fit(Linear(), make_points())


def test_training_without_data_says_both_ways_to_give_them():
    with raises_at(DataError, "fit", "no training data", do="get_train_dataloader(self)"):
        make_trainer().fit(Linear())


@pytest.mark.parametrize("takes_dataset", [False, True])
def test_loaders_of_the_module_win(takes_dataset: bool):
    class Own(Scripted):
        if takes_dataset:

            def get_train_dataloader(self, dataset):
                assert dataset is None
                return Numbers([5, 6])
        else:

            def get_train_dataloader(self):
                return torch.utils.data.DataLoader(Numbers([5, 6]), batch_size=1)

        def get_validation_dataloader(self):
            return Numbers([9])

    module = Own()
    trainer = make_trainer(num_sanity_val_steps=0)
    trainer.fit(module)
    assert sorted(sum(module.seen, [])) == [5, 6]
    assert module.validated == [[9]]
    assert isinstance(trainer.train_dataloader, torch.utils.data.DataLoader)
    assert len(trainer.val_dataloaders) == 1


def test_empty_data_are_refused():
    with raises_at(DataError, "the training data", "length 0"):
        make_trainer().fit(Linear(), Numbers(0))
    with raises_at(DataError, "the training data", "8 samples for batches of 16"):
        make_trainer({"batch_size": 16}, data_options={"drop_last": True}).fit(Linear(), make_points(8))


def test_a_stream_trains_for_epochs_and_for_max_steps():
    assert make_trainer({"epochs": 2}).fit(Linear(), Stream(make_points(7))).global_step == 8
    state = make_trainer({"epochs": -1, "max_steps": 10}, evaluate_every_n_steps=4).fit(
        Linear(), Stream(make_points(7)), make_points(2)
    )
    assert (state.global_step, state.evaluations_done, state.samples_seen) == (10, 3, 18)


def test_a_schedule_over_an_unknown_length_is_refused_at_the_start():
    data = Stream(make_points(7))
    trainer = make_trainer({"scheduler": {"type": "LinearWithWarmup", "warmup_ratio": 0.1}})
    with raises_at(ValueError, "hps_config scheduler"):
        trainer.fit(Linear(), data)
    assert data.num_read == 0


@pytest.mark.parametrize(
    ("log_every", "expected"),
    [(3, [(3, 2.0), (6, 5.0), (7, 7.0)]), (7, [(7, 4.0)]), (1, [(i, float(i)) for i in range(1, 8)]), (-1, [(7, 4.0)])],
)
def test_logged_losses_are_means_since_the_last_row(log_every: int, expected: list):
    trainer = make_trainer({"batch_size": 1}, log_every=log_every, shuffle_train=False)
    trainer.fit(Scripted(), Numbers([1, 2, 3, 4, 5, 6, 7]))
    assert logged(trainer, "train_loss") == expected


def test_losses_are_logged_under_their_chosen_names():
    trainer = make_trainer(train_loss_metric_name="loss/train", val_loss_metric_name="loss/val")
    trainer.fit(Linear(), make_points(), make_points())
    names = {name for row in read_history(trainer.log_dir) for name in row.get("values", {})}
    assert names == {"loss/train", "loss/val"}


def test_further_entries_of_a_training_step_are_logged_as_means():
    class Talking(Scripted):
        def training_step(self, batch):
            return {"loss": super().training_step(batch), "double": 2 * batch.mean(), "text": "ignored"}

    trainer = make_trainer({"batch_size": 2}, log_every=2, shuffle_train=False)
    trainer.fit(Talking(), Numbers([1, 1, 3, 3, 5]))
    assert logged(trainer, "double") == [(2, 4.0), (3, 10.0)]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_dropped_or_zeroed_after_an_update(set_to_none: bool):
    kinds = []

    class Look(Callback):
        def on_after_zero_grad(self, optimizer):
            kinds.append(optimizer.param_groups[0]["params"][0].grad)

    make_trainer(set_to_none=set_to_none, callbacks=Look()).fit(Linear(), make_points())
    assert all((gradient is None) == set_to_none for gradient in kinds)
    assert set_to_none or all(not gradient.any() for gradient in kinds)


def test_clipping_by_norm_and_value():
    def train(**settings) -> torch.Tensor:
        module = Linear()
        before = module.model.weight.detach().clone()
        points = torch.utils.data.TensorDataset(1000 * torch.ones(2, 3), torch.zeros(2, 1))
        make_trainer({"optim": {"type": "SGD", "lr": 1.0}}, **settings).fit(module, points)
        return (module.model.weight.detach() - before).flatten()

    assert train(clip_grad=1).norm().item() == pytest.approx(1.0, rel=1e-4)
    assert train(clip_grad={"value": 0.5}).abs().max().item() == pytest.approx(0.5)
    assert train(clip_grad=0).norm() > 1000
    assert torch.equal(train(clip_grad=0), train())


def test_optimizer_and_schedule_of_the_module_are_used_with_true_lengths():
    asked = []

    class Own(Linear):
        def get_optimizer(self):
            self.own = torch.optim.SGD(self.model.parameters(), lr=0.5)
            return self.own

        def get_scheduler(self, optimizer, steps_per_epoch, epochs):
            asked.append((optimizer, steps_per_epoch, epochs))
            return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    module = Own()
    make_trainer({"epochs": 3}).fit(module, make_points(10))
    assert module.optimizer is module.own
    assert asked == [(module.own, 5, 3)]
    assert module.own.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5**15)


def test_a_schedule_per_epoch_changes_at_epoch_ends_only():
    rates = []

    class Look(Callback):
        def on_update_end(self):
            rates.append(self.module.optimizer.param_groups[0]["lr"])

    hps = {
        "epochs": 2,
        "batch_size": 4,
        "scheduler": {"type": "StepLR", "step_size": 1, "gamma": 0.5},
        "step_scheduler_per_epoch": True,
    }
    make_trainer(hps, callbacks=Look()).fit(Linear(), make_points(8))
    assert rates == [0.1, 0.1, 0.05, 0.05]


def test_a_teacher_that_has_weights_of_the_student_is_refused_unless_they_are_frozen():
    class Tied(AcceleratorModule):
        def __init__(self, *, is_frozen):
            self.teacher = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
            self.model = nn.Sequential(self.teacher[0].requires_grad_(not is_frozen), nn.Linear(3, 1))

        def training_step(self, batch):
            return nn.functional.mse_loss(self.model(batch[0]), self.teacher(batch[0]))

    with raises_at(ModuleContractError, "Tied"):
        make_trainer().fit(Tied(is_frozen=False), make_points())
    assert make_trainer().fit(Tied(is_frozen=True), make_points()).finished


def test_a_teacher_is_frozen_in_evaluation_mode_and_not_saved():
    class Distilled(Linear):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5))

        def step(self, batch):
            inputs, _ = batch
            return nn.functional.mse_loss(self.model(inputs), self.teacher(inputs))

    module = Distilled()
    before = [parameter.clone() for parameter in module.teacher.parameters()]
    trainer = make_trainer(model_saving="best_train_loss")
    trainer.fit(module, make_points())
    assert all(map(torch.equal, before, module.teacher.parameters()))
    assert not module.teacher.training
    assert not any(parameter.requires_grad for parameter in module.teacher.parameters())
    assert len(trainer.run.stepper.parameters) == len(list(module.model.parameters()))
    assert load_file("out/model/model.safetensors").keys() == {"weight", "bias"}


def test_a_compiled_model_trains_and_keeps_the_names_of_its_weights():
    module = Linear()
    trainer = make_trainer(compile={"backend": "eager"}, model_saving="always")
    trainer.fit(module, make_points(), make_points())
    assert list(module.model.state_dict()) == ["weight", "bias"]
    fresh = Linear()
    fresh.load_weights("out/model")
    assert torch.equal(fresh.model.weight, module.model.weight)


def test_collate_functions_and_who_wins():
    def double(samples):
        return 2 * torch.stack(samples)

    def run(module, **settings):
        make_trainer({"batch_size": 2}, shuffle_train=False, num_sanity_val_steps=0, **settings).fit(
            module, Numbers([1, 2]), Numbers([3])
        )
        return module.seen, module.validated

    class Own(Scripted):
        def collate_fn(self, samples):
            return torch.stack(samples) + 100

    class OwnTrain(Own):
        def collate_fn_train(self, samples):
            return torch.stack(samples) + 1000

    assert run(Scripted(), collate_fn=double) == ([[2, 4]], [[6]])
    assert run(Scripted(), collate_fn=[double, torch.neg]) == ([[-2, -4]], [[-6]])
    assert run(Scripted(), collate_fn={"train": double, "val": torch.stack}) == ([[2, 4]], [[3]])
    assert run(Own(), collate_fn=double) == ([[101, 102]], [[103]])
    assert run(OwnTrain(), collate_fn={"train": double}) == ([[1001, 1002]], [[103]])


def test_order_of_training_and_validation_samples():
    def train(**settings):
        module = Scripted()
        make_trainer({"epochs": 2, "batch_size": 1}, num_sanity_val_steps=0, **settings).fit(
            module, Numbers(20), Numbers(20)
        )
        flat = [int(batch[0]) for batch in module.seen]
        return flat[:20], flat[20:], [int(batch[0]) for batch in module.validated[:20]]

    first, second, validated = train()
    assert sorted(first) == sorted(second) == validated == list(range(20))
    assert first != second
    assert first != list(range(20))
    assert train() == (first, second, validated)
    assert train(shuffle_train=False)[0] == list(range(20))
    assert train(shuffle_validation=True)[2] != list(range(20))
    module = Scripted()
    make_trainer({"batch_size": 1}, sampler=[3, 1]).fit(module, Numbers(20))
    assert module.seen == [[3], [1]]


@pytest.mark.parametrize(("limit", "batches"), [(0.25, 2), (10, 8), (1, 1), (1.0, 8)])
def test_limits_of_batches(limit, batches: int):
    module = Scripted()
    make_trainer({"batch_size": 1}, limit_batches={"train": limit, "val": limit}, num_sanity_val_steps=0).fit(
        module, Numbers(8), Numbers(8)
    )
    assert (len(module.seen), len(module.validated)) == (batches, batches)


def test_an_untrained_argument_is_named():
    with raises_at(UnknownArgumentError, "fit", "['num_labels']"):
        make_trainer().fit(Linear(), make_points(), num_labels=3)
    with raises_at(TypeError, "fit(module)"):
        make_trainer().fit(Linear, make_points())
    assert not hasattr(Linear, "trainer")
    assert not hasattr(Linear, "state")


def test_a_fraction_of_an_unknown_epoch_is_refused():
    with raises_at(ValueError, "Trainer(evaluate_every_n_steps=...)"):
        make_trainer(evaluate_every_n_steps=0.5).fit(Linear(), Stream(make_points(7)), make_points(2))


def test_an_entry_with_the_name_of_the_loss_does_not_replace_it():
    class Clashing(Scripted):
        def training_step(self, batch):
            return {"loss": super().training_step(batch), "train_loss": 99.0}

    trainer = make_trainer({"batch_size": 2}, shuffle_train=False)
    trainer.fit(Clashing(), Numbers([1, 3]))
    assert logged(trainer, "train_loss") == [(1, 2.0)]


def test_micro_batches_keep_the_batch_that_was_asked_for():
    module = Scripted()
    trainer = make_trainer(
        {"batch_size": 6, "max_micro_batch_size": 4}, shuffle_train=False, limit_batches={"train": 2}
    )
    state = trainer.fit(module, Numbers(20))
    assert module.seen == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert (state.global_step, trainer.train_step_batch_size, trainer.estimated_stepping_batches) == (2, 3, 2)


@pytest.mark.parametrize("cuts", ["loader", "batch sampler"])
def test_micro_batches_cannot_cut_the_batches_that_a_user_cuts(cuts: str, caplog):
    data, settings = Numbers(8), {}
    if cuts == "loader":
        data = torch.utils.data.DataLoader(data, batch_size=4)
    else:
        batches = torch.utils.data.BatchSampler(range(8), batch_size=4, drop_last=False)
        settings["data_options"] = {"batch_sampler": batches}
    state = make_trainer({"batch_size": 4, "max_micro_batch_size": 1}, **settings).fit(Scripted(), data)
    assert state.global_step == 2
    assert "max_micro_batch_size has no effect" in caplog.text


@pytest.mark.parametrize("setting", ["split_batches", "dispatch_batches"])
def test_launch_settings_that_change_batches_are_refused(setting: str):
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**{setting: True}))
    with raises_at(ValueError, "Trainer(accelerator=...)"):
        make_trainer(accelerator=accelerator).fit(Linear(), make_points())


def test_nested_batches_keep_their_types_on_the_way_to_the_device():
    class Nested(Linear):
        def training_step(self, batch):
            assert isinstance(batch, dict)
            assert isinstance(batch["pair"], tuple)
            assert [type(value) for value in batch["list"]] == [torch.Tensor, str]
            return self.step(batch["pair"])

    def collate(samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return {"pair": (inputs, targets), "list": [inputs, "text"]}

    assert make_trainer(collate_fn=collate).fit(Nested(), make_points()).global_step == 4


def test_trackers_are_at_hand_during_a_run():
    from torch.utils.tensorboard import SummaryWriter

    found = []

    class Look(Callback):
        def on_epoch_end(self):
            found.append((len(self.trainer.loggers), self.trainer.get_tracker("tensorboard", unwrap=True)))
            assert self.trainer.tracker is self.trainer.logger is self.module.tracker

    make_trainer(log_with="tensorboard", callbacks=Look()).fit(Linear(), make_points())
    assert found[0][0] == 1
    assert isinstance(found[0][1], SummaryWriter)
