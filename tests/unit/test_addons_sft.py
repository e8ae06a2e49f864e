"""Supervised fine-tuning: rows become samples as they are read, and weigh what is trained of them."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import GenerationConfig

from accmt import SFTModule, Trainer
from accmt.addons.sft.chat import IGNORED, mask_row
from accmt.addons.sft.rows import Masking, PadRows, TokenizedRows
from accmt.errors import DataError
from tests import conversations
from tests.conversations import draw_conversations, make_tokenizer
from tests.pairs import pairs
from tests.raising import raises_at
from tests.resume.unbroken import InterruptAt, InterruptionError
from tests.toys import Stream

HPS = {"epochs": 1, "batch_size": 4, "optim": {"type": "SGD", "lr": 0.1}}


@cache
def tokenizer() -> Any:
    return make_tokenizer(conversations.CHATML)


def rows(number: int = 10) -> list[dict[str, Any]]:
    return draw_conversations(number, seed=3)


def make_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer()), **sizes))


def fit(folder: Path, data: Any, *, hps: dict[str, Any] | None = None, module: Any = None, val: Any = None, **settings):
    module = SFTModule(make_model(), tokenizer()) if module is None else module
    given = {"seed": 1, "shuffle_train": False, "verbose": False, **settings}
    trainer = Trainer({**HPS, **(hps or {})}, folder, **given)
    trainer.fit(module, data, val)
    return trainer, module


def weights_of(module: Any) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in module.model.parameters()]


def assert_close(one: Any, other: Any) -> None:
    for own, expected in zip(weights_of(one), weights_of(other), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


ANSWER = {"role": "assistant", "content": "It will."}
NO_ANSWER = {"messages": [{"role": "user", "content": "nobody answers"}]}


def test_the_loss_is_the_mean_over_what_the_assistant_writes_in_all_rows(tmp_path: Path):
    trainer, module = fit(tmp_path / "model", rows(), val=rows())
    losses = []
    for row in rows():
        masked = mask_row(tokenizer(), row)
        ids, labels = torch.tensor([masked.input_ids]), torch.tensor(masked.labels)
        with torch.inference_mode():
            logits = module.model(input_ids=ids).logits[0]
        is_target = labels[1:] != IGNORED
        losses += functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")[is_target].tolist()
    assert trainer.state.metrics["val_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize("hps", [{"max_tokens": 600}, {"max_tokens": 600, "packing": True}], ids=["budget", "packing"])
def test_budgets_of_tokens_and_packing_take_the_same_steps(tmp_path: Path, hps: dict[str, Any]):
    data = [*rows(), NO_ANSWER, NO_ANSWER]
    _, padded = fit(tmp_path / "padded", data)
    _, cut = fit(tmp_path / "cut", data, hps=hps)
    assert_close(cut, padded)
    assert not torch.equal(weights_of(cut)[0], weights_of(SFTModule(make_model(), tokenizer()))[0])


def test_a_stream_is_trained_as_a_list_is_and_leaves_out_rows_without_a_target(tmp_path: Path):
    _, of_list = fit(tmp_path / "list", rows())
    mixed = [rows()[0], NO_ANSWER, *rows()[1:], NO_ANSWER]
    _, of_stream = fit(tmp_path / "stream", Stream(mixed), dataloader_num_workers=0)
    assert all(map(torch.equal, weights_of(of_list), weights_of(of_stream)))


class Resuming(Stream):
    """Keeps its own position, and counts what it reads."""

    def __init__(self, data: list[Any]) -> None:
        super().__init__(data)
        self.next, self.number = 0, 0
        self.loaded: int | None = None

    def __iter__(self) -> Any:
        self.next, self.loaded = self.loaded or 0, None
        while self.next < len(self.values):
            self.next, self.number = self.next + 1, self.number + 1
            yield self.values[self.next - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["next"]


def streaming(data: list[Any]) -> Any:
    from datasets import IterableDataset

    return IterableDataset.from_generator(lambda: iter(data))


@pytest.mark.parametrize(
    ("hps", "kind", "per_turn"),
    pairs([{}, {"max_tokens": 600, "packing": True}], [Resuming, streaming, Stream], [False, True]),
)
def test_a_run_on_a_stream_resumes_with_equal_bits(tmp_path: Path, kind: Any, per_turn: bool, hps: dict[str, Any]):
    data = [NO_ANSWER, *rows(13), NO_ANSWER, *rows(6)]

    def module() -> SFTModule:
        return SFTModule(make_model(), tokenizer(), per_turn=per_turn)

    settings = {"hps": {"epochs": 2, **hps}, "dataloader_num_workers": 0}
    unbroken, whole = fit(tmp_path / "whole", kind(data), module=module(), checkpoint_every=None, **settings)
    steps = unbroken.state.global_step
    for stop in {steps // 2, steps - 1}:  # at the end of the first epoch, and inside the second
        folder, settings["checkpoint_every"] = tmp_path / f"stopped-{stop}", f"{stop} steps"
        with pytest.raises(InterruptionError):
            fit(folder, kind(data), module=module(), callbacks=InterruptAt(stop), **settings)
        stream = kind(data)
        resumed, parts = fit(folder, stream, module=module(), resume=True, **settings)
        assert resumed.state.global_step == steps
        assert all(map(torch.equal, weights_of(whole), weights_of(parts)))


@pytest.mark.parametrize("group_by_length", [False, True])
def test_a_stream_that_keeps_its_position_is_not_read_again(tmp_path: Path, group_by_length: bool):
    settings = {
        "checkpoint_every": "2 steps",
        "dataloader_num_workers": 0,
        "data_options": {"group_by_length": group_by_length},
    }
    with pytest.raises(InterruptionError):
        fit(tmp_path / "model", Resuming(rows(300)), callbacks=InterruptAt(60), **settings)
    stream = Resuming(rows(300))
    fit(tmp_path / "model", stream, resume=True, **settings)
    looked_at, left = 64, 300 - 60 * 4
    again = 200 if group_by_length else 9  # the buffer that is read; the row at the checkpoint
    assert left + looked_at <= stream.number <= left + looked_at + again


def test_a_shuffle_buffer_within_is_not_resumed_from_its_state(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def shuffled() -> Any:
        return streaming(rows(20)).shuffle(seed=1, buffer_size=8)

    settings = {"checkpoint_every": "2 steps", "dataloader_num_workers": 0, "verbose": True}
    _, whole = fit(tmp_path / "whole", shuffled(), **settings)
    with pytest.raises(InterruptionError):
        fit(tmp_path / "parts", shuffled(), callbacks=InterruptAt(3), **settings)
    caplog.clear()
    _, parts = fit(tmp_path / "parts", shuffled(), resume=True, **settings)
    assert "their state_dict omits the contents of the shuffle buffer" in caplog.text
    assert all(map(torch.equal, weights_of(whole), weights_of(parts)))


def test_the_rows_of_a_stream_get_the_epoch(tmp_path: Path):
    stream = Stream(rows(4))
    fit(tmp_path / "model", stream, hps={"epochs": 3}, dataloader_num_workers=0)
    assert sorted(set(stream.epochs)) == [0, 1, 2]


def test_rows_without_a_target_weigh_nothing_also_where_a_batch_has_no_other(tmp_path: Path):
    trainer, mixed = fit(tmp_path / "mixed", [*rows(4), *[NO_ANSWER] * 4, *rows(4)])
    assert trainer.state.skipped_steps == 1
    _, without = fit(tmp_path / "without", [*rows(4), *rows(4)])
    assert all(map(torch.equal, weights_of(mixed), weights_of(without)))


def test_the_loss_of_a_batch_without_a_target_is_finite_since_other_processes_reduce_its_gradients():
    module = SFTModule(make_model(), tokenizer())
    samples = TokenizedRows([NO_ANSWER] * 2, Masking(tokenizer()))
    output = module.step(module.collate_fn([samples[0], samples[1]]))
    assert output["weight"] == 0
    assert output["loss"].isfinite()
    output["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in module.model.parameters())


def test_a_datasets_dataset_is_read_lazily_and_without_the_entries_that_rows_lack(tmp_path: Path):
    from datasets import Dataset

    def call(name: str, **arguments: Any) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}

    called = [{"messages": [{"role": "user", "content": "?"}, call("look_up", what="rain"), ANSWER]}]
    called += [{"messages": [{"role": "user", "content": "?"}, call("add", left=1, right=2), ANSWER]}]
    data = [*rows(), *called] * 2
    table = Dataset.from_list([{"tools": None, **row} for row in data])  # its columns are the entries of the first
    assert table[10]["messages"][1]["tool_calls"][0]["function"]["arguments"]["left"] is None
    _, of_dataset = fit(tmp_path / "dataset", table)
    _, of_list = fit(tmp_path / "list", data)
    assert all(map(torch.equal, weights_of(of_dataset), weights_of(of_list)))


def test_the_first_row_is_shown_and_odd_rows_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first = {"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}]}
    with caplog.at_level(logging.INFO, logger="accmt"):
        fit(tmp_path / "model", [NO_ANSWER, first, *rows(), NO_ANSWER], verbose=True)
    said = [record.getMessage() for record in caplog.records]
    [shown] = [message for message in said if "⟦" in message and "row 1," in message]
    assert shown.endswith("<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n⟦so<|im_end|>⟧\n")
    [warning] = [record for record in caplog.records if "rows checked" in record.getMessage()]
    assert warning.levelno == logging.WARNING
    assert "of 13 rows checked: 2 without any token to train on (row 0, row 12)" in warning.getMessage()


def test_generation_stops_at_the_end_of_answers_and_that_is_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    for stops, saved, is_said in ((2, [2, end], True), ([2, end], [2, end], False), (None, [end], True)):
        model = make_model()
        model.generation_config.eos_token_id = stops
        caplog.clear()
        fit(tmp_path / "model", rows(), module=SFTModule(model, tokenizer()), verbose=True, resume=False)
        assert (
            f"answers end with '<|im_end|>' (token {end}), so model.generate now also stops there" in caplog.text
        ) == is_said
        assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == saved


@pytest.mark.parametrize("kind", [list, Stream])
def test_rows_of_which_none_has_a_target_are_an_error_before_training(tmp_path: Path, kind: Any):
    with raises_at(DataError, "supervised fine-tuning", "3 rows", "row 0, row 1, row 2"):
        fit(tmp_path / "model", kind([NO_ANSWER] * 3))
    module = SFTModule(make_model(), tokenizer(), max_length=3)
    with raises_at(DataError, "supervised fine-tuning", "row 0: its answers start after 3 tokens", do="max_length"):
        fit(tmp_path / "model", kind(rows()), module=module)
    assert not (tmp_path / "model" / "model.safetensors").exists()


def test_each_turn_may_be_a_sample_of_its_own():
    own = make_tokenizer(conversations.REWRITING)
    whole, turns = (TokenizedRows(rows(), Masking(own, per_turn=per_turn)) for per_turn in (False, True))
    answers = sum(message["role"] == "assistant" for row in rows() for message in row["messages"])
    assert (len(whole), len(turns)) == (10, answers)
    assert any(whole.read(index).problems for index in range(10))
    assert not any(turns.read(index).problems for index in range(answers))


def test_batches_are_padded_on_the_right_and_to_buckets():
    pad = PadRows(7)
    samples = [{"input_ids": [1, 2, 3], "labels": [IGNORED, 2, 3]}, {"input_ids": [4, 5], "labels": [IGNORED, 5]}]
    batch = pad(samples)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 7]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3], [IGNORED, 5, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    pad.pad_to_multiple_of = 4
    assert {tuple(value.shape) for value in pad(samples).values()} == {(2, 4)}


def test_a_model_of_hyper_parameters_gets_the_tokenizer_of_its_folder(tmp_path: Path):
    make_model().save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    hps = {**HPS, "model": {"path": str(tmp_path / "base"), "type": "AutoModelForCausalLM"}}
    _, module = fit(tmp_path / "model", rows(), module=SFTModule.from_hps(hps, max_length=300))
    _, expected = fit(tmp_path / "other", rows(), module=SFTModule(make_model(), tokenizer(), max_length=300))
    assert all(map(torch.equal, weights_of(module), weights_of(expected)))
