"""The mask with tokenizers of other kinds: no token of an answer is left out, and none of others is taken in."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from accmt.addons.sft.chat import IGNORED, mask_row
from tests import conversations
from tests.conversations import draw_conversations, trained_texts
from tests.tables import each

MARKED = conversations.CHATML.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}",
).replace("{% endfor %}<|im_end|>\n", "{% endfor %}{% if message.role != 'assistant' %}<|im_end|>\n{% endif %}")
CODE = "  def f():\n\n        return 🙂🙃 e\u0301 東京  "
ROW = {
    "messages": [
        {"role": "user", "content": "why  x?  "},
        {"role": "assistant", "content": CODE},
        {"role": "user", "content": " ok 🙂 "},
        {"role": "assistant", "content": "bye  "},
    ]
}


@cache
def texts() -> list[str]:
    rows = draw_conversations(100, seed=1)
    return [message["content"] for row in rows for message in row["messages"]] + [CODE] * 20


def byte_level(*, trim_offsets: bool, add_prefix_space: bool = False) -> Tokenizer:
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    words.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    words.train_from_iterator(texts(), trainer)
    words.post_processor = processors.ByteLevel(trim_offsets=trim_offsets, add_prefix_space=add_prefix_space)
    return words


def unigram(scheme: str) -> Tokenizer:
    words = Tokenizer(models.Unigram())
    words.normalizer = normalizers.NFKC()
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    words.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    words.train_from_iterator(texts(), trainer)
    return words


def sentencepiece() -> Tokenizer:
    """As that of Llama 2: spaces are letters, and what is rare is bytes."""
    words = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    words.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, limit_alphabet=60, show_progress=False)
    words.train_from_iterator(texts(), trainer)
    return words


def word_piece() -> Tokenizer:
    words = Tokenizer(models.WordPiece(unk_token="<unk>"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    words.train_from_iterator(texts(), trainer)
    return words


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": cache(lambda: byte_level(trim_offsets=False)),
    "byte level, offsets without spaces": cache(lambda: byte_level(trim_offsets=True)),
    "byte level, space before": cache(lambda: byte_level(trim_offsets=True, add_prefix_space=True)),
    "unigram, always": cache(lambda: unigram("always")),
    "unigram, first": cache(lambda: unigram("first")),
    "unigram, never": cache(lambda: unigram("never")),
    "sentencepiece": cache(sentencepiece),
    "word piece": cache(word_piece),
}


def make(kind: str, template: str, **token: bool) -> Any:
    copy = Tokenizer.from_str(KINDS[kind]().to_str())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=copy, eos_token="</s>", unk_token="<unk>")
    marks = [AddedToken(mark, special=True, normalized=False, **token) for mark in ("<|im_start|>", "<|im_end|>")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.chat_template = template
    return tokenizer


@each("template", [conversations.CHATML, MARKED])
@each("token", [{}, {"rstrip": True}, {"lstrip": True}])
@each("kind", KINDS)
def test_of_each_turn_all_tokens_from_the_header_to_the_end_are_trained(kind: str, token: Any, template: str) -> None:
    tokenizer = make(kind, template, **token)
    masked = mask_row(tokenizer, ROW)
    begin, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    begins, ends = ([at for at, one in enumerate(masked.input_ids) if one == mark] for mark in (begin, end))
    answers = [masked.labels[start : stop + 1] for start, stop in zip(begins, ends, strict=True)][1::2]
    trained = [label for label in masked.labels if label != IGNORED]
    for answer, content in zip(answers, (CODE, "bye  "), strict=True):
        first = next(at for at, label in enumerate(answer) if label != IGNORED)
        assert IGNORED not in answer[first:], "one stretch, to the end token"
        text = tokenizer.decode(answer[first:-1])
        expected = tokenizer.decode(tokenizer(content, add_special_tokens=False)["input_ids"])
        assert text.split() == expected.split()
        assert answer[0] == IGNORED, "the header is not trained"
    assert all(label != begin for label in trained)


def test_white_space_of_an_answer_is_trained_though_its_offsets_are_cut() -> None:
    tokenizer = make("byte level, offsets without spaces", conversations.CHATML)
    assert trained_texts(tokenizer, mask_row(tokenizer, ROW)) == [f"{CODE}<|im_end|>", "bye  <|im_end|>"]
    text = mask_row(tokenizer, {"text": CODE})
    assert text.input_ids == text.labels


def test_a_header_that_takes_in_the_spaces_of_the_answer_is_not_trained() -> None:
    template = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>\n{% endfor %}"
    tokenizer = make("byte level", template, rstrip=True)
    [first, _] = trained_texts(tokenizer, mask_row(tokenizer, ROW))
    assert first == f"{CODE.lstrip()}<|im_end|>"


def test_the_next_turn_is_not_trained_where_its_token_takes_in_the_end_of_the_answer() -> None:
    template = "{% for message in messages %}<|im_start|>{{ message.content }}\n{% endfor %}"
    tokenizer = make("byte level", template, lstrip=True)
    assert all("<|im_start|>" not in text for text in trained_texts(tokenizer, mask_row(tokenizer, ROW)))
