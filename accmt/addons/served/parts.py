"""The parts in which a served model is compared with the trained one, in the order in which they depend on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accmt.addons.served.targets import KINDS, MAX_LENGTH, Folder, Messages, count_bits, render
from accmt.addons.served.weights import find_cause
from accmt.addons.sft.chat import IGNORED, MaskedRow, mask_row
from accmt.addons.sft.rows import read_rows
from accmt.errors import ArgumentError, fail

SAME, DIFFERS, NOT_CHECKED = "same", "differs", "not checked"

TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}
"""The largest mean difference of the log-probabilities of tokens that comes from rounding.

Logits of tens have errors of some units in their last place, which are 1e-6, 1e-2 and 1e-1 in these types; a mean over
tokens is several times smaller. Kernels that sum in another order already differ by up to 1e-3 in 32 bits.
"""

DIVERGENCES = {8: 5e-3, 6: 2e-2, 5: 4e-2, 4: 0.2, 3: 0.3, 2: 1.3}
"""The largest mean Kullback-Leibler divergence that comes from quantization to this number of bits.

Three times what llama.cpp measures for Llama 3 8B with Q8_0, Q6_K, Q5_K_M, Q4_0, Q3_K_M and Q2_K.
Source: tools/perplexity/README.md of llama.cpp.
"""

MAX_ROWS = 64

_SYSTEM = {"role": "system", "content": "You answer in one short sentence."}
_TURNS = (
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "And 12 * 34 = ?\n\nShow it: naïve café, 東京, 🙂."},
    {"role": "assistant", "content": "12 * 34 is 408."},
)
CONVERSATIONS: tuple[Messages, ...] = (_TURNS[:2], _TURNS, (_SYSTEM, *_TURNS[:2]), (_SYSTEM, *_TURNS))
"""One turn and several, without and with a system prompt."""

STRINGS = (
    *("Hello, world! It's what we've all said.", " leading and trailing ", "two  spaces,\ttabs\t\tand\n\n\nlines\r\n"),
    *("0 1 12 123 1234 12345.678 1,000,000", "naïve café Ünïcödé e\u0301", "日本語 中文 한국어 العربية עברית हिन्दी"),
    *("🙂👩‍👩‍👧🏽🇫🇷", "def f(x):\n    return {'x': x ** 2}  # <b>$x_1$</b>"),
)


class Part(NamedTuple):
    """The result of comparing one part.

    Attributes:
        name: The part.
        state: `SAME`, `DIFFERS` or `NOT_CHECKED`.
        detail: What differs, or was compared.
        do: What to do about it.
    """

    name: str
    state: str
    detail: str = ""
    do: str = ""


def compare(model: str, kind: str, export: str, data: str | None = None) -> Iterator[Part]:
    """Compare a served model with the trained one, and yield the result of each part.

    Args:
        model: The folder of the trained model, or of an adapter.
        kind: What serves it: "gguf", "onnx", "merged" or "vllm".
        export: The path of the export, or the URL of the server.
        data: A file with rows for supervised fine-tuning; None compares built-in conversations.

    Raises:
        ArgumentError: The model or the export cannot be opened.
        DataError: The rows have another format.
        MissingPackageError: A package that reads the export is not installed.
    """
    if kind not in KINDS:
        expected, do = ", ".join(KINDS), "--against merged FOLDER"
        raise fail(ArgumentError, "accmt check --against", got=kind, expected=expected, do=do)
    trained = Folder(model)
    if trained.tokenizer is None:
        do = f"save it there: tokenizer.save_pretrained({model!r})"
        raise fail(ArgumentError, model, got="no tokenizer", expected="a tokenizer beside the model", do=do)
    served = KINDS[kind](export, trained)
    rows = list(_read_rows(trained.tokenizer, data))
    if not rows:
        expected, do = "conversations that the chat template accepts", "pass --data rows.jsonl"
        raise fail(ArgumentError, data or model, got="no answers", expected=expected, do=do)
    yield _compare_templates(trained, served)
    yield _compare_stop(trained, served, rows[0])
    yield _compare_tokenizers(trained, served)
    yield from _compare_log_probs(trained, served, rows)


def _read_rows(tokenizer: Any, data: str | None) -> Iterator[MaskedRow]:
    if data is not None:
        read = read_rows("--data", [data], "train")
        rows = [read[index] for index in range(min(len(read), MAX_ROWS))]
    elif tokenizer.chat_template is not None:
        rows = [{"messages": messages} for messages in CONVERSATIONS]
    else:
        pairs = (_TURNS[:2], _TURNS[2:])
        rows = [{"prompt": question["content"], "completion": answer["content"]} for question, answer in pairs]
    for row in rows:
        masked = mask_row(tokenizer, row, max_length=MAX_LENGTH)
        if masked.has_target:
            yield masked


def _compare_templates(trained: Folder, served: Folder) -> Part:
    """Compare the tokens of conversations, and how often the beginning-of-sequence token begins them."""
    from jinja2 import TemplateError

    name, tokenizer = "chat template", trained.tokenizer
    if tokenizer.chat_template is None:
        return Part(name, NOT_CHECKED, "the trained model has none")
    prompts = [(messages[:-1], True) for messages in CONVERSATIONS]
    for messages, asks in [*prompts, *((messages, False) for messages in CONVERSATIONS)]:
        try:
            text = render(tokenizer, messages, asks=asks)
        except (TemplateError, TypeError, ValueError):  # it rejects a system prompt, for example
            continue
        try:
            tokens = served.chat_tokens(messages, asks=asks)
        except TemplateError as error:
            return Part(name, DIFFERS, f"it rejects {messages[0]['role']} messages: {error}", served.do)
        # What the served tokenizer makes of the trained text: the tokenizer is another part.
        expected = served.encode(text)
        if tokens is None or expected is None:
            # A folder without any tokenizer is served with another one, which cannot be checked.
            return Part(name, NOT_CHECKED if expected is None else DIFFERS, "the export has none", served.do)
        num_bos, num_served = (ids[:2].count(tokenizer.bos_token_id) for ids in (expected, tokens))
        expected = expected[max(0, num_bos - 1) :]  # of two, training drops one
        if num_served != min(1, num_bos):
            detail = f"{tokenizer.bos_token} begins a conversation {num_served} times, in training {min(1, num_bos)}"
            do = f"let either the template or the runtime add it (GGUF: tokenizer.ggml.add_bos_token); {served.do}"
            return Part(name, DIFFERS, detail, do)
        if tokens != expected:
            place = len(commonprefix([tokens, expected]))
            ours, theirs = (repr(tokenizer.decode(ids[max(0, place - 3) : place + 5])) for ids in (expected, tokens))
            return Part(name, DIFFERS, f"at token {place}: trained {ours}, served {theirs}", served.do)
    return Part(name, SAME)


def _compare_stop(trained: Folder, served: Folder, row: MaskedRow) -> Part:
    """Check that the token that ends answers stops the generation, and can have been learned."""
    name, tokenizer = "stop token", trained.tokenizer
    end = [label for label in row.labels if label != IGNORED][-1]
    shown = f"{tokenizer.decode([end])!r} (token {end})"
    if end not in tokenizer.added_tokens_decoder:
        do = "end assistant turns with a special token in the chat template, and train again"
        return Part(name, DIFFERS, f"answers end with {shown}, which is no special token", do)
    embeddings = trained.model.get_input_embeddings().weight
    if end >= len(embeddings) or not embeddings[end].any():
        do = "model.resize_token_embeddings(len(tokenizer)), and train the embeddings"
        return Part(name, DIFFERS, f"answers end with {shown}, whose embedding was never trained", do)
    is_stop = served.is_stop(end)
    if is_stop is None:
        return Part(name, NOT_CHECKED, "the export lists none")
    if not is_stop:
        do = served.stop_do.format(id=end, ids=sorted({end, tokenizer.eos_token_id or end}))
        return Part(name, DIFFERS, f"answers end with {shown}, at which the export does not stop", do)
    return Part(name, SAME, shown)


def _compare_tokenizers(trained: Folder, served: Folder) -> Part:
    name, tokenizer = "tokenizer", trained.tokenizer
    fault = served.find_vocabulary_fault(tokenizer)
    if fault is not None:
        return Part(name, DIFFERS, fault, served.do)
    marks = [f"a{token.content} b" for token in tokenizer.added_tokens_decoder.values()]
    for text in (*STRINGS, *marks[:MAX_ROWS]):
        ids, expected = served.encode(text), trained.encode(text)
        if ids is None:
            return Part(name, NOT_CHECKED, "the export has none")
        if ids != expected:
            return Part(name, DIFFERS, f"{text!r} is {ids}, trained {expected}", served.do)
    return Part(name, SAME)


def _compare_log_probs(trained: Folder, served: Folder, rows: Sequence[MaskedRow]) -> Iterator[Part]:
    """Compare the log-probabilities of answers, and say what causes a difference."""
    is_small, detail = _judge(trained, served, rows)
    if is_small:
        yield Part("log-probabilities", SAME, detail)
        return
    is_base = False
    if hasattr(trained.model, "disable_adapter"):
        with trained.model.disable_adapter():
            is_base, _ = _judge(trained, served, rows)
    if is_base:
        do = "accmt merge MODEL MERGED, then export or serve MERGED"
        name, cause = "weights", "unmerged adapter: served is the base model"
    else:
        name, cause, do = find_cause(trained, served, rows[0].input_ids)
    yield Part("log-probabilities", DIFFERS, detail, do)
    yield Part(name, DIFFERS, cause, do)


def _judge(trained: Folder, served: Folder, rows: Sequence[MaskedRow]) -> tuple[bool, str]:
    """Return whether the log-probabilities of rows differ only by rounding, and by how much they differ."""
    gaps, divergences, labels = [], [], list[Tensor]()
    for row in rows:
        targets = torch.tensor(row.labels[1:])
        is_target = targets != IGNORED
        targets = targets[is_target]
        ours, theirs = (target.log_probs(row.input_ids)[is_target] for target in (trained, served))
        if theirs.dim() == 2:
            width = min(ours.shape[1], theirs.shape[1])  # the vocabulary of one may be padded
            ours, theirs = ours[:, :width], theirs[:, :width]
            divergences.append((ours.exp() * (ours - theirs)).sum(1))
            theirs = theirs.gather(1, targets[:, None])[:, 0]
        gaps.append((ours.gather(1, targets[:, None])[:, 0] - theirs).abs())
        labels.append(targets)
    gap = torch.cat(gaps)
    worst = trained.tokenizer.decode([int(torch.cat(labels)[gap.argmax()])])
    detail = f"mean difference {gap.mean():.2g} over {len(gap)} tokens of answers, largest {gap.max():.2g} at {worst!r}"
    if served.dtype in TOLERANCES:
        value, limit = gap.mean(), max(TOLERANCES.get(dtype, 0.0) for dtype in (trained.dtype, served.dtype))
    else:
        bits = max(count for count in DIVERGENCES if count <= max(2, count_bits(served.dtype)))
        value, limit = torch.cat(divergences).mean(), DIVERGENCES[bits]
        detail = f"mean divergence {value:.2g}, {detail}"
    # Written so that NaN is no small difference.
    return bool(value <= limit), f"{detail} (limit {limit:g} for {served.dtype})"
