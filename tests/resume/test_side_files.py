"""Files beside the checkpoints that a resume does not need: whatever becomes of them, the run continues."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from accmt import Callback, read_history
from accmt.addons.report import read_run
from tests.toys import Linear, make_points, make_trainer

RUN = "logs/model/run"


class Stop(Callback):
    def on_update_end(self):
        if self.state.global_step == 3:
            raise ValueError("stop")


def fit(**settings):
    module = Linear()
    trainer = make_trainer(
        checkpoint_every="1 step", checkpoint_options={"async_checkpointing": False}, run_name="run", **settings
    )
    trainer.fit(module, make_points(), make_points(4))
    return module.model.weight.tolist()


def break_off(**settings):
    with pytest.raises(ValueError, match="stop"):
        fit(callbacks=Stop(), **settings)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0x80
    path.write_bytes(content)


def put_a_page_of_zeros(path):
    content = path.read_bytes()
    path.write_bytes(content[:5] + bytes(4096) + content[40:])


def make_a_folder(path):
    path.unlink()
    path.mkdir()
    (path / "mine").touch()


STARTS = ["[]", "{", '{"starts": [{"process": "p", "step": "x"}]}', '{"starts": [3]}', "[" * 100_000]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("unbroken"))
        return fit()


class TestAResumeContinues:
    @pytest.mark.parametrize("damage", [flip, put_a_page_of_zeros, make_a_folder])
    def test_with_a_damaged_record_of_starts(self, damage, unbroken, caplog):
        break_off()
        damage(Path("out/checkpoint-model/starts.json"))
        with caplog.at_level(logging.WARNING, logger="accmt"):
            assert fit(resume=True) == unbroken
        assert "starts.json cannot be read" in caplog.text

    @pytest.mark.parametrize("content", STARTS, ids=lambda content: content[:40])
    def test_with_a_record_of_starts_of_another_form(self, content, unbroken):
        break_off()
        Path("out/checkpoint-model/starts.json").write_text(content)
        assert fit(resume=True) == unbroken

    @pytest.mark.parametrize(
        ("damage", "log_with"), [(flip, "tensorboard"), (put_a_page_of_zeros, None), (make_a_folder, None)]
    )
    def test_with_a_damaged_history(self, damage, log_with, unbroken, caplog):
        break_off(log_with=log_with)
        damage(Path(RUN, "history.jsonl"))
        with caplog.at_level(logging.WARNING, logger="accmt"):
            assert fit(resume=True, log_with=log_with) == unbroken
        assert [row["step"] for row in read_history(Path(RUN)) if "train_loss" in row.get("values", ())][-1] == 4
        assert ("set-aside" if damage is make_a_folder else "skipping 1 invalid line") in caplog.text

    def test_with_folders_where_its_files_belong(self, unbroken, caplog):
        settings = {"model_saving": "best_valid_loss", "evaluate_every_n_steps": 1, "log_with": "tensorboard"}
        break_off(**settings)
        names = ["status.json", "README.md", "hps.yaml", "trainer_config.json"]
        places = [*(Path("out/model", name) for name in names), Path(RUN, "delivery.json")]
        for place in places:
            make_a_folder(place)
        with caplog.at_level(logging.WARNING, logger="accmt"):
            assert fit(resume=True, **settings) == unbroken
        for place in places:
            assert place.is_file()
            assert place.with_name(f"{place.name}.set-aside").joinpath("mine").exists()
            assert f"{place.name} is a folder" in caplog.text


BAD_ROWS = [
    "garbage",
    '"a string"',
    "null",
    "[1, 2]",
    '{"step": 1, "values": {"loss": 1.0}}',
    '{"time": "now", "step": 1, "values": {"loss": 1.0}}',
    '{"time": 1.0, "step": "one", "values": {"loss": 1.0}}',
    '{"time": 1.0, "step": 1, "values": [1.0]}',
    '{"time": 1.0, "step": %s, "values": {"loss": 1.0}}' % ("1" * 5000),
    '{"time": 1.0, "rewind": 3}',
    '{"time": 1.0, "config": [1]}',
    '{"time": 1.0, "status": {"FINISHED": true}}',
    '{"time": 1.0, "of a later version": {}}',
    "[" * 100_000,
]


def test_each_line_that_is_no_row_is_skipped_and_counted(caplog):
    fit()
    path = Path(RUN, "history.jsonl")
    rows, record = read_history(Path(RUN)), read_run(Path(RUN))
    lines = path.read_text().splitlines()
    mixed = [line for pair in zip(lines, BAD_ROWS, strict=False) for line in pair] + BAD_ROWS + lines[len(BAD_ROWS) :]
    path.write_bytes("\n".join(mixed).encode() + b"\n\xff\xfe\n" + bytes(4096) + b"\n")
    assert read_history(Path(RUN)) == rows
    assert read_run(Path(RUN)) == record
    num_bad = len(mixed) - len(lines) + 2
    assert f"skipping {num_bad} invalid lines (the first is line 2)" in caplog.text


def test_rows_keep_the_numbers_of_their_lines_where_one_cannot_be_read():
    Path("run").mkdir()
    row = '{"time": 1.0, "step": %d, "values": {"loss": 1.0}}'
    rewind = json.dumps({"time": 1.0, "rewind": {"line": 2, "step": 1, "attempt": 2}})
    Path("run/history.jsonl").write_text("\n".join([row % 1, "garbage", row % 2, row % 3, rewind, row % 2, ""]))
    assert [row["step"] for row in read_history(Path("run")) if "step" in row] == [1, 2]


class WithTensor(IterableDataset):
    """A stream that keeps its position in a tensor, nested in what `state_dict` returns."""

    def __init__(self):
        self.next = torch.zeros(1, dtype=torch.long)
        self.seen = []

    def __iter__(self):
        while self.next < 8:
            self.next += 1
            self.seen.append(int(self.next))
            yield torch.full((3,), float(self.next)), torch.ones(1)
        self.next.zero_()

    def state_dict(self):
        return {"at": [{"next": self.next}, (torch.arange(3.0), "text")]}

    def load_state_dict(self, state):
        assert state["at"][1][0].tolist() == [0.0, 1.0, 2.0]
        self.next = state["at"][0]["next"]


def test_a_stream_gets_the_tensors_of_its_state_back():
    settings = {"checkpoint_every": "1 step", "checkpoint_options": {"async_checkpointing": False}}
    with pytest.raises(ValueError, match="stop"):
        make_trainer(callbacks=Stop(), **settings).fit(Linear(), WithTensor())
    data = WithTensor()
    make_trainer(resume=True, **settings).fit(Linear(), data)
    assert data.seen == [5, 6, 7, 8]
