"""`TrainingArguments` of transformers as arguments of accmt's Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments, TrainingArguments

import accmt
from accmt import AcceleratorModule, HyperParameters, Trainer
from accmt.errors import ArgumentError
from tests.raising import raises_at
from tests.tables import each
from tests.toys import logged


def make_arguments(**values: Any) -> TrainingArguments:
    return TrainingArguments("out/news", **{"use_cpu": True, "disable_tqdm": True, **values})


def read(**values: Any) -> dict[str, Any]:
    return Trainer(make_arguments(**values)).settings.to_arguments()


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))


def make_rows() -> Dataset:
    tokens = torch.randint(3, 50, (52, 6), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[:, 0] = -100  # their Trainer counts it as a target, which it never is
    return Dataset.from_dict({"input_ids": tokens, "labels": labels}).with_format("torch")


class Model(AcceleratorModule):
    def __init__(self) -> None:
        self.model = make_model()

    def step(self, batch: Any) -> Any:
        return self.model(**batch)


@pytest.mark.skipif(
    int(transformers.__version__.split(".")[1]) < 20,
    reason="accumulation multiplied gradients there for a model that does not take `num_items_in_batch`",
)
@each(
    "values",
    [
        {},
        {"optim": "adafactor", "learning_rate": 1e-2, "lr_scheduler_type": "inverse_sqrt", "warmup_steps": 3},
        {"optim": "sgd", "weight_decay": 0.1, "max_steps": 7, "lr_scheduler_type": "cosine", "warmup_steps": 0.2},
        {
            **{"weight_decay": 0.3, "adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-4, "learning_rate": 1e-2},
            **{"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": 2.0, "lr_end": 1e-4}},
            **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_grad_norm": 0.05},
        },
    ],
)
def test_a_run_has_the_steps_rates_and_weights_of_transformers_trainer(values: dict[str, Any], tmp_path: Path):
    arguments = make_arguments(**values, train_sampling_strategy="sequential", logging_steps=1, save_strategy="no")
    theirs = transformers.Trainer(make_model(), arguments, train_dataset=make_rows())
    theirs.train()
    rows = [row for row in theirs.state.log_history if "loss" in row]
    trainer = Trainer(arguments, tmp_path / "model", monitor=["learning_rate", "grad_norm"], verbose=False)
    module = Model()
    trainer.fit(module, make_rows())
    rate = "learning_rate" if logged(trainer, "learning_rate") else "learning_rate_0"  # with and without weight decay
    ours = {name: [value for _, value in logged(trainer, name)] for name in ("train_loss", "grad_norm", rate)}
    assert ours["train_loss"] == pytest.approx([row["loss"] for row in rows], rel=1e-5)
    assert ours["grad_norm"] == pytest.approx([row["grad_norm"] for row in rows], rel=1e-4)
    rates = [row["learning_rate"] for row in rows]  # of the step; here, of the next one
    assert ours[rate][:-1] == pytest.approx(rates[1:], rel=1e-9)
    for name, weight in theirs.model.named_parameters():
        torch.testing.assert_close(module.model.get_parameter(name), weight, rtol=1e-4, atol=2e-6)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")
def test_all_that_it_says_becomes_an_argument_or_a_hyper_parameter():
    arguments = read(
        num_train_epochs=2, per_device_eval_batch_size=16, learning_rate=2e-5, warmup_steps=10, seed=1, bf16=True,
        optim_args="amsgrad=true", torch_compile=True, torch_compile_mode="max-autotune", eval_strategy="steps",
        eval_steps=50, save_steps=50, save_total_limit=2, load_best_model_at_end=True, metric_for_best_model="eval_f1",
        logging_steps=7, report_to="tensorboard", eval_on_start=True, gradient_checkpointing=True, run_name="a",
        gradient_checkpointing_kwargs={"use_reentrant": False}, train_sampling_strategy="group_by_length",
        ddp_find_unused_parameters=True, ddp_bucket_cap_mb=30, gradient_accumulation_steps=4, dataloader_num_workers=2,
        dataloader_drop_last=True, push_to_hub=True, hub_model_id="me/news",
    )  # fmt: skip
    hps = HyperParameters.from_config(arguments.pop("hps_config"))
    assert (hps.epochs, hps.batch_size, hps.scheduler, hps.scheduler_kwargs) == (
        *(2, (8, 16), "LinearWithWarmup"),
        {"num_warmup_steps": 10},
    )
    optim = {"lr": 2e-5, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": True}
    assert (hps.optim, hps.optim_kwargs) == ("AdamW", optim)
    assert arguments.pop("callbacks").repo_id == "me/news"
    assert arguments == {
        **{"model_path": "out/news", "model_saving": "best_f1", "metrics": ["f1"], "evaluate_every_n_steps": 50},
        **{"checkpoint_every": "50 steps", "checkpoint_options": {"max_checkpoints": 2}, "log_every": 7, "seed": 1},
        **{"log_with": accmt.TensorBoard, "mixed_precision": "bf16", "eval_when_start": True, "run_name": "a"},
        **{"gradient_checkpointing": {"use_reentrant": False}, "clip_grad": 1.0, "grad_accumulation_steps": 4},
        **{"data_options": {"drop_last": True, "group_by_length": True}, "dataloader_num_workers": 2},
        **{"compile": {"backend": "inductor", "mode": "max-autotune"}, "dataloader_pin_memory": False},
        **{"parallelism": {"ddp": {"find_unused_parameters": True, "bucket_cap_mb": 30}}, "accelerator": {"cpu": True}},
        "enable_progress_bar": False,
    }


def test_arguments_of_the_call_take_precedence_and_may_be_hyper_parameters():
    trainer = Trainer(make_arguments(max_steps=5), "out/mine", clip_grad=0.5, batch_size=4, max_steps=9)
    hps = trainer.settings.hps
    assert (hps.batch_size, hps.epochs, hps.max_steps) == (4, -1, 9)
    assert trainer.settings.running.seed == 42  # their default
    assert (str(trainer.settings.model_folder), trainer.settings.optimization.clip_grad) == ("out/mine", 0.5)
    assert Trainer(hps_config=make_arguments(seed=3), model_path="out/mine").settings.running.seed == 3


def test_hyper_parameters_alone_are_read_from_it_too():
    arguments = Seq2SeqTrainingArguments("out", use_cpu=True, predict_with_generate=True, generation_max_length=64)
    hps = HyperParameters.from_training_arguments(arguments)
    assert hps == HyperParameters.from_config(arguments)
    assert (hps.epochs, hps.evaluation) == (3, {"generate": {"max_length": 64}})


def test_what_has_no_equivalent_is_one_line_with_what_to_write(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, logger="accmt")
    values = {"label_smoothing_factor": 0.1, "logging_first_step": True, "report_to": ["wandb", "codecarbon"]}
    trainer = Trainer(make_arguments(**values, num_train_epochs=2.5))
    (line,) = [record.getMessage() for record in caplog.records]
    for part in ("label_smoothing=0.1", "logging_first_step=True", "no tracker codecarbon", "max_steps for 2.5 epochs"):
        assert part in line
    assert trainer.settings.tracking.log_with is accmt.WandB


@each(
    ("values", "where"),
    [
        ({"logging_steps": 0.1}, "TrainingArguments(logging_steps=0.1)"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}, "TrainingArguments(lr_scheduler_type=...)"),
    ],
)
def test_what_would_train_otherwise_is_an_error(values: dict[str, Any], where: str):
    with raises_at(ArgumentError, where):
        read(**values)
