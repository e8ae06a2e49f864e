"""Runs that pack documents: the same steps, samples and gradients as padded ones, by target tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accmt import AcceleratorModule, Callback, Trainer, read_history
from accmt.addons.made_modules import HuggingFaceModule
from accmt.errors import ArgumentError, DataError
from tests.raising import raises_at
from tests.toys import Stream
from tests.unit.test_huggingface_isolation import ISOLATED, build

NUMBER, BATCH, TOKENS = 30, 8, 32
LENGTHS = [1 + (37 * index) % 23 for index in range(NUMBER)]


class Texts(Dataset[Any]):
    """Token ids of unequal lengths; every second one has a prompt without labels. Counts how often each is read."""

    def __init__(self) -> None:
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads.append(index)
        ids = [1 + (index * 7 + 5 * place) % 61 for place in range(LENGTHS[index])]
        hidden = index % 2 * (len(ids) // 2)
        return {"input_ids": ids, "labels": [-100] * hidden + ids[hidden:]}

    def __len__(self) -> int:
        return NUMBER


class Recorder(Callback):
    """Writes down the gradient of each step, and the rows that made it."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []
        self.rows: list[list[list[int]]] = [[]]
        self.shapes: list[tuple[int, ...]] = []
        self.counts: list[tuple[int, int, int]] = []

    def on_before_training_step(self, batch: Any) -> None:
        self.rows[-1].append(batch["input_ids"][0].tolist())
        self.shapes.append(tuple(batch["input_ids"].shape))
        assert batch.keys() == {"input_ids", "labels", "position_ids"}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.gradients.append(torch.cat([weight.grad.flatten() for weight in parameters]).clone())

    def on_update_end(self) -> None:
        self.rows.append([])
        self.counts.append((self.state.global_step, self.state.train_step, self.state.samples_seen))


def run(folder: Path, module: Any, data: Any = None, hps: Any = None, **settings: Any) -> Recorder:
    recorder = Recorder()
    hps = {"epochs": 1, "batch_size": BATCH, "optim": {"type": "SGD", "lr": 0.01}, "max_tokens": TOKENS} | (hps or {})
    own = {"model_saving": None, "logging_dir": folder, "verbose": False, "seed": 3, "callbacks": [recorder]}
    trainer = Trainer({"packing": True} | hps, folder / "model", **(own | settings))
    recorder.state_after = trainer.fit(module, Texts() if data is None else data)
    recorder.log_dir = trainer.log_dir
    return recorder


def reference_gradient(model: Any, indices: list[int]) -> torch.Tensor:
    """Return the gradient of the mean loss over target tokens, sample by sample, in plain torch."""
    texts, targets = Texts(), 0
    model.zero_grad()
    for index in indices:
        sample = {name: torch.tensor(values)[None] for name, values in texts[index].items()}
        logits = model(input_ids=sample["input_ids"], use_cache=False).logits[0, :-1]
        labels = sample["labels"][0, 1:]
        nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).backward()
        targets += int((labels != -100).sum())
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]) / targets


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model_type", ISOLATED)
def test_the_gradient_of_packed_documents_is_that_of_each_by_itself(
    tmp_path: Path, model_type: str, accumulation: int
) -> None:
    # Weights as drawn would hardly show attention, and those times 8 magnify rounding with each layer.
    model = build(model_type, scale=4, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0).double()
    if model_type == "mixtral":
        model.set_experts_implementation("eager")  # the others know no float64
    first = {name: weight.clone() for name, weight in model.state_dict().items()}
    rate_of_nothing = {"optim": {"type": "SGD", "lr": 1e-30}}
    recorder = run(
        tmp_path,
        HuggingFaceModule(model),
        hps=rate_of_nothing,
        shuffle_train=False,
        grad_accumulation_steps=accumulation,
    )
    model.load_state_dict(first)
    size = BATCH * accumulation
    assert len(recorder.gradients) == -(-NUMBER // size)
    for step, gradient in enumerate(recorder.gradients):
        indices = list(range(step * size, min((step + 1) * size, NUMBER)))
        expected = reference_gradient(model, indices)
        assert (gradient - expected).norm() <= 1e-6 * expected.norm()
        assert sorted(sum(recorder.rows[step], [])) == sorted(sum((Texts()[i]["input_ids"] for i in indices), []))
    assert all(shape[0] == 1 and shape[1] <= TOKENS for shape in recorder.shapes)
    assert len(recorder.shapes) < NUMBER / 2


class Own(AcceleratorModule):
    """A model of one's own that sees tokens by themselves; its step returns the mean over its targets."""

    def __init__(self, *, drops: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(64, 8), nn.Dropout(drops), nn.Linear(8, 64))

    def training_step(self, batch: Any) -> Any:
        logits = self.model(batch["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def get_batch_size(self, batch: Any) -> int:
        raise AssertionError("the shape of a packed row says nothing of its samples")


@pytest.mark.parametrize(
    "data", [Texts, lambda: Stream(Texts()), lambda: list(Texts()), lambda: DataLoader(Texts(), batch_size=BATCH)]
)
def test_steps_that_return_no_weight_weigh_their_target_tokens(tmp_path: Path, data: Any) -> None:
    module = Own()
    first = {name: weight.clone() for name, weight in module.model.state_dict().items()}
    recorder = run(tmp_path, module, data=data(), shuffle_train=False, hps={"optim": {"type": "SGD", "lr": 1e-30}})
    module.model.load_state_dict(first)
    module.model.zero_grad()
    targets = 0
    for sample in (Texts()[index] for index in range(BATCH)):
        logits = module.model(torch.tensor(sample["input_ids"][:-1], dtype=torch.long))
        labels = torch.tensor(sample["labels"][1:], dtype=torch.long)
        nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100).backward()
        targets += int((labels != -100).sum())
    expected = torch.cat([weight.grad.flatten() for weight in module.model.parameters()]) / targets
    torch.testing.assert_close(recorder.gradients[0], expected, rtol=1e-5, atol=1e-7)
    ends = [min(NUMBER, BATCH * (step + 1)) for step in range(4)]
    assert recorder.counts == [(step + 1, step + 1, end) for step, end in enumerate(ends)]


def test_a_model_of_ones_own_that_takes_no_positions_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, Own())
    assert caplog.text.count("packed documents: Sequential has no argument position_ids") == 1


def test_a_run_that_is_interrupted_within_an_epoch_resumes_with_the_same_bits(tmp_path: Path) -> None:
    weights = []
    for name, ends in (("unbroken", [8]), ("broken", [2, 5, 8])):
        for end in ends:
            module = Own(drops=0.3)
            hps = {"epochs": 2, "max_steps": end, "optim": {"type": "AdamW", "lr": 1e-2}}
            run(tmp_path / name, module, hps=hps, checkpoint_every="1 steps", resume="auto")
        weights.append([weight.detach().clone() for weight in module.model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.usefixtures("without_fingerprints")
def test_no_token_is_padding_and_each_sample_is_read_once(tmp_path: Path) -> None:
    from accmt import Monitor

    texts = Texts()
    recorder = run(tmp_path, Own(), data=texts, monitor=Monitor(throughput=True), log_every=1)
    assert sorted(texts.reads) == list(range(NUMBER))
    shares = [row["values"]["padding"] for row in read_history(recorder.log_dir) if "padding" in row.get("values", {})]
    assert shares
    assert set(shares) == {0.0}


def test_a_row_without_a_target_changes_nothing(tmp_path: Path) -> None:
    data = [{"input_ids": [index + 1], "labels": [index + 1]} for index in range(8)]
    data += [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    module = Own()
    recorder = run(tmp_path, module, data=data, shuffle_train=False)
    assert len(recorder.gradients) == 1  # of the second step: nothing was to be learned from the first
    assert recorder.gradients[0].isfinite().all()
    assert recorder.state_after.skipped_steps == 1
    model = build("llama")
    recorder = run(tmp_path / "weighted", HuggingFaceModule(model), data=data, shuffle_train=False)
    assert len(recorder.gradients) == 1
    assert all(weight.isfinite().all() for weight in model.parameters())


def test_kernels_that_take_them_get_the_bounds_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    seen: list[set[str]] = []
    module = HuggingFaceModule(model)

    def step(batch: Any) -> Any:
        seen.append(set(batch))
        assert batch["cu_seq_lens_q"].dtype == torch.int32
        assert int(batch["cu_seq_lens_q"][-1]) == batch["input_ids"].shape[1]
        return model.lm_head(model.model.embed_tokens(batch["input_ids"])).square().mean()

    module.step = step
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    monkeypatch.setattr(Recorder, "on_before_training_step", lambda *_, **__: None)
    with raises_at(DataError, "packed documents", "LlamaForCausalLM"):
        run(tmp_path, module)
    assert seen[0] == {
        *("input_ids", "labels", "position_ids"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }


def test_a_model_that_mixes_documents_is_rejected_before_the_first_step(tmp_path: Path) -> None:
    with raises_at(DataError, "packed documents in BertForMaskedLM"):
        run(tmp_path, HuggingFaceModule(build("bert")))


def test_labels_that_cross_documents_are_an_error_in_data_that_come_packed(tmp_path: Path) -> None:
    ids, positions = [3, 4, 5, 6, 7, 8], [0, 1, 2, 0, 1, 2]
    data = [{"input_ids": ids, "labels": ids, "position_ids": positions}] * 4
    with raises_at(DataError, "packed documents in LlamaForCausalLM", "labels", do="labels[position_ids == 0] = -100"):
        run(tmp_path, HuggingFaceModule(build("llama")), data=data)
    data = [{**sample, "labels": [-100, 4, 5, -100, 7, 8]} for sample in data]
    run(tmp_path / "apart", HuggingFaceModule(build("llama")), data=data)


@pytest.mark.parametrize("settings", [{"collate_fn": {"train": list}}, {"hps": {"max_micro_batch_size": "auto"}}])
def test_what_else_would_make_batches_is_an_error(tmp_path: Path, settings: Any) -> None:
    other = "max_micro_batch_size: auto" if "hps" in settings else "a collate function"
    with raises_at(ArgumentError, " in the hyper-parameters", other):
        run(tmp_path, Own(), **settings)


def test_a_data_loader_that_makes_batches_in_its_own_way_is_an_error(tmp_path: Path) -> None:
    class Ready(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter([])

    with raises_at(ArgumentError, "packing in the hyper-parameters"):
        run(tmp_path, Own(), data=Ready(Texts(), batch_size=2))
