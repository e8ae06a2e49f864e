"""Packed documents do not see one another, or are refused; no cache is made where nothing reads it."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
)

from accmt.errors import DataError
from accmt.huggingface import computing_without_cache
from accmt.huggingface.packing import _ISOLATING
from accmt.module_kinds import HuggingFaceModule
from tests.toys import make_trainer

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "head_dim": 8,
    "num_local_experts": 2,
    "pad_token_id": 0,
}
DOCUMENTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [20, 21, 22], [30]]
ROWS = [{"input_ids": ids, "labels": ids} for ids in DOCUMENTS[:3]]
PACKED = {
    "input_ids": torch.tensor([sum(DOCUMENTS, [])]),
    "position_ids": torch.tensor([[i for ids in DOCUMENTS for i in range(len(ids))]]),
}


def make_model(model_type="llama", **told):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL, **told})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # else attention hardly matters
    return model


def pad(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    lengths = torch.tensor([[len(row["input_ids"])] for row in rows])
    return {**padded, "attention_mask": (torch.arange(longest)[None] < lengths).long()}


@pytest.mark.parametrize("model_type", sorted(_ISOLATING - {"gemma3"}))  # whose model is that of images, too
def test_each_model_type_that_is_let_pass_keeps_documents_apart(model_type):
    model = make_model(model_type)
    with torch.no_grad(), computing_without_cache(model):
        packed = model(**PACKED).logits[0].split([len(ids) for ids in DOCUMENTS])
        for ids, logits in zip(DOCUMENTS, packed, strict=True):
            torch.testing.assert_close(logits, model(input_ids=torch.tensor([ids])).logits[0], atol=1e-4, rtol=1e-4)


def test_the_gradient_of_packed_documents_is_that_of_padded_ones():
    weights = []
    for collate in (pad, DataCollatorWithFlattening()):
        model = make_model()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        hps = {"batch_size": 3, "optim": {"type": "SGD", "lr": 1.0}}
        state = make_trainer(hps, collate_fn=collate, shuffle_train=False).fit(HuggingFaceModule(model), ROWS, ROWS)
        moved = [(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]
        weights.append((torch.cat(moved).detach(), state.metrics["val_loss"]))
        assert state.samples_seen == 3
        assert model.config.use_cache  # as it was
        assert not model._forward_pre_hooks
    (padded, padded_loss), (packed, packed_loss) = weights
    assert (padded - packed).norm() / padded.norm() < 1e-5
    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)


def test_a_cache_is_made_only_where_it_is_asked_for():
    model = nn.ModuleDict({"inner": make_model()})
    ids = PACKED["input_ids"]
    with torch.no_grad(), computing_without_cache(model):
        assert model["inner"](input_ids=ids).past_key_values is None
        cache = model["inner"](input_ids=ids, use_cache=True).past_key_values
        assert cache is not None
        assert model["inner"](input_ids=ids[:, :1], past_key_values=cache).past_key_values is not None
        assert model["inner"].generate(ids, max_new_tokens=2, do_sample=False).shape[1] == ids.shape[1] + 2
    assert model["inner"](input_ids=ids).past_key_values is not None


def test_a_model_that_is_not_known_to_keep_documents_apart_is_rejected():
    config = BertConfig(**{**SMALL, "num_key_value_heads": None})
    model = BertForMaskedLM(config)
    with computing_without_cache(model):
        with pytest.raises(DataError, match=r"packed documents in BertForMaskedLM(.|\n)*'bert' may mix(.|\n)*pad"):
            model(**PACKED)
        with pytest.raises(DataError, match="'bert' may mix"):
            model(input_ids=torch.ones(1, 3, dtype=torch.long), position_ids=torch.zeros(1, 3, dtype=torch.long))
        model(input_ids=PACKED["input_ids"], position_ids=torch.arange(14)[None])
        seen = torch.ones(1, 1, 14, 14, dtype=torch.bool)
        model(**PACKED, attention_mask=seen)  # who sees whom is said
    model(**PACKED)  # nobody trains it


def test_a_mask_beside_packed_documents_is_rejected_and_padding_is_not():
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    with computing_without_cache(model):
        with pytest.raises(DataError, match="leave attention_mask out of the batch"):
            model(**PACKED, attention_mask=torch.ones(1, 14, dtype=torch.long))
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
        left = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 1]])
        model(input_ids=torch.ones(2, 5, dtype=torch.long), position_ids=left, attention_mask=mask)
