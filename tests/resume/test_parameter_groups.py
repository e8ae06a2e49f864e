"""Runs whose parameters are in groups: resumed with the same bits, and as transformers' Trainer trains."""

import logging

import pytest
import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments
from transformers import Trainer as TransformersTrainer

from accmt import AcceleratorModule, Trainer, read_history
from accmt.errors import CheckpointError
from tests.raising import raises_at
from tests.resume.unbroken import assert_same, state_of, train

MUON = {"kind": "matrix", "type": "Muon", "lr": 0.02}
GROUPED = {"type": "AdamW", "lr": 0.01, "weight_decay": 0.1}
CASES = {
    "decay": {"no_decay": ["bias", "norm"]},
    "head": {"groups": [{"match": r"^3\.", "lr": 0.05, "betas": [0.8, 0.9]}], "no_decay": "bias"},
    "chained": {"groups": [MUON, {"match": "1\\.", "type": "SGD", "lr": 0.1, "momentum": 0.9}]},
}


@pytest.mark.parametrize("scheduler", ["CosineAnnealingLR", "ReduceLROnPlateau"])
@pytest.mark.parametrize("name", CASES)
def test_the_continued_run_ends_with_the_same_bits(name, scheduler):
    hps = {"optim": GROUPED | CASES[name], "scheduler": scheduler}
    whole = state_of(*train("out/a", hps=hps, clip_grad=0.5))
    train("out/b", hps=hps, stop=5, clip_grad=0.5)
    train("out/b", hps=hps, stop=11, resume="auto", clip_grad=0.5)
    assert_same(whole, state_of(*train("out/b", hps=hps, resume=True, clip_grad=0.5)))


def test_the_rate_with_which_a_group_began_stays_what_it_was_where_rates_are_tensors(caplog):
    optim = {"type": "tests.low_bit.TensorRates", "lr": 0.01, "groups": [{"match": r"3\.", "lr": 0.02}]}
    hps = {"optim": optim, "scheduler": "CosineAnnealingLR"}
    whole = state_of(*train("out/a", hps=hps))
    train("out/b", hps=hps, stop=7)
    trainer, module = train("out/b", hps=hps, resume=True)
    assert_same(whole, state_of(trainer, module))
    began = [group["initial_lr"] for group in trainer.run.stepper.optimizer.param_groups]
    assert began == [pytest.approx(0.01), pytest.approx(0.02)]
    assert "initial_lr" not in caplog.text


class TestWhatHasChanged:
    @pytest.mark.parametrize("scheduler", ["CosineAnnealingLR", "ReduceLROnPlateau", None])
    def test_new_rates_of_groups_are_applied(self, scheduler, caplog):
        def hps(lr, of_group, of_muon):
            groups = [{"match": r"1\.", "lr": of_group}, {**MUON, "lr": of_muon}]
            return {"optim": {**GROUPED, "lr": lr, "groups": groups, "no_decay": "norm"}, "scheduler": scheduler}

        before, _ = train("out/m", hps=hps(0.01, 0.04, 0.02), stop=7)
        rates = [group["lr"] for group in before.run.stepper.optimizer.param_groups]
        with caplog.at_level(logging.INFO):
            after, _ = train("out/m", hps=hps(0.02, 0.4, 0.01), resume=True, verbose=True, stop=7)
        assert "optim.groups: " in caplog.text
        found = [group["lr"] for group in after.run.stepper.optimizer.param_groups]
        assert found == pytest.approx([rates[0] * 2, rates[1] * 10, rates[2] / 2])
        assert [group["initial_lr"] for group in after.run.stepper.optimizer.param_groups] == [0.02, 0.4, 0.01]

    def test_weight_decay_of_groups_is_applied(self):
        hps = {"optim": GROUPED | {"no_decay": "bias"}}
        train("out/m", hps=hps, stop=7)
        trainer, _ = train("out/m", hps={"optim": {**hps["optim"], "weight_decay": 0.3}}, resume=True, stop=9)
        decays = [group["weight_decay"] for group in trainer.run.stepper.optimizer.param_groups]
        assert decays == [0.3, 0.0]

    @pytest.mark.parametrize(
        ("groups", "where", "got"),
        [
            ([{"match": "0\\.", "lr": 0.05}], "AdamW", "group 0: "),
            ([{"match": "3\\.", "type": "SGD", "lr": 0.05}], "ChainedOptimizer", "AdamW + SGD; "),
            ([], "AdamW", "group 0: "),
        ],
    )
    def test_other_members_or_types_are_refused(self, groups, where, got):
        train("out/m", hps={"optim": GROUPED | {"groups": [{"match": "3\\.", "lr": 0.05}]}}, stop=7)
        optim = GROUPED | ({"groups": groups} if groups else {})
        with raises_at(CheckpointError, where, got, do="reset_optimizer_on_resume"):
            train("out/m", hps={"optim": optim}, resume=True)


class Sentences(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(1, 50, (count, 12), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[0] % 3}


class Classifier(AcceleratorModule):
    def __init__(self, model):
        self.model = model

    def training_step(self, batch):
        return self.model(**batch).loss


def make_bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    chances = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **sizes, **chances))


def test_fifty_steps_of_transformers_trainer_have_the_same_losses(tmp_path):
    """What docs/coming-from.md says of weight decay, shown."""
    theirs, data = [], Sentences(400)

    class Losses(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            theirs.extend([logs["loss"]] if "loss" in logs else [])

    arguments = TrainingArguments(
        str(tmp_path / "theirs"), max_steps=50, per_device_train_batch_size=8, learning_rate=5e-3, weight_decay=0.1,
        warmup_steps=5, lr_scheduler_type="linear", max_grad_norm=1.0, logging_steps=1, logging_first_step=True,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    TransformersTrainer(make_bert(), arguments, train_dataset=data, callbacks=[Losses()]).train()

    hps = {
        "max_steps": 50,
        "batch_size": 8,
        "optim": {"type": "AdamW", "lr": 5e-3, "weight_decay": 0.1, "no_decay": ["bias", "norm"]},
        "scheduler": {"type": "LinearWithWarmup", "num_warmup_steps": 5},
    }
    trainer = Trainer(
        hps, "out/ours", clip_grad=1.0, shuffle_train=False, log_every=1, model_saving=None, verbose=False
    )
    trainer.fit(Classifier(make_bert()), data)
    rows = read_history(trainer.log_dir)
    ours = [row["values"]["train_loss"] for row in rows if "train_loss" in row.get("values", {})]
    assert len(ours) == len(theirs) == 50
    assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
