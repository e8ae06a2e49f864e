"""Manual optimization gives the automatic loop's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from accmt import AcceleratorModule, ChainedOptimizer, ExtendedAcceleratorModule, ModuleContractError
from accmt.errors import CheckpointError
from tests.raising import raises_at
from tests.toys import Linear, Recorder, logged, make_points, make_trainer

HPS = {"epochs": 2, "batch_size": 3, "optim": {"type": "AdamW", "lr": 0.05}, "scheduler": {"type": "CosineAnnealingLR"}}


class Manual(ExtendedAcceleratorModule):
    """The module of the automatic loop, by hand."""

    def __init__(self):
        self.model = Linear().model

    def loss(self, batch):
        inputs, targets = batch
        return nn.functional.mse_loss(self.model(inputs), targets)

    def training_step(self, batch):
        loss = self.loss(batch)
        self.backward(loss)
        self.step()
        self.zero_grad()
        return loss

    def validation_step(self, batch):
        return self.loss(batch)


def test_the_manual_loop_gives_the_bits_of_the_automatic_one():
    outcomes = []
    for module in (Linear(), Manual()):
        trainer = make_trainer(HPS, clip_grad=0.5)
        state = trainer.fit(module, make_points(8), make_points(4))
        rate = module.optimizer.param_groups[0]["lr"]
        outcomes.append(
            (
                module.model.weight.tolist(),
                rate,
                state.state_dict(),
                logged(trainer, "train_loss"),
                logged(trainer, "val_loss"),
            )
        )
    assert outcomes[0] == outcomes[1]


def test_further_values_of_a_step_are_logged_as_the_automatic_loop_logs_them():
    def with_largest(self, batch):
        loss = type(self).__bases__[0].training_step(self, batch)
        return {"loss": loss, "largest": batch[0].max(), "size": len(batch[0])}

    rows = []
    for kind in (Linear, Manual):
        trainer = make_trainer(HPS)
        trainer.fit(type("WithLargest", (kind,), {"training_step": with_largest})(), make_points(8))
        rows.append([logged(trainer, name) for name in ("train_loss", "largest", "size")])
    assert all(rows[0])
    assert rows[0] == rows[1]


def test_several_steps_of_one_batch_count_as_one_update():
    class Twice(Manual):
        def training_step(self, batch):
            super().training_step(batch)
            return super().training_step(batch)

    recorder = Recorder()
    state = make_trainer({**HPS, "scheduler": None}, callbacks=recorder).fit(Twice(), make_points(8))
    assert (state.global_step, state.samples_seen, recorder.calls.count("on_after_optimizer_step")) == (6, 16, 12)


def test_accumulation_by_hand_counts_the_updates_that_were_made():
    class Every(Manual):
        def training_step(self, batch):
            self.backward(self.loss(batch))
            if self.state.train_step % 2:
                self.step_optimizer()
                self.zero_grad()

    module = Every()
    before = module.model.weight.detach().clone()
    state = make_trainer({**HPS, "batch_size": 2, "scheduler": None}).fit(module, make_points(8))
    assert (state.global_step, state.batch_iteration) == (4, 8)
    assert not torch.equal(module.model.weight, before)


class Adversaries(ExtendedAcceleratorModule):
    """A generator and a discriminator with an optimizer each."""

    def __init__(self):
        torch.manual_seed(3)
        self.model = nn.ModuleDict({"generator": nn.Linear(2, 3), "discriminator": nn.Linear(3, 1)})

    def get_optimizer(self):
        return make_adversaries_optimizers(self.model)

    def training_step(self, batch):
        for optimizer, loss in zip(self.optimizers(), adversarial_losses(self.model, batch[0]), strict=True):
            with self.toggled_optimizer(optimizer):
                self.backward(loss())
                self.step_optimizer(optimizer)
                self.zero_grad()
        return torch.zeros(())


def make_adversaries_optimizers(model):
    return ChainedOptimizer([torch.optim.AdamW(part.parameters(), lr=0.05) for part in model.values()])


def adversarial_losses(model, real):
    judge, made = model["discriminator"], model["generator"](real[:, :2])
    return (
        lambda: nn.functional.softplus(-judge(made)).mean(),
        lambda: nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made.detach())).mean(),
    )


def test_optimizers_that_step_apart_give_the_bits_of_plain_torch():
    module, data = Adversaries(), make_points(8)
    reference = Adversaries().model
    make_trainer({"epochs": 2, "batch_size": 4}, shuffle_train=False).fit(module, data)
    generator, discriminator = make_adversaries_optimizers(reference).optimizers
    for start in [0, 4] * 2:
        losses = adversarial_losses(reference, data[start : start + 4][0])
        for optimizer, loss in zip((generator, discriminator), losses, strict=True):
            parts = list(reference.parameters())
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            gradients = torch.autograd.grad(loss(), own)
            for parameter in parts:
                parameter.grad = None
            for parameter, gradient in zip(own, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
    for mine, theirs in zip(module.model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_one_clipping_is_over_all_of_several_optimizers():
    class Both(AcceleratorModule):
        def __init__(self):
            torch.manual_seed(3)
            self.model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))

        def get_optimizer(self):
            first, second = self.model
            adam, sgd = torch.optim.AdamW(first.parameters(), lr=0.05), torch.optim.SGD(second.parameters(), lr=0.5)
            return ChainedOptimizer([adam, sgd])

        def training_step(self, batch):
            return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    module, reference, data = Both(), Both(), make_points(8)
    make_trainer({"epochs": 1, "batch_size": 4}, shuffle_train=False, clip_grad=0.1).fit(module, data)
    optimizers = reference.get_optimizer().optimizers
    for start in (0, 4):
        reference.training_step(data[start : start + 4]).backward()
        nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(module.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_only_the_parameters_of_a_toggled_optimizer_are_trained_and_those_frozen_before_stay_frozen():
    seen = []

    class Watched(Adversaries):
        def training_step(self, batch):
            frozen = self.model["discriminator"].bias
            frozen.requires_grad_(False)
            for optimizer in self.optimizers():
                with self.toggled_optimizer(optimizer):
                    seen.append([parameter.requires_grad for parameter in self.model.parameters()])
            seen.append([parameter.requires_grad for parameter in self.model.parameters()])
            frozen.requires_grad_(True)
            return torch.zeros(())

    make_trainer({"batch_size": 4}).fit(Watched(), make_points(4))
    assert seen == [[True, True, False, False], [False, False, True, False], [True, True, True, False]]


def test_gradients_of_the_other_optimizers_stay_where_one_steps():
    kept = []

    class Together(Adversaries):
        def training_step(self, batch):
            generator, discriminator = self.optimizers()
            sum(loss() for loss in adversarial_losses(self.model, batch[0])).backward()
            before = [parameter.detach().clone() for parameter in self.model.parameters()]
            self.step_optimizer(discriminator)
            kept.extend(torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True))
            kept.extend(parameter.grad is not None for parameter in self.model.parameters())
            self.zero_grad()
            return torch.zeros(())

    make_trainer({"batch_size": 4}).fit(Together(), make_points(4))
    assert kept == [True, True, False, False] + [True] * 4


def test_an_optimizer_that_the_run_does_not_have_is_refused():
    class Foreign(Adversaries):
        def training_step(self, batch):
            self.step_optimizer(torch.optim.SGD(self.model.parameters(), lr=1.0))

    with raises_at(ModuleContractError, "an optimizer"):
        make_trainer({"batch_size": 4}).fit(Foreign(), make_points(4))


class LightningOrder(Manual):
    """Gradients are dropped before the next backward, not after the step."""

    def training_step(self, batch):
        loss = self.loss(batch)
        self.zero_grad()
        self.backward(loss)
        self.step()
        return loss


def steps_of_checkpoints():
    return sorted(int(path.name.rpartition("-")[2]) for path in Path("out/checkpoint-model").glob("step-*"))


def test_gradients_that_were_stepped_on_are_no_reason_against_a_checkpoint():
    trainer = make_trainer(HPS, checkpoint_every="step", checkpoint_options={"max_checkpoints": 10})
    trainer.fit(LightningOrder(), make_points(9), make_points(4))
    assert steps_of_checkpoints() == [1, 2, 3, 4, 5, 6]


def test_a_run_in_that_order_resumes_with_the_bits_of_the_unbroken_one():
    hps = {name: value for name, value in HPS.items() if name != "scheduler"}  # which depends on max_steps
    whole = LightningOrder()
    make_trainer(hps, model_path="out/whole", seed=4).fit(whole, make_points(9), make_points(4))
    make_trainer({**hps, "max_steps": 4}, checkpoint_every="step", seed=4).fit(
        LightningOrder(), make_points(9), make_points(4)
    )
    resumed = LightningOrder()
    make_trainer(hps, resume=True, seed=4).fit(resumed, make_points(9), make_points(4))
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_gradients_that_are_added_to_are_told_and_end_the_checkpoints(caplog):
    class NeverDropped(Manual):
        def training_step(self, batch):
            loss = self.loss(batch)
            self.backward(loss)
            self.step()
            return loss

    make_trainer(HPS, checkpoint_every="step", checkpoint_options={"max_checkpoints": 10}).fit(
        NeverDropped(), make_points(9), make_points(4)
    )
    assert steps_of_checkpoints() == [1]  # before the second backward showed it
    assert caplog.text.count("backward adds to gradients that were already used") == 1


class AsInTorch(Manual):
    """The same by torch's own methods of the optimizer, as people type it."""

    def training_step(self, batch):
        (optimizer,) = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.backward(loss)
        optimizer.step()
        return loss


def train_as_in_torch(kind, path="out/model", **settings):
    module, recorder = kind(), Recorder()
    trainer = make_trainer(HPS, path, clip_grad=0.5, checkpoint_every="2 steps", callbacks=recorder, **settings)
    state = trainer.fit(module, make_points(8), make_points(4))
    rows = logged(trainer, "train_loss"), logged(trainer, "val_loss"), logged(trainer, "lr")
    names = recorder.names(
        "on_before_optimizer_step", "on_after_scheduler_step", "on_save_checkpoint", "on_evaluation_end"
    )
    return module.model.weight.tolist(), state.state_dict(), rows, names


def test_an_optimizers_own_step_is_clipped_counted_and_followed_as_a_step_of_the_module():
    by_module, by_torch = train_as_in_torch(Manual, "out/a"), train_as_in_torch(AsInTorch, "out/b")
    assert by_module == by_torch
    assert by_torch[1]["global_step"] == 6
    assert "on_save_checkpoint" in by_torch[3]


def test_gradients_that_wait_for_an_optimizers_own_step_delay_a_checkpoint(caplog):
    class Every2nd(AsInTorch):
        def training_step(self, batch):
            loss = self.loss(batch)
            self.backward(loss)
            if self.state.train_step % 2:
                self.optimizer.step()
                self.model.zero_grad()
            return loss

    trainer = make_trainer(HPS | {"epochs": 1}, checkpoint_every="epoch")
    assert trainer.fit(Every2nd(), make_points(9)).global_step == 1
    assert "in the middle of a step" in caplog.text
    assert "backward adds to gradients" not in caplog.text
    assert not list(trainer.checkpoint_path.glob("step-*"))


def test_gradients_that_are_never_dropped_are_said_where_the_optimizer_steps_by_itself(caplog):
    class Forgets(AsInTorch):
        def training_step(self, batch):
            loss = self.loss(batch)
            self.backward(loss)
            self.optimizer.step()
            return loss

    make_trainer(HPS, checkpoint_every="epoch").fit(Forgets(), make_points(9))
    assert "backward adds to gradients that were already used" in caplog.text


def test_two_optimizers_may_step_as_in_torch_with_gradients_left_behind(caplog):
    class AsInDCGAN(Adversaries):
        def get_optimizer(self):
            return list(make_adversaries_optimizers(self.model).optimizers)

        def get_scheduler(self, optimizer, steps_per_epoch, epochs):
            return [
                torch.optim.lr_scheduler.StepLR(one, 1, gamma)
                for one, gamma in zip(optimizer.optimizers, (0.5, 0.1), strict=True)
            ]

        def training_step(self, batch):
            first, second = adversarial_losses(self.model, batch[0])
            generator, discriminator = self.optimizers()
            self.model["discriminator"].zero_grad()
            self.backward(second())
            discriminator.step()
            if self.state.train_step == 0:
                self.model["generator"].zero_grad()
                self.backward(first())
                generator.step()
            return torch.zeros(())

    def run(path, epochs, **settings):
        module = AsInDCGAN()
        hps = {"epochs": epochs, "batch_size": 4}
        trainer = make_trainer(
            hps,
            path,
            checkpoint_every="1 step",
            checkpoint_options={"max_checkpoints": 9},
            shuffle_train=False,
            **settings,
        )
        state = trainer.fit(module, make_points(8))
        rates = [group["lr"] for one in module.optimizer.optimizers for group in one.param_groups]
        return trainer, state.global_step, rates, [weight.tolist() for weight in module.model.parameters()]

    trainer, *whole = run("out/a", 2)
    assert whole[0] == 4
    assert whole[1] == pytest.approx([0.05 * 0.5**2, 0.05 * 0.1**4])
    assert len(list(trainer.checkpoint_path.glob("step-*"))) == 4
    run("out/b", 1)
    assert run("out/b", 2, resume=True)[1:] == tuple(whole)
    assert "in the middle" not in caplog.text


def test_one_of_several_schedulers_advances_where_the_module_says_so():
    class Two(Adversaries):
        def get_scheduler(self, optimizer, steps_per_epoch, epochs):
            return [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in optimizer.optimizers]

        def training_step(self, batch):
            result = super().training_step(batch)
            self.step_scheduler(self.schedulers()[0])
            return result

    module = Two()
    make_trainer({"epochs": 1, "batch_size": 4}).fit(module, make_points(8))
    assert [group["lr"] for group in module.optimizer.param_groups] == [0.0125, 0.05]


def test_a_scheduler_that_the_module_begins_to_advance_late_is_refused():
    class Late(AsInTorch):
        def training_step(self, batch):
            if self.state.global_step == 2:
                self.scheduler.step()
            return super().training_step(batch)

    with raises_at(ModuleContractError, "training_step"):
        make_trainer(HPS).fit(Late(), make_points(9))

    class Always(AsInTorch):
        def training_step(self, batch):
            loss = super().training_step(batch)
            self.scheduler.step()
            return loss

    module = Always()
    make_trainer({**HPS, "epochs": 1}).fit(module, make_points(9))
    assert module.scheduler.last_epoch == 3


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("calls", ["nothing", "step_scheduler", "at the end of an epoch"])
def test_a_scheduler_that_nobody_advances_is_named_once(calls, epochs, caplog):
    class Stepping(Manual):
        def training_step(self, batch):
            self.zero_grad()
            self.backward(self.loss(batch))
            self.step_optimizer()
            if calls == "step_scheduler":
                self.step_scheduler()

        def on_epoch_end(self):
            if calls == "at the end of an epoch":
                self.step_scheduler()

    make_trainer({**HPS, "epochs": epochs}).fit(Stepping(), make_points(9))
    assert caplog.text.count("CosineAnnealingLR has not advanced in 3 optimizer steps") == (calls == "nothing")


@pytest.mark.parametrize("is_by_hand", [True, False])
def test_the_second_step_of_an_optimizer_around_another_one_counts_like_its_step(is_by_hand):
    class Sharpness(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def first_step(self):
            self.old = [weight.clone() for weight in self.param_groups[0]["params"]]
            for weight in self.param_groups[0]["params"]:
                weight.add_(0.05 * weight.grad.sign())
            self.zero_grad()

        @torch.no_grad()
        def second_step(self):
            for weight, old in zip(self.param_groups[0]["params"], self.old, strict=True):
                weight.copy_(old)
            self.base.step()

        def step(self, closure):
            self.first_step()
            with torch.enable_grad():
                closure()
            self.second_step()

    class Sharp(Manual):
        def get_optimizer(self):
            return Sharpness(self.model.parameters())

        def training_step(self, batch):
            def closure():
                loss = self.loss(batch)
                self.backward(loss)
                return loss

            closure()
            if is_by_hand:
                self.optimizer.first_step()
                closure()
                self.optimizer.second_step()
            else:
                self.optimizer.step(closure)
            self.zero_grad()

    recorder = Recorder()
    module = Sharp()
    assert make_trainer(HPS, callbacks=recorder).fit(module, make_points(9)).global_step == 6
    assert len(recorder.names("on_after_optimizer_step")) == 6
    assert module.scheduler.last_epoch == 6


def test_steps_of_an_optimizer_that_get_optimizer_did_not_return_do_not_count_and_a_warning_says_so(caplog):
    class Foreign(Manual):
        def training_step(self, batch):
            if "own" not in vars(self):
                self.own = torch.optim.SGD(self.model.parameters(), lr=0.1)
            self.own.zero_grad()
            self.backward(self.loss(batch))
            self.own.step()

    assert make_trainer(HPS).fit(Foreign(), make_points(9)).global_step == 0
    assert caplog.text.count("no optimizer of self.optimizers() has stepped") == 1


def test_an_optimizer_has_its_own_step_again_after_the_run():
    module = AsInTorch()
    make_trainer(HPS).fit(module, make_points(3))
    optimizer = torch.optim.SGD(module.model.parameters(), lr=0.1)
    module.get_optimizer = lambda: optimizer
    make_trainer({**HPS, "scheduler": None}).fit(module, make_points(3))
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize("calls", ["their own step", "step_scheduler"])
def test_each_of_several_schedulers_advances_once_a_step_whoever_advances_it(calls):
    class Two(Adversaries):
        def get_scheduler(self, optimizer):
            return [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizer.optimizers]

        def training_step(self, batch):
            for optimizer, loss in zip(self.optimizers(), adversarial_losses(self.model, batch[0]), strict=True):
                self.model.zero_grad()
                self.backward(loss())
                optimizer.step()
            for scheduler in self.schedulers():
                scheduler.step() if calls == "their own step" else self.step_scheduler(scheduler)
            return torch.zeros(())

    module = Two()
    make_trainer({"epochs": 2, "batch_size": 4}).fit(module, make_points(8))
    assert [group["lr"] for group in module.optimizer.param_groups] == [0.05 * 0.5**4] * 2


@pytest.mark.parametrize("processes", [1, 2])
def test_a_closure_may_return_nothing_on_any_number_of_processes(processes, monkeypatch):
    class Twice(torch.optim.SGD):
        def step(self, closure):
            closure()
            super().step()

    class Silent(Manual):
        def get_optimizer(self):
            return Twice(self.model.parameters(), lr=0.1)

        def training_step(self, batch):
            def closure():
                self.zero_grad()
                self.backward(self.loss(batch))

            self.optimizer.step(closure)

    monkeypatch.setattr("accmt.addons.manual_optimization.num_data_processes", lambda: processes)
    assert make_trainer({"epochs": 1, "batch_size": 4}).fit(Silent(), make_points(8)).global_step == 2


class ByLBFGS(Manual):
    def get_optimizer(self):
        return torch.optim.LBFGS(self.model.parameters(), lr=0.5, max_iter=3)

    def training_step(self, batch):
        def closure():
            self.zero_grad()
            loss = self.loss(batch)
            self.backward(loss)
            return loss

        return self.optimizer.step(closure)


def test_lbfgs_gives_the_bits_of_plain_torch_and_of_a_resumed_run():
    def run(path, epochs, **settings):
        module = ByLBFGS()
        trainer = make_trainer(
            {"epochs": epochs, "batch_size": 4}, path, shuffle_train=False, checkpoint_every="epoch", **settings
        )
        trainer.fit(module, make_points(8))
        return module.model.state_dict()

    reference, data = ByLBFGS(), make_points(8)
    optimizer = reference.get_optimizer()
    for start in [0, 4] * 3:

        def closure(batch=data[start : start + 4]):
            optimizer.zero_grad()
            loss = reference.loss(batch)
            loss.backward()
            return loss

        optimizer.step(closure)
    run("out/b", 1)
    for state in (run("out/a", 3), run("out/b", 3, resume=True)):
        assert all(torch.equal(state[name], value) for name, value in reference.model.state_dict().items())


def test_lbfgs_without_its_closure_is_explained():
    class Plain(ByLBFGS):
        def training_step(self, batch):
            self.backward(self.loss(batch))
            self.step()

    with raises_at(ModuleContractError, "self.step_optimizer"):
        make_trainer({"epochs": 1, "batch_size": 4}).fit(Plain(), make_points(8))


class Contrastive(AcceleratorModule):
    """Has a loss over all samples of a batch."""

    def __init__(self):
        self.model = Linear().model

    def training_step(self, batch):
        return contrast(self.model(batch[0]))


class InChunks(ExtendedAcceleratorModule):
    """The same with GradCache, as docs/recipes.md writes it: activations of one chunk at a time."""

    def __init__(self):
        self.model = Linear().model

    def training_step(self, batch):
        chunks = batch[0].split(2)
        with torch.no_grad():
            embedded = torch.cat([self.model(chunk) for chunk in chunks])
        embedded.requires_grad_()
        loss = contrast(embedded)
        gradients = torch.autograd.grad(loss, embedded)[0].split(2)
        for chunk, part in zip(chunks, gradients, strict=True):
            self.backward((self.model(chunk) * part).sum())
        self.step()
        self.zero_grad()
        return loss.detach()


def contrast(embedded):
    return (embedded @ embedded.T).logsumexp(1).mean()


def test_a_loss_over_cached_embeddings_gives_the_gradients_of_one_over_the_batch():
    modules = [Contrastive(), InChunks()]
    for module in modules:
        make_trainer(HPS | {"batch_size": 5}).fit(module, make_points(14))
    assert torch.allclose(modules[0].model.weight, modules[1].model.weight, atol=1e-6)


def test_an_optimizer_whose_state_is_spread_over_processes_is_told_what_to_write():
    class Spread(torch.optim.SGD):
        """As ZeroRedundancyOptimizer: its state has to be collected first."""

        def consolidate_state_dict(self, to=0): ...

        def state_dict(self):
            raise RuntimeError("Optimizer state has not been consolidated on this rank.")

    class Module(Contrastive):
        def get_optimizer(self):
            return Spread(self.model.parameters(), lr=0.1)

    with raises_at(CheckpointError, "Spread", do="accmt launch --strat fsdp2"):
        make_trainer(HPS, checkpoint_every="epoch").fit(Module(), make_points(14))
    make_trainer(HPS, checkpoint_every=None).fit(Module(), make_points(14))  # as advised
