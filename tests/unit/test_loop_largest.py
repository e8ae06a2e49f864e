"""Before training the largest micro-batch goes through forward and backward, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accmt import AcceleratorModule, Callback, ExtendedAcceleratorModule, LambdaCallback, Trainer, read_history
from tests.toys import Linear, Stream, Texts, make_points
from tests.toys import pad_texts as pad

NUMBER, BATCH, TOKENS = 24, 8, 69
LENGTHS = [1 + (37 * index) % 23 for index in range(NUMBER)]
LONGEST = LENGTHS.index(max(LENGTHS))
TRIED = "with forward and backward before training"


@pytest.fixture(autouse=True)
def _all_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "accmt")


def make_texts(*, knows_lengths: bool = True) -> Texts:
    """Make texts of unequal lengths, which they may know."""
    texts = Texts(LENGTHS)
    if knows_lengths:
        texts.lengths = LENGTHS  # type: ignore[attr-defined]
    return texts


class Classifier(AcceleratorModule):
    """Has whatever a step may leave something in: dropout, batch norm, draws, logged values."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.ModuleDict(
            {
                "embed": nn.Embedding(40, 6, padding_idx=0),
                "norm": nn.BatchNorm1d(6),
                "drop": nn.Dropout(0.3),
                "head": nn.Linear(6, 3),
            }
        )
        self.model["embed"].weight.grad = torch.ones_like(self.model["embed"].weight)
        self.model["drop"].eval()
        self.shapes: list[tuple[int, ...]] = []
        self.states: list[Any] = []

    def training_step(self, batch: Any) -> Any:
        self.shapes.append(tuple(batch["input_ids"].shape))
        self.states.append((self.state.global_step, self.state.samples_seen, self.model.training))
        means = self.model["embed"](batch["input_ids"]).mean(1)
        normed = self.model["norm"](torch.cat([means, 2 * means]))[: len(means)]  # which needs more than one
        logits = self.model["head"](self.model["drop"](normed))
        self.log("drawn", torch.rand(()))
        self.log("instantly", 1.0, instant=True)
        self.log_table("rows", ["a"], [[1]])
        return nn.functional.cross_entropy(logits, batch["label"])


class Hooks(Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.before: Any = None

    def on_fit_start(self) -> None:
        self.calls.append("start")

    def on_epoch_start(self) -> None:
        model = self.module.model
        self.before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert all(weight.grad is None for weight in model.parameters())
        self.module.log("between", 1.0)

    def on_before_training_step(self) -> None:
        self.calls.append("step")

    def on_log(self, values: Any, step: int) -> None:
        self.calls.append(f"log {sorted(values)}")


def run(folder: Path, module: Any = None, data: Any = None, hps: Any = None, **settings: Any) -> Any:
    hps = {"epochs": 1, "batch_size": BATCH, "optim": {"type": "AdamW", "lr": 0.1}, "max_tokens": TOKENS} | (hps or {})
    hooks = Hooks()
    own = {"collate_fn": pad, "model_saving": None, "logging_dir": folder, "seed": 3, "log_every": 1}
    own |= {"callbacks": [hooks], "failures": {"try_longest": True}}
    trainer = Trainer(hps, folder / "model", **(own | settings))
    module = Classifier() if module is None else module
    trainer.fit(module, make_texts() if data is None else data)
    return trainer, module, hooks


def test_the_trial_leaves_no_trace_in_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    for tries in (True, False):
        torch.manual_seed(7)
        first = Classifier()
        expected = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
        trainer, module, hooks = run(tmp_path / str(tries), first, failures={"try_longest": tries})
        for name, tensor in expected.items():
            torch.testing.assert_close(hooks.before[name], tensor, rtol=0, atol=0)
        rows = [{**row, "time": 0} for row in read_history(trainer.log_dir)]
        values = [row.get("values") for row in rows if "values" in row]
        runs.append((module, hooks.calls, trainer.state.state_dict(), values, torch.rand(())))
        assert not module.model["drop"].training
    (tried, *of_tried), (untried, *of_untried) = runs
    assert tried.shapes[1:] == untried.shapes
    assert tried.states[0] == (0, 0, True)
    assert of_tried == of_untried
    for one, other in zip(tried.model.state_dict().values(), untried.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert TRIED in caplog.text


def longest_of(number: int) -> tuple[int, int]:
    return number, max(LENGTHS)


@pytest.mark.parametrize(
    ("data", "hps", "shape"),
    [
        (make_texts, {}, longest_of(TOKENS // max(LENGTHS))),
        (lambda: list(make_texts()), {}, longest_of(TOKENS // max(LENGTHS))),
        (lambda: DataLoader(make_texts(), BATCH, collate_fn=pad), {}, longest_of(TOKENS // max(LENGTHS))),
        (make_texts, {"max_tokens": 5}, longest_of(1)),
        (make_texts, {"max_tokens": 10**6, "max_micro_batch_size": 3}, longest_of(3)),
        (make_texts, {"max_tokens": 10**6}, longest_of(BATCH)),
        (make_texts, {"max_tokens": None}, longest_of(BATCH)),
        (make_texts, {"max_tokens": None, "max_micro_batch_size": 4}, longest_of(4)),
        (lambda: DataLoader(make_texts(), 5, collate_fn=pad), {"max_tokens": None}, longest_of(5)),
        (lambda: make_texts(knows_lengths=False), {}, (TOKENS // max(LENGTHS[:8]), max(LENGTHS[:8]))),
    ],
)
def test_the_largest_micro_batch_is_tried_first(tmp_path: Path, data: Any, hps: Any, shape: Any) -> None:
    _, module, _ = run(tmp_path, data=data(), hps=hps)
    assert module.shapes[0] == shape
    assert max(rows * width for rows, width in module.shapes[1:]) <= 1.15 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("data", "settings", "hps", "why"),
    [
        (lambda: Stream(make_texts()), {}, {}, "the data are a stream"),
        (lambda: make_texts(knows_lengths=False), {}, {"max_tokens": None}, "the lengths of samples are unknown"),
        (
            make_texts,
            {},
            {"max_tokens": None, "max_micro_batch_size": "auto"},
            "max_micro_batch_size: auto finds the size that fits",
        ),
        (
            lambda: DataLoader(make_texts(), batch_sampler=[[0, 1], [2]], collate_fn=pad),
            {},
            {"max_tokens": None},
            "batches vary in size",
        ),
        (lambda: [[torch.ones(3), torch.ones(1)]] * 8, {"collate_fn": None}, {"max_tokens": None}, "unknown"),
    ],
)
def test_what_cannot_be_tried_is_said(
    tmp_path: Path, data: Any, settings: Any, hps: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Linear() if "collate_fn" in settings else None
    _, module, _ = run(tmp_path, module, data=data(), hps=hps, **settings)
    said = caplog.text
    assert "the largest micro-batch is not tried before training" in said
    assert why in said
    assert TRIED not in said


def test_a_module_that_steps_by_itself_is_not_tried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Manual(ExtendedAcceleratorModule):
        def __init__(self) -> None:
            self.model, self.steps = nn.Linear(3, 1), 0

        def training_step(self, batch: Any) -> Any:
            self.steps += 1
            self.backward(self.model(batch[0]).mean())
            self.step()
            self.zero_grad()

    _, module, _ = run(tmp_path, Manual(), make_points(), {"max_tokens": None}, collate_fn=None)
    assert module.steps == 1
    assert "the module uses manual optimization" in caplog.text


@pytest.mark.usefixtures("without_fingerprints")
@pytest.mark.parametrize("asked", [None, False])
def test_it_is_off_on_a_cpu_and_where_it_is_not_wanted(
    tmp_path: Path, asked: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    texts = make_texts()
    run(tmp_path, data=texts, failures={"try_longest": asked})
    assert sorted(texts.reads.elements()) == list(range(NUMBER))
    assert "largest micro-batch" not in caplog.text


def test_a_step_that_needs_a_hook_of_the_first_epoch_only_leaves_the_trial_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Classifier):
        def on_epoch_start(self) -> None:
            self.scale = 2.0

        def training_step(self, batch: Any) -> Any:
            return self.scale * super().training_step(batch)

    _, module, _ = run(tmp_path, Late())
    assert "before training failed: AttributeError" in caplog.text
    assert TRIED not in caplog.text
    assert module.shapes


def test_memory_that_runs_out_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    class Large(Classifier):
        def training_step(self, batch: Any) -> Any:
            if batch["input_ids"].shape[1] == max(LENGTHS):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch)

    module, hooks = Large(), []
    record = LambdaCallback(
        on_fit_start=lambda: hooks.append("start"), on_cuda_out_of_memory=lambda: hooks.append("memory")
    )
    with pytest.raises(torch.OutOfMemoryError) as caught:
        run(tmp_path, module, callbacks=[record])
    [note] = [note for note in caught.value.__notes__ if "largest micro-batch" in note]
    assert f"{TOKENS // max(LENGTHS)} samples of up to {max(LENGTHS)} tokens: lower max_tokens" in note
    assert module.shapes == []
    assert hooks == ["start", "memory"]


def test_a_packed_row_and_a_run_that_resumes_are_tried(tmp_path: Path) -> None:
    class Own(AcceleratorModule):
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Sequential(nn.Embedding(40, 4), nn.Dropout(0.2), nn.Linear(4, 40))
            self.tokens: list[int] = []

        def training_step(self, batch: Any) -> Any:
            self.tokens.append(batch["input_ids"].numel())
            logits = self.model(batch["input_ids"])[0, :-1]
            return nn.functional.cross_entropy(logits, batch["labels"][0, 1:], ignore_index=-100)

    weights = []
    for name, ends, tries in (("unbroken", [6], False), ("broken", [2, 6], True)):
        for end in ends:
            hps = {"epochs": 2, "max_steps": end, "packing": True}
            data = [{"input_ids": sample["input_ids"]} for sample in make_texts()]
            settings = {"checkpoint_every": "1 steps", "resume": "auto", "failures": {"try_longest": tries}}
            _, module, _ = run(tmp_path / name, Own(), data, hps, **settings)
        assert not tries or TOKENS - 8 <= module.tokens[0] <= TOKENS
        weights.append([weight.detach().clone() for weight in module.model.parameters()])
    assert all(map(torch.equal, *weights))


@pytest.mark.slow
def test_a_compiled_model_has_no_further_graph(tmp_path: Path) -> None:
    graphs: list[int] = []

    def count(graph: Any, _inputs: Any) -> Any:
        graphs.append(1)
        return graph.forward

    class Compiled(Linear):
        pass

    points = TensorDataset(*make_points().tensors)
    points.lengths = [1] * len(points)
    for tries in (False, True):
        graphs.clear()
        torch.compiler.reset()
        hps = {"max_tokens": None, "batch_size": 4}
        run(
            tmp_path / str(tries),
            Compiled(),
            points,
            hps,
            collate_fn=None,
            compile={"backend": count},
            failures={"try_longest": tries},
        )
        assert len(graphs) == 1
    torch.compiler.reset()
