"""Models write answers in evaluations, and metrics of texts judge them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jiwer
import pytest
import sacrebleu
import torch
from rouge_score.rouge_scorer import RougeScorer
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from accmt import AcceleratorModule, SFTModule, Trainer
from accmt.errors import ArgumentError, HyperParameterError, MetricError
from accmt.tracking.history import read_history
from accmt.tracking.values import Media
from tests import conversations
from tests.conversations import make_tokenizer
from tests.raising import raises_at

WORDS = ["red", "green", "blue", "one", "two", "three", "four"]
ROWS = [
    {
        "prompt": f"{' '.join(WORDS[: 1 + number % 5])} {number}",
        "completion": f"{WORDS[number % 7]} {WORDS[number % 3]}",
    }
    for number in range(10)
]


def make_module(seed: int = 0) -> SFTModule:
    tokenizer = make_tokenizer(conversations.CHATML)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return SFTModule(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)), tokenizer)


def train(module: Any, rows: Sequence[Any] = ROWS, val_rows: Any = ROWS, *, metrics: Any = None, **hps: Any) -> Trainer:
    own = {"epochs": 1, "batch_size": [5, hps.pop("val_batch_size", 4)], "optim": {"type": "AdamW", "lr": 1e-3}}
    generate = {"max_new_tokens": 6}
    settings = {"model_saving": None, "verbose": False, "seed": 0, "run_name": "run", **hps.pop("settings", {})}
    hps = {**own, "evaluation": {"generate": generate, "table_rows": 8}, **hps}
    trainer = Trainer(hps, "model", metrics=metrics, **settings)
    trainer.fit(module, list(rows), val_rows)
    return trainer


def read_tables(folder: Path = Path("logs/model/run"), name: str = "generated") -> list[tuple[list[str], list[Any]]]:
    lines = [line for line in read_history(folder) if "media" in line]
    media = [Media.of_line(folder, line) for line in lines]
    return [one.table() for one in media if one.name == name]


def write_by_hand(module: SFTModule, prompt: str, limit: int = 6) -> str:
    """Write greedily, one row and one token at a time, without a cache."""
    tokenizer, model = module.processor, module.model.eval()
    tokens = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    new: list[int] = []
    ends = model.generation_config.eos_token_id
    while len(new) < limit:
        with torch.no_grad():
            logits = model(torch.tensor([tokens + new])).logits
        new.append(int(logits[0, -1].argmax()))
        if new[-1] in (ends if isinstance(ends, list) else [ends]):
            break
    return tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.parametrize("hps", [{"val_batch_size": 1}, {"val_batch_size": 4}, {"val_batch_size": 7, "max_tokens": 64}])
def test_texts_are_those_of_greedy_search_by_hand_in_batches_of_any_size(hps: dict[str, Any]) -> None:
    module = make_module()
    trainer = train(module, metrics=["rouge", "exact_match", "sacrebleu", "chrf", "wer", "cer"], **hps)
    columns, table = read_tables()[-1]
    assert columns == ["prompt", "expected", "written", "rouge", "exact_match", "wer", "cer"]
    assert [row[0] for row in table] == [row["prompt"] for row in ROWS[:8]]
    assert [row[1] for row in table] == [row["completion"] for row in ROWS[:8]]
    assert [row[2] for row in table] == [write_by_hand(module, row["prompt"]) for row in ROWS[:8]]
    written = [write_by_hand(module, row["prompt"]) for row in ROWS]
    expected = [row["completion"] for row in ROWS]
    scores = [RougeScorer(["rouge1", "rougeL"]).score(*pair) for pair in zip(expected, written, strict=True)]
    found = trainer.state.metrics
    assert found["rouge"] == pytest.approx(sum(score["rougeL"].fmeasure for score in scores) / len(ROWS))
    assert found["rouge1"] == pytest.approx(sum(score["rouge1"].fmeasure for score in scores) / len(ROWS))
    assert found["sacrebleu"] == pytest.approx(sacrebleu.corpus_bleu(written, [expected]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(written, [expected]).score)
    assert found["wer"] == pytest.approx(jiwer.wer(expected, written))
    assert found["cer"] == pytest.approx(jiwer.cer(expected, written))
    assert found["exact_match"] == sum(map(str.__eq__, written, expected)) / len(ROWS)


def test_the_weights_are_those_of_a_run_that_generates_nothing_also_with_sampling() -> None:
    silent = make_module()
    train(silent, evaluation=None, settings={"evaluate_every_n_steps": 1, "run_name": "silent"})
    writing = make_module()
    generate = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 3}
    train(writing, evaluation={"generate": generate}, settings={"evaluate_every_n_steps": 1})
    for one, other in zip(silent.model.parameters(), writing.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(read_tables()) == 2


def test_the_model_that_writes_best_is_saved_and_several_sets_have_tables_of_their_own() -> None:
    module = make_module()
    rows = [{"prompt": f"say {number}", "completion": "yes"} for number in range(10)]
    sets = {"known": rows[:4], "with_turns": [{"messages": TURNS}, {"text": "no prompt at all"}]}
    settings = {"model_saving": "best_exact_match@known", "metrics": ["exact_match"]}
    hps = {"epochs": 6, "batch_size": [5, 4], "optim": {"type": "AdamW", "lr": 1e-2}}
    trainer = Trainer({**hps, "evaluation": {"generate": True}}, "model", run_name="run", verbose=False, **settings)
    trainer.fit(module, rows, sets)
    assert trainer.state.best["best_exact_match@known"] == 1.0
    assert len(read_tables(name="generated/known")) == 6
    _, table = read_tables(name="generated/with_turns")[-1]
    assert [row[1] for row in table] == ["the last answer"]
    assert "the first answer" in table[0][0]


TURNS = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "the first answer"},
    {"role": "user", "content": "second"},
    {"role": "assistant", "content": "the last answer"},
]


class Translator(AcceleratorModule):
    """An encoder-decoder model with a step of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.tokenizer = make_tokenizer(conversations.CHATML)
        sizes = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        sizes |= {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
        special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
        self.model = BartForConditionalGeneration(BartConfig(vocab_size=len(self.tokenizer), **sizes, **special))

    def step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def collate_fn(self, rows: list[Any]) -> Any:
        texts = [self.tokenizer([row[name] for row in rows])["input_ids"] for name in ("prompt", "completion")]
        inputs, labels = (
            nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in every], batch_first=True, padding_value=value)
            for every, value in zip(texts, (0, -100), strict=True)
        )
        return {"input_ids": inputs, "attention_mask": (inputs != 0).long(), "labels": labels}


def test_an_encoder_decoder_model_with_a_step_of_its_own_writes_from_its_input() -> None:
    module = Translator()
    train(module, metrics="wer")
    _, table = read_tables()[-1]
    assert [row[:2] for row in table] == [[row["prompt"], row["completion"]] for row in ROWS[:8]]
    tokens = module.tokenizer(ROWS[3]["prompt"], return_tensors="pt")
    alone = module.model.eval().generate(**tokens, max_new_tokens=6, do_sample=False)
    assert table[3][2] == module.tokenizer.decode(alone[0][1:], skip_special_tokens=True).strip()


class WithoutTokenizer(Translator):
    def __init__(self) -> None:
        super().__init__()
        self._kept, self.tokenizer = self.tokenizer, None

    def collate_fn(self, rows: list[Any]) -> Any:
        self.tokenizer = self._kept
        batch = super().collate_fn(rows)
        self.tokenizer = None
        return batch


class Scores(AcceleratorModule):
    def __init__(self) -> None:
        self.model, self.tokenizer = nn.Linear(1, 1), make_tokenizer(conversations.CHATML)

    def step(self, batch: Any) -> torch.Tensor:
        return self.model(batch).mean()


@pytest.mark.parametrize(
    ("make", "evaluation", "key", "got"),
    [
        (make_module, {"generate": {"max_new_token": 3}}, ".generate", "`max_new_token`"),
        (make_module, {"generate": True, "table_rows": -1}, ".table_rows", "-1 (int)"),
        (WithoutTokenizer, {"generate": True}, ".generate", "WithoutTokenizer has no tokenizer"),
        (Scores, {"generate": True}, ".generate", "a Linear"),
        (make_module, {"generate": {"max_length": 64}}, ".generate", "max_length: 64"),
        (make_module, {"generate": {"temperature": 0.7}}, ".generate", "`temperature`"),
        (make_module, {"generate": {"max_new_tokens": 0}}, ".generate", "max_new_tokens = 0"),
        (make_module, {"generate": {"num_return_sequences": 3}}, ".generate", "`num_return_sequences`"),
    ],
)
def test_what_cannot_be_is_an_error_before_training(make: Any, evaluation: Any, key: str, got: str) -> None:
    with raises_at((HyperParameterError, ArgumentError), f"evaluation{key}", got):
        train(make(), evaluation=evaluation)


def test_a_metric_of_texts_without_texts_and_texts_without_words_are_errors_in_the_trial() -> None:
    with raises_at(MetricError, "metric 'rouge'"):
        train(make_module(), metrics="rouge", evaluation=None)
    with raises_at(MetricError, "metric 'wer'"):
        train(make_module(), val_rows=[{"prompt": "say", "completion": " "}], metrics="wer")


def test_a_trial_without_a_row_to_judge_does_not_end_a_run_that_has_such_rows(caplog: pytest.LogCaptureFixture) -> None:
    texts: list[Any] = [{"text": "plain"}] * 4
    trainer = train(
        make_module(), val_rows=[*texts, *ROWS], metrics="exact_match", settings={"num_sanity_val_steps": 1}
    )
    assert 0 <= trainer.state.metrics["exact_match"] <= 1
    assert "4 samples without an expected text" in caplog.text
    with raises_at(MetricError, "metric 'exact_match'", "4 samples"):
        train(make_module(), val_rows=texts, metrics="exact_match")


def count_words(written: list[str], expected: list[str]) -> dict[str, float]:
    return {"count_words": len(written), "expected_words": sum(len(text.split()) for text in expected)}


def test_a_function_of_texts_is_a_metric_by_its_name() -> None:
    trainer = train(make_module(), metrics=f"{__name__}:count_words")
    assert trainer.state.metrics["count_words"] == 10
    assert trainer.state.metrics["expected_words"] == 20
    with raises_at(MetricError, "Trainer(metrics=...)"):
        train(make_module(), metrics="no_such_module:score")
    with raises_at(MetricError, "Trainer(metrics=...)"):
        train(make_module(), metrics=f"{__name__}:make_module")


PLAIN = {"epochs": 1, "batch_size": 2, "optim": "SGD"}


def make_constant(token: int) -> SFTModule:
    """Return a module whose model writes only this token."""
    module = make_module()
    with torch.no_grad():
        for weight in module.model.parameters():
            weight.fill_(float(weight.ndim == 1))
        module.model.get_input_embeddings().weight.fill_(1.0)
        module.model.get_output_embeddings().weight[token] = 1.0
    return module


def test_texts_end_where_the_expected_ones_do_without_training_before(caplog: pytest.LogCaptureFixture) -> None:
    end = make_tokenizer(conversations.CHATML).convert_tokens_to_ids("<|im_end|>")
    module = make_constant(end)
    module.model.generation_config.eos_token_id = None
    hps = {**PLAIN, "evaluation": {"generate": {"max_new_tokens": 6}}}
    trainer = Trainer(hps, "model", metrics="exact_match")
    trainer.evaluate(module, [{"messages": TURNS}])
    assert "cut off" not in caplog.text
