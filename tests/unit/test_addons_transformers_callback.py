"""Callbacks of transformers' Trainer in a run of accmt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState

from accmt.errors import ModuleContractError
from tests.raising import raises_at
from tests.toys import InterruptAt, InterruptionError, Numbers, Scripted, make_trainer


class Watching(TrainerCallback):
    """Notes each event, with the step, and sets flags of `control` after steps."""

    def __init__(self, **flags: int) -> None:
        self.flags = flags
        self.events: list[tuple[str, int]] = []
        self.rows: list[dict[str, Any]] = []
        self.seen: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        event = super().__getattribute__(name)
        if not name.startswith("on_"):
            return event

        def call(args: Any, state: Any, control: Any, **others: Any) -> Any:
            self.events.append((name, state.global_step))
            return event(args, state, control, **others)

        return call

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> Any:
        self.seen.append((args, state, control, others))
        for flag, step in self.flags.items():
            if state.global_step == step:
                setattr(control, flag, True)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.rows.append({"step": state.global_step, **logs})


def train(callback: Any, tmp_path: Path, **settings: Any) -> Any:
    trainer = make_trainer({"epochs": 2, "batch_size": 2}, str(tmp_path / "model"), callbacks=callback, **settings)
    trainer.fit(Scripted(), Numbers(8), Numbers(4))
    return trainer


def test_each_event_is_called_in_transformers_order_with_its_objects(tmp_path: Path):
    watching = Watching()
    train(watching, tmp_path, grad_accumulation_steps=2, log_every=1, checkpoint_every=2)
    step = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]
    names = [name for name, _ in watching.events if name != "on_epoch_end"]
    assert names[:3] == ["on_init_end", "on_train_begin", "on_epoch_begin"]
    assert names[3:15] == step * 2
    assert names[15:20] == ["on_save", "on_prediction_step", "on_prediction_step", "on_evaluate", "on_log"]
    assert ("on_save", 4) in watching.events
    assert names[-1] == "on_train_end"
    args, state, control, others = watching.seen[0]
    assert [type(one) for one in (args, state, control)] == [TrainingArguments, TrainerState, TrainerControl]
    assert args.gradient_accumulation_steps == 2
    assert args.to_dict()["per_device_train_batch_size"] == 2
    assert (state.global_step, state.epoch, state.max_steps) == (4, 2.0, 4)  # live
    assert others["model"] is not None
    assert others["optimizer"] is not None
    assert [set(row) & {"loss", "eval_loss"} for row in watching.rows[:3]] == [{"loss"}, {"loss"}, {"eval_loss"}]


def test_the_flags_of_control_log_evaluate_save_and_stop(tmp_path: Path):
    watching = Watching(should_log=1, should_evaluate=2, should_save=2, should_training_stop=3)
    trainer = train(watching, tmp_path, log_every=-1, checkpoint_every=100)
    assert [row["step"] for row in watching.rows if "loss" in row][0] == 1
    assert [row["step"] for row in watching.rows if "eval_loss" in row][0] == 2
    assert ("on_save", 2) in watching.events
    assert trainer.state.global_step == 3


def test_a_callback_may_ask_for_the_device_the_data_and_the_tokenizer_and_write_into_the_folder(tmp_path: Path):
    class Asking(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.answers = (args.device.type, args.world_size, args.n_gpu, args.process_index, args.train_batch_size)
            self.num_batches = len(others["train_dataloader"]), len(others["eval_dataloader"])
            assert others["processing_class"] is None
            Path(args.output_dir, "notes.txt").write_text("mine")

    asking = Asking()
    assert train(asking, tmp_path, accelerator={"cpu": True}).state.global_step == 8
    assert (asking.answers, asking.num_batches) == (("cpu", 1, 0, 0, 2), (4, 2))
    assert (tmp_path / "model" / "notes.txt").exists()


def test_its_state_survives_an_interruption(tmp_path: Path):
    class Counting(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"steps": self.steps}}

    with pytest.raises(InterruptionError):
        train([Counting(), InterruptAt(5)], tmp_path, checkpoint_every=2)
    counting = Counting()
    train([counting, InterruptAt(None)], tmp_path, resume=True)
    assert counting.steps == 8


def test_a_callback_of_transformers_itself_writes_what_it_writes_there(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    train(TensorBoardCallback(SummaryWriter(str(tmp_path / "board"))), tmp_path)
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert {"train/loss", "eval/loss", "train/learning_rate"} <= set(events.Tags()["scalars"])


def test_one_that_an_argument_replaces_is_refused_with_the_argument():
    for values, line in (((7,), "7"), ((7, 0.1), '{"valid_loss": {"patience": 7, "min_delta": 0.1}}')):
        with raises_at(ModuleContractError, "Trainer(callbacks=...)", do=f"Trainer(patience={line})"):
            make_trainer(callbacks=EarlyStoppingCallback(*values))
