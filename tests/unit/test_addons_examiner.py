"""What a replay measures: each sample of a step alone, ranked, and the step without some of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import BatchEncoding

from accmt import AcceleratorModule, ExtendedAcceleratorModule
from accmt.addons.flight_recorder.examiner import EXAMINED_FILE, Examination, StepReport, rows
from tests.toys import Linear, Stream, logged, make_points, make_trainer


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def examine(
    module: AcceleratorModule, data: Any, hps: dict[str, Any] | None = None, first: int = 2, **settings: Any
) -> list[Any]:
    asked = {name: settings.pop(name) for name in ("without", "places", "export") if name in settings}
    ledger = Examination(every=1, folder=str(Path.cwd()), first=first, last=first + 1, **asked)
    make_trainer({"epochs": 1, **(hps or {})}, ledger=ledger, **settings).fit(module, data)
    file = Path(EXAMINED_FILE)
    return [StepReport.read(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("kind", ["dataset", "stream", "workers"])
def test_the_gradients_of_samples_add_up_to_that_of_the_step(kind: str) -> None:
    data: Any = Stream(make_points(12)) if kind == "stream" else make_points(12)
    settings = {"dataloader_num_workers": 1} if kind == "workers" else {}
    module = Linear()
    [report, _] = examine(module, data, {"batch_size": 2, "max_steps": 3}, grad_accumulation_steps=2, **settings)
    assert report.step == 2
    assert report.why_not_split == ""
    assert len(report.samples) == len({sample.number for sample in report.samples}) == 4
    if kind == "stream":
        assert {sample.number for sample in report.samples} == {0, 1, 2, 3}
    [(layer, norm)] = report.layers
    assert norm == pytest.approx(report.gradient_norm)
    norms = [sample.gradient_norm for sample in report.samples]
    assert norms == sorted(norms, reverse=True)
    assert max(norms) <= report.gradient_norm * 4
    assert report.gradient_norm <= sum(norms)


def test_rows_of_a_batch_keep_its_structure() -> None:
    tensor = torch.arange(4).reshape(2, 2)
    encoding = rows(BatchEncoding({"input_ids": tensor}), 2, [1])
    assert encoding.input_ids.tolist() == [[2, 3]]  # as an attribute: it is still a BatchEncoding
    pair = rows(({"a": tensor}, {"b": tensor}), 2, [0])  # of two parts, not of two samples
    assert [pair[0]["a"].tolist(), pair[1]["b"].tolist()] == [[[0, 1]], [[0, 1]]]
    assert rows(["one", "two"], 2, [1]) == ["two"]
    assert rows(("one", "two"), 2, [1]) == ("two",)
    assert rows([torch.zeros(3), torch.ones(5)], 2, [1])[0].tolist() == [1.0] * 5  # samples of different lengths
    assert rows({"a": ["x", "y"], "n": 5}, 2, range(1)) == {"a": ["x"], "n": 5}


def test_a_measured_step_leaves_no_trace() -> None:
    class Noisy(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(
                nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Dropout(0.5), nn.Linear(4, 1)
            )

        def step(self, batch: Any) -> torch.Tensor:
            self.log("seen", 1.0, reduction="sum")
            return super().step(batch)

    made = []
    for first in (2, 99):
        module = Noisy()
        reports = examine(module, make_points(12), {"batch_size": 4}, first=first)
        made.append({name: value.clone() for name, value in module.model.state_dict().items()})
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert "batch norm" in reports[0].why_not_split or "more than 1 value" in reports[0].why_not_split


def test_what_a_step_counts_and_collects_in_the_module_is_restored() -> None:
    class Counting(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen, self.queue = 0, [0.0], torch.zeros(2)

        def step(self, batch: Any) -> torch.Tensor:
            self.calls += 1
            self.seen.append(float(batch[1].sum()))
            self.queue[0] += 1
            self.last = self.calls
            return super().step(batch) * (1 + 0.1 * self.calls + 0.1 * len(self.seen) + float(self.queue[0]))

    made = []
    for first in (1, 99):
        module = Counting()
        examine(module, make_points(12), {"batch_size": 4}, first=first)
        made.append((module.calls, module.seen, module.queue.tolist(), module.last, module.model.weight.tolist()))
    assert made[0] == made[1]
    assert made[0][0] == 3


def test_a_poisoned_sample_is_ranked_first_with_what_it_is() -> None:
    data = make_points(12)
    data.tensors[0][7] *= 100
    reports = [report for first in (1, 3) for report in examine(Linear(), data, {"batch_size": 4}, first=first)]
    [ranked] = {report.samples[0].number for report in reports if any(one.number == 7 for one in report.samples)}
    assert ranked == 7
    assert any(sample.text.startswith("[") for sample in reports[0].samples)


class Texts(Dataset[Any]):
    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [index + 1] * (index % 5 + 2)}

    def __len__(self) -> int:
        return 12


def pad(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return " ".join(f"word{one}" for one in ids)


class Words(AcceleratorModule):
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Embedding(20, 1)
        self.tokenizer = Tokenizer()

    def step(self, batch: Any) -> Any:
        mask = batch["attention_mask"]
        loss = ((self.model(batch["input_ids"])[..., 0] - 1).square() * mask).sum() / mask.sum()
        return {"loss": loss, "weight": mask.sum()}


@pytest.mark.parametrize("max_tokens", [None, 12])
def test_samples_of_a_text_have_tokens_and_decoded_text(max_tokens: int | None) -> None:
    [report, _] = examine(Words(), Texts(), {"batch_size": 4, "max_tokens": max_tokens}, collate_fn=pad)
    assert report.why_not_split == ""
    for sample in report.samples:
        assert sample.tokens == sample.number % 5 + 2
        assert f"word{sample.number + 1} word{sample.number + 1}" in sample.text
    assert sum(sample.gradient_norm**2 for sample in report.samples) == pytest.approx(report.gradient_norm**2, rel=1e-4)


class Contrastive(Linear):
    def step(self, batch: Any) -> torch.Tensor:
        made = self.model(batch[0])
        return nn.functional.cross_entropy(made @ made.T, torch.arange(len(made)))


class Manual(ExtendedAcceleratorModule):
    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Any) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
        self.backward(loss)
        self.step_optimizer()
        self.zero_grad()
        return loss


def test_a_loss_that_compares_samples_or_steps_by_hand_are_not_split_and_this_is_said() -> None:
    [report, _] = examine(Contrastive(), make_points(12), {"batch_size": 4})
    assert "compares samples" in report.why_not_split
    Path(EXAMINED_FILE).unlink()
    [report, _] = examine(Manual(), make_points(12), {"batch_size": 4})
    assert "calls backward and the optimizer itself" in report.why_not_split


@pytest.mark.parametrize(("accumulation", "number"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_step_without_samples_is_that_of_the_others(accumulation: int, number: int, tmp_path: Path) -> None:
    """Leaves out one sample of a batch, or both, and compares with a loader whose batches lack them."""
    data = make_points(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3)).tolist()
    removed, step = order[4 : 4 + number], 3 if accumulation == 1 else 2
    asked = Examination(
        every=1, folder=str(tmp_path), first=step, last=99, examines=False, without=removed, places=((0, 2, 3),)
    )
    settings = {"log_every": 1, "grad_accumulation_steps": accumulation}

    def losses_of(data: Any, **others: Any) -> list[float]:
        trainer = make_trainer({"epochs": 1, "batch_size": 2}, **settings, **others)
        trainer.fit(Linear(), data)
        return [value for _, value in logged(trainer, "train_loss")]

    plain = losses_of(data, sampler=order)
    changed = losses_of(data, sampler=order, ledger=asked)
    batches = [[index for index in order[at : at + 2] if index not in removed] for at in range(0, 12, 2)]
    if accumulation == 1:
        batches = [batch for batch in batches if batch]
    elif number == 2:  # the window has one batch less
        assert changed[:1] == plain[:1]
        assert changed[1:] != plain[1:]
        return
    expected = losses_of(DataLoader(data, batch_sampler=batches))
    assert changed[: step - 1] == plain[: step - 1]
    assert changed[step - 1 :] == pytest.approx(expected[step - 1 :])


def test_an_exported_step_has_batches_weights_and_gradients(tmp_path: Path) -> None:
    place = tmp_path / "step.pt"
    module = Linear()
    before = module.model.weight.detach().clone()
    examine(module, make_points(12), {"batch_size": 4}, first=1, export=str(place))
    exported = torch.load(place, weights_only=True)
    assert exported["step"] == 1
    assert torch.equal(exported["weights"]["weight"], before)
    [(inputs, targets)] = exported["batches"]
    again = Linear()
    nn.functional.mse_loss(again.model(inputs), targets).backward()
    torch.testing.assert_close(exported["gradients"]["weight"], again.model.weight.grad)


class Documents(Dataset[Any]):
    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [(index + place) % 9 + 1 for place in range(3 + index * 5 % 7)]
        return {"input_ids": ids, "labels": ids}

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("is_packed", [False, True])
def test_samples_of_a_language_model_count_by_their_labels_packed_or_padded(is_packed: bool) -> None:  # noqa: FBT001
    from transformers import LlamaConfig, LlamaForCausalLM

    class Language(AcceleratorModule):
        def __init__(self) -> None:
            torch.manual_seed(0)
            config = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
            self.model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **config))

        def step(self, batch: Any) -> Any:
            return self.model(**batch).loss

    def pad_labels(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        padded = pad(samples)
        return {**padded, "labels": padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)}

    hps = {"batch_size": 4, **({"max_tokens": 16, "packing": True} if is_packed else {})}
    [report, _] = examine(Language(), Documents(), hps, collate_fn=None if is_packed else pad_labels)
    assert report.why_not_split == ""
    assert len(report.samples) == 4
    for sample in report.samples:
        assert sample.tokens == 3 + sample.number * 5 % 7
