"""What a run leaves in the model folder: a card, hyper-parameters, nothing of the run before; and on a full disk."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from accmt import AcceleratorModule, Callback, Handler, Monitor, TensorBoard, Trainer
from accmt.huggingface import load_model_weights, save_model
from accmt.saving import write_trainer_config
from tests.toys import Linear, make_points, make_trainer


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let no file grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def gpt2(width: int = 8) -> GPT2LMHeadModel:
    special = {"bos_token_id": 0, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=width, n_layer=1, n_head=2, **special))


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_card_says_what_the_model_is_and_how_it_was_made(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "abc"])
    trainer = make_trainer({"epochs": 2}, model_saving="best_valid_loss")
    trainer.fit(Linear(), make_points(8), make_points(3))
    card = Path("out/model/README.md").read_text()
    loss = trainer.state.metrics["val_loss"]
    for line in (
        "library_name: pytorch",
        "# model",
        f"| val_loss | {loss:.6g} |",
        f"| best_valid_loss | {trainer.state.best['best_valid_loss']:.6g} |",
        "| model | Linear |",
        "| parameters | 4 |",
        "| training | 8 |",
        "| validation | 3 |",
        "| optim.lr | 0.1 |",
        f"| torch | {torch.__version__} |",
        "python train.py --token ...",
    ):
        assert f"{line}\n" in card, line


def test_the_hyper_parameters_in_the_folder_train_the_same_model_again():
    first, second = Linear(), Linear()
    make_trainer(model_saving="always").fit(first, make_points())
    again = {"model_saving": None, "checkpoint_every": None, "verbose": False, "seed": 0}
    Trainer("out/model/hps.yaml", "out/again", **again).fit(second, make_points())
    assert torch.equal(first.model.weight, second.model.weight)


def test_cards_and_hyper_parameters_of_the_user_stay():
    Path("out/model").mkdir(parents=True)
    for name in (names := ("README.md", "hps.yaml", "trainer_config.json")):
        Path("out/model", name).write_text("mine")
    make_trainer(model_saving="always").fit(Linear(), make_points())
    assert {Path("out/model", name).read_text() for name in names} == {"mine"}


def test_the_arguments_in_the_folder_make_the_same_trainer_again():
    first, second = Linear(), Linear()
    trainer = make_trainer(
        {"optim": {"type": "Adam", "lr": 0.1}},
        model_saving=["always", "best_train_loss"],
        limit_batches={"train": 1},
        log_with=TensorBoard(flush_secs=5),
        handlers=[Handler.KEYBOARD, "any"],
        monitor=Monitor(learning_rate=True),
        max_time=timedelta(hours=1),
        tracker_options={"config": {"note": "x"}},
    )
    trainer.fit(first, make_points())
    again = Trainer.from_config("out/model/always/trainer_config.json", verbose=False)
    again.fit(second, make_points())
    assert torch.equal(first.model.weight, second.model.weight)
    config = json.loads(Path("out/model/always/trainer_config.json").read_text())
    assert again.config() == config
    told, kept = trainer.config(), ("handlers", "monitor", "max_time", "log_with")
    assert {name: config[name] for name in told if name not in kept} == {n: told[n] for n in told if n not in kept}
    assert again.settings.handling.kinds == trainer.settings.handling.kinds
    assert again.settings.tracking.monitored == trainer.settings.tracking.monitored
    assert (config["log_with"], config["tensorboard"]) == (["tensorboard"], {"flush_secs": 5})


def test_the_arguments_in_the_folder_hold_neither_objects_nor_secrets():
    class Own(GeneralTracker):
        name, requires_logging_directory, main_process_only = "own", False, True

        def __init__(self, **kwargs):
            super().__init__()

        tracker = None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step, **kwargs):
            pass

    told = {"callbacks": [Callback()], "collate_fn": {"val": list}, "grad_accumulation_steps": {0: 2}}
    told |= {"log_with": [Own(), "tensorboard"], "flush_secs": 5}
    make_trainer(model_saving="always", **told).fit(Linear(), make_points())
    names = set(json.loads(Path("out/model/trainer_config.json").read_text()))
    told_by_text = {"hps_config", "model_path", "model_saving", "checkpoint_every", "verbose", "seed"}
    assert names == {*told_by_text, "grad_accumulation_steps"}
    secrets = {"tensorboard": {"api_key": "abc"}, "logging_dir": "https://me:abc@server", "wandb_token": "abc"}
    secrets |= {
        "tracker_options": {"config": {"hosts": ["https://me:abc@h", "https://h"], "note": "https://h/?api_key=a"}}
    }
    write_trainer_config(Path("out"), {"hps_config": {}, **secrets})
    assert json.loads(Path("out/trainer_config.json").read_text()) == {
        "hps_config": {},
        "tensorboard": {},
        "tracker_options": {"config": {"hosts": ["https://h"]}},
    }


def test_a_run_with_another_kind_of_model_leaves_nothing_of_the_one_before():
    class Writer(AcceleratorModule):
        def __init__(self):
            self.model = gpt2()

        def step(self, batch):
            return self.model(
                input_ids=torch.ones(1, 2, dtype=torch.long), labels=torch.ones(1, 2, dtype=torch.long)
            ).loss

    make_trainer(model_saving="always").fit(Writer(), make_points())
    assert Path("out/model/generation_config.json").exists()
    make_trainer(model_saving="always").fit(Linear(), make_points())
    assert {path.name for path in Path("out/model").iterdir()} == {
        *("model.safetensors", "status.json", "README.md", "hps.yaml", "trainer_config.json")
    }


@pytest.mark.parametrize("size", [200, 2_000])
def test_a_disk_that_fills_leaves_the_transformers_model_before_as_it_was(size: int):
    old, folder = gpt2(), Path("model")
    save_model(old, old.state_dict(), folder)
    before = read_all(folder)
    wide = gpt2(width=16)
    with full_disk(size), pytest.raises(OSError, match="could not be written|too large"):
        save_model(wide, wide.state_dict(), folder)
    assert read_all(folder) == before
    found = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, old.state_dict()[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize("size", [100, 1_000])
def test_a_disk_that_fills_leaves_the_adapter_before_as_it_was(size: int):
    def lora(r: int) -> Any:
        return get_peft_model(gpt2(), LoraConfig(r=r, target_modules=["c_attn"], fan_in_fan_out=True))

    old, folder = lora(2), Path("model")
    save_model(old, old.state_dict(), folder)
    before = read_all(folder)
    large = lora(8)
    with full_disk(size), pytest.raises(OSError, match="could not be written|too large"):
        save_model(large, large.state_dict(), folder)
    assert read_all(folder) == before
    load_model_weights(lora(2), folder)


def test_a_disk_that_fills_in_the_middle_of_a_run_keeps_the_best_before_it():
    class Growing(Linear):
        def __init__(self):
            super().__init__()
            self.model = nn.Sequential(self.model)

        def validation_step(self, batch):
            return torch.tensor(1.0 - self.state.evaluations_done)

        def on_evaluation_end(self, metrics):
            if self.state.evaluations_done == 2:
                self.best = read_all(Path("out/model"))
                del self.best[".lock"]  # while the run lasts
                self.model.register_buffer("large", torch.zeros(100_000))

    module = Growing()
    trainer = make_trainer({"epochs": 3}, model_saving="best_valid_loss")
    with full_disk(100_000), pytest.raises(OSError, match="could not be written|too large"):
        trainer.fit(module, make_points(), make_points(2))
    assert read_all(Path("out/model")) == module.best
