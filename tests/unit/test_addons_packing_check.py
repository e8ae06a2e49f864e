"""Packed documents do not see one another, or are refused; no cache is made where nothing reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)

from accmt import AcceleratorModule, ExtendedAcceleratorModule
from accmt.addons import packing_check
from accmt.addons.made_modules import HuggingFaceModule
from accmt.addons.packing_check import PackingCheck
from accmt.errors import DataError
from tests.raising import raises_at
from tests.toys import make_trainer

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
    "pad_token_id": 0,
}
DOCUMENTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [20, 21, 22], [30]]
ROWS = [{"input_ids": ids, "labels": ids} for ids in DOCUMENTS[:3]]
PACKED = {
    "input_ids": torch.tensor([sum(DOCUMENTS, [])]),
    "position_ids": torch.tensor([[i for ids in DOCUMENTS for i in range(len(ids))]]),
}
HPS = {"batch_size": 3, "optim": {"type": "SGD", "lr": 1.0}}
MIXED = ("mixed documents", "attn_implementation='sdpa'", "before layer ")


def make_model(model_type: str = "llama", **changed: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **changed})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # else attention hardly matters
    return model


def make_encoder() -> Any:
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SMALL))


def pad(rows: Any) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    return {**padded, "attention_mask": (torch.arange(longest)[None] < lengths).long()}


class Trials:
    """Counts the trials of models, and makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, skips: bool = False) -> None:
        self.number = 0
        real = packing_check.try_packing

        def count(*args: Any, **kwargs: Any) -> Any:
            self.number += 1
            return packing_check.Verdict() if skips else real(*args, **kwargs)

        monkeypatch.setattr(packing_check, "try_packing", count)


def test_the_gradient_of_packed_documents_is_that_of_padded_ones() -> None:
    weights = []
    for collate in (pad, DataCollatorWithFlattening()):
        model = make_model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        state = make_trainer(HPS, collate_fn=collate, shuffle_train=False).fit(HuggingFaceModule(model), ROWS, ROWS)
        moved = [(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]
        weights.append((torch.cat(moved).detach(), state.metrics["val_loss"]))
        assert state.samples_seen == 3
        assert model.config.use_cache  # as it was
        assert not any(part._forward_pre_hooks or part._forward_hooks for part in model.modules())
    (padded, padded_loss), (packed, packed_loss) = weights
    assert (padded - packed).norm() / padded.norm() < 1e-6
    assert packed_loss == pytest.approx(padded_loss, rel=1e-6)


def test_a_cache_is_made_only_where_it_is_asked_for() -> None:
    model = nn.ModuleDict({"inner": make_model()})
    ids = PACKED["input_ids"]
    with torch.no_grad(), PackingCheck(model).during():
        assert model["inner"](input_ids=ids).past_key_values is None
        cache = model["inner"](input_ids=ids, use_cache=True).past_key_values
        assert cache is not None
        assert model["inner"](input_ids=ids[:, :1], past_key_values=cache).past_key_values is not None
        assert model["inner"].generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2
        with raises_at(DataError, "packed documents in LlamaForCausalLM", "use_cache=True"):
            model["inner"](**PACKED, use_cache=True)
    assert model["inner"](input_ids=ids).past_key_values is not None


def test_a_model_that_mixes_documents_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, trials = make_encoder(), Trials(monkeypatch)
    with PackingCheck(model).during():
        model(input_ids=PACKED["input_ids"], position_ids=torch.arange(14)[None])
        seen = torch.ones(1, 1, 14, 14, dtype=torch.bool)
        model(**PACKED, attention_mask=seen)  # who sees whom is said
        assert trials.number == 0
        for _ in range(2):
            with raises_at(DataError, "in BertForMaskedLM", *MIXED):
                model(**PACKED)
            with raises_at(DataError, "in BertForMaskedLM", *MIXED):
                model(PACKED["input_ids"], None, None, PACKED["position_ids"])  # by place
            with raises_at(DataError, "in BertModel", *MIXED):
                model.bert(**PACKED)  # a step that goes around the head
        assert trials.number == 2
    model(**PACKED)  # nobody trains it


def test_bounds_of_documents_that_the_attention_does_not_read_are_rejected() -> None:
    bounds = torch.tensor([0, 6, 10, 14], dtype=torch.int32)
    varlen = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 6, "max_length_k": 6}
    model = make_model()
    with PackingCheck(model).during():
        model(**PACKED, **varlen)
        model(input_ids=PACKED["input_ids"], **{**varlen, "cu_seq_lens_q": bounds[[0, -1]]})  # one document
        with raises_at(DataError, "packed documents in LlamaForCausalLM", *MIXED):
            model(input_ids=PACKED["input_ids"], **varlen)


def test_a_mask_beside_packed_documents_is_rejected_and_padding_is_not() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with PackingCheck(model).during():
        with raises_at(DataError, "packed documents in LlamaForCausalLM", do="remove attention_mask"):
            model(**PACKED, attention_mask=torch.ones(1, 14, dtype=torch.long))
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
        left = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 1]])
        model(input_ids=torch.ones(2, 5, dtype=torch.long), position_ids=left, attention_mask=mask)


class Steps(AcceleratorModule):
    """Calls a model with what it is told of each batch; its last batch is the first packed one."""

    def __init__(self, model: Any, *, names: tuple[str, ...] = ("input_ids", "position_ids")) -> None:
        self.model = model
        self.names = names
        self.wrapped = False

    def training_step(self, batch: Any) -> Any:
        batch = batch[0] if isinstance(batch, tuple) else batch
        outputs = self.model(**{name: batch[name] for name in self.names})
        return outputs[0].float().square().mean()


class ManualSteps(ExtendedAcceleratorModule):
    def __init__(self, model: Any, *, names: tuple[str, ...] = ("input_ids", "position_ids")) -> None:
        self.model = model
        self.names = names

    training_step = Steps.training_step


def plain_then_packed(rows: Any) -> dict[str, torch.Tensor]:
    """Collate rows of six tokens, packed where they begin with token 9."""
    ids = torch.tensor(rows)
    plain = torch.arange(6).expand(len(rows), 6)
    return {"input_ids": ids, "position_ids": torch.where(ids[:, :1] == 9, plain % 3, plain)}


LATER = [[1, 2, 3, 4, 5, 6]] * 4 + [[9, 8, 7, 6, 5, 4]] * 2


def fit(module: Any, **settings: Any) -> Any:
    hps = {"batch_size": 2, "optim": {"type": "SGD", "lr": 0.1}}
    trainer = make_trainer(hps, collate_fn=plain_then_packed, shuffle_train=False, seed=3, **settings)
    return trainer, lambda: trainer.fit(module, LATER)


@pytest.mark.parametrize("kind", [Steps, ManualSteps])
def test_batches_that_are_packed_later_in_a_run_are_looked_at_then(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)
    module = kind(make_encoder())
    trainer, train = fit(module)
    with raises_at(DataError, "in BertForMaskedLM", *MIXED):
        train()
    assert trainer.state.train_step == 2
    assert trials.number == 1
    assert not any(part._forward_pre_hooks or part._forward_hooks for part in module.model.modules())


@pytest.mark.slow
def test_a_compiled_model_is_tried_too_and_without_a_break_in_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch)
    compiled = {"backend": "eager", "fullgraph": True}
    for wraps in (False, True):
        settings = {} if wraps else {"compile": compiled}
        make = (lambda model: torch.compile(model, **compiled)) if wraps else (lambda model: model)
        with raises_at(DataError, "in BertForMaskedLM", *MIXED):
            fit(Steps(make(make_encoder())), **settings)[1]()
        fit(Steps(make(make_model())), **settings)[1]()
        torch.compiler.reset()
    assert trials.number == 4
    torch.compiler.reset()


@pytest.mark.parametrize("kind", [Steps, ManualSteps])
@pytest.mark.parametrize(
    ("model", "name", "do"),
    [
        (make_model, "LlamaForCausalLM", "self.model"),
        (
            lambda: T5EncoderModel(T5Config(**SMALL, d_model=16, num_layers=1, num_heads=2)),
            "T5EncoderModel",
            "max_tokens",
        ),
    ],
)
def test_a_step_that_does_not_pass_the_positions_on_is_rejected(kind: Any, model: Any, name: str, do: str) -> None:
    trainer, train = fit(kind(model(), names=("input_ids",)))
    with raises_at(DataError, "packed documents", "position_ids", name, do=do):
        train()
    assert trainer.state.global_step == (0 if kind is ManualSteps else 2)


class Own(nn.Module):
    """A model that is not of transformers."""

    def __init__(self, *, needs_more: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 1)
        self.needs_more = needs_more

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
        embedded = self.embed(input_ids) * position_ids[..., None]
        if self.needs_more and not self.training:
            raise KeyError("more")
        return (self.head(embedded.cumsum(1)),)


def test_a_model_of_ones_own_is_tried_and_one_that_cannot_be_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with raises_at(DataError, "packed documents in Own", "mixed documents"):
        fit(Steps(Own()))[1]()
    fit(Steps(Own(needs_more=True)))[1]()
    assert "packed documents in Own: the trial of two packed documents failed: KeyError" in caplog.text


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_lies_on_the_device_is_not_waited_for(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = Trials(monkeypatch, skips=True)
    model = Own().to("meta")  # where looking into a tensor is an error
    rows = {"input_ids": torch.ones(2, 6, dtype=torch.long), "position_ids": torch.arange(6).expand(2, 6)}
    if is_packed:
        rows["position_ids"] = rows["position_ids"] % 3
    on_device = {name: tensor.to("meta") for name, tensor in rows.items()}
    guard = PackingCheck(model)
    with guard.during():
        for _ in range(2):
            guard.before_forward(rows)
            model(**on_device)
            guard.after_forward(None)
        assert trials.number == is_packed
        with pytest.raises(RuntimeError, match="meta"):
            model(**on_device)  # positions that no batch has shown


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_trial_changes_no_bit_of_a_run(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = []
    for skips in (False, True):
        with monkeypatch.context() as patch:
            trials = Trials(patch, skips=skips)
            torch.manual_seed(0)
            model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.3))
            fit(Steps(model), mixed_precision=precision)[1]()
            assert trials.number == 1
            weights.append([weight.detach().clone() for weight in model.parameters()])
    assert all(map(torch.equal, *weights))


def test_validation_on_packed_documents_that_a_model_mixes_is_rejected() -> None:
    module, trainer = HuggingFaceModule(make_encoder()), make_trainer(HPS, collate_fn=DataCollatorWithFlattening())
    with raises_at(DataError, "in BertForMaskedLM", *MIXED):
        trainer.validate(module, ROWS)
