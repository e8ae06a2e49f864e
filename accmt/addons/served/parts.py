"""The parts in which a served model is compared with the trained one, in the order in which they depend on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accmt.addons.served.targets import Folder, Messages, Target, count_bits, open_target, render
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

MAX_ROWS, MAX_LENGTH = 64, 2048

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
    "Hello, world! It's what we've all said.",
    " leading and trailing ",
    "two  spaces,\ttabs\t\tand\n\n\nlines\r\n",
    "0 1 12 123 1234 12345.678 1,000,000",
    "naïve café Ünïcödé e\u0301",
    "日本語 中文 한국어 العربية עברית हिन्दी",
    "🙂👩‍👩‍👧🏽🇫🇷",
    "def f(x):\n    return {'x': x ** 2}  # <b>$x_1$</b>",
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
    trained = Folder(Path(model))
    if trained.tokenizer is None:
        do = f"save it there: tokenizer.save_pretrained({model!r})"
        raise fail(ArgumentError, model, got="no tokenizer", expected="a tokenizer beside the model", do=do)
    served = open_target(kind, export, trained)
    rows = list(_read_rows(trained.tokenizer, data))
    if not rows:
        expected = "conversations that the chat template accepts"
        raise fail(ArgumentError, data or model, got="no answers", expected=expected, do="pass --data rows.jsonl")
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
        rows = [{"prompt": one["content"], "completion": other["content"]} for one, other in (_TURNS[:2], _TURNS[2:])]
    for row in rows:
        masked = mask_row(tokenizer, row, max_length=MAX_LENGTH)
        if masked.has_target:
            yield masked


def _compare_templates(trained: Folder, served: Target) -> Part:
    """Compare the tokens of conversations, and how often the beginning-of-sequence token begins them."""
    from jinja2 import TemplateError

    name, tokenizer = "chat template", trained.tokenizer
    if tokenizer.chat_template is None:
        return Part(name, NOT_CHECKED, "the trained model has none")
    bos = tokenizer.bos_token_id
    prompts = [(messages[:-1], True) for messages in CONVERSATIONS]
    for messages, asks in [*prompts, *((messages, False) for messages in CONVERSATIONS)]:
        try:
            text = render(tokenizer, messages, asks=asks)
        except (TemplateError, TypeError, ValueError):  # it rejects a system prompt, for example
            continue
        try:
            tokens = served.chat_tokens(messages, asks=asks)
        except TemplateError as error:
            return Part(name, DIFFERS, f"it rejects {messages[0]['role']} messages: {error}", served.template_do)
        if tokens is None:
            # A folder without any tokenizer is served with another one, which cannot be checked.
            state = NOT_CHECKED if served.encode(text) is None else DIFFERS
            return Part(name, state, "the export has none", served.template_do)
        # What the server's tokenizer makes of the trained text: its tokenizer is another part.
        expected = served.encode(text) or []
        while bos is not None and expected[:2] == [bos, bos]:  # training drops it as well
            expected = expected[1:]
        num_bos = [_count_leading(ids, bos) for ids in (expected, tokens)]
        if num_bos[0] != num_bos[1]:
            times = f"{tokenizer.bos_token} begins a conversation {num_bos[1]} times, in training {num_bos[0]}"
            do = "remove it from the template, or let the runtime not add it (GGUF: tokenizer.ggml.add_bos_token)"
            return Part(name, DIFFERS, times, do)
        if tokens != expected:
            place = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b), len(expected))
            start = max(0, min(place, len(tokens), len(expected)) - 3)
            shown = [repr(tokenizer.decode(ids[start : place + 5])) for ids in (expected, tokens)]
            return Part(name, DIFFERS, f"at token {place}: trained {shown[0]}, served {shown[1]}", served.template_do)
    return Part(name, SAME)


def _count_leading(tokens: Sequence[int], token: int | None) -> int:
    return next((place for place, one in enumerate(tokens) if one != token), len(tokens))


def _compare_stop(trained: Folder, served: Target, row: MaskedRow) -> Part:
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
        ids = sorted({end, *(token for token in (tokenizer.eos_token_id,) if token is not None)})
        do = served.stop_do.format(id=end, ids=ids)
        return Part(name, DIFFERS, f"answers end with {shown}, at which the export does not stop", do)
    return Part(name, SAME, shown)


def _compare_tokenizers(trained: Folder, served: Target) -> Part:
    name, tokenizer = "tokenizer", trained.tokenizer
    fault = served.find_vocabulary_fault(tokenizer)
    if fault is not None:
        return Part(name, DIFFERS, fault, served.tokenizer_do)
    marks = [f"a{token.content} b" for token in tokenizer.added_tokens_decoder.values()]
    for text in (*STRINGS, *marks[:MAX_ROWS]):
        ids, expected = served.encode(text), trained.encode(text)
        if ids is None:
            return Part(name, NOT_CHECKED, "the export has none")
        if ids != expected:
            return Part(name, DIFFERS, f"{text!r} is {ids}, trained {expected}", served.tokenizer_do)
    return Part(name, SAME)


def _compare_log_probs(trained: Folder, served: Target, rows: Sequence[MaskedRow]) -> Iterator[Part]:
    """Compare the log-probabilities of answers, and say what causes a difference."""
    name = "log-probabilities"
    ours = [_take(trained, row) for row in rows]
    theirs = [_take(served, row) for row in rows]
    is_small, detail = _judge(trained, served, rows, ours, theirs)
    if is_small:
        yield Part(name, SAME, detail)
        return
    cause = None
    if hasattr(trained.model, "disable_adapter"):
        with trained.model.disable_adapter():
            base = [_take(trained, row) for row in rows]
        if _judge(trained, served, rows, base, theirs)[0]:
            do = "accmt merge MODEL MERGED, then export or serve MERGED"
            cause = "weights", "unmerged adapter: served is the base model", do
    named, why, do = cause or find_cause(trained, served, rows[0].input_ids)
    yield Part(name, DIFFERS, detail, do)
    yield Part(named, DIFFERS, why, do)


def _take(target: Target, row: MaskedRow) -> Tensor:
    """Return the log-probabilities that a target computes for the trained tokens of a row."""
    return target.log_probs(row.input_ids)[torch.tensor(row.labels[1:]) != IGNORED]


def _judge(
    trained: Folder, served: Target, rows: Sequence[MaskedRow], ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> tuple[bool, str]:
    """Return whether log-probabilities differ only by rounding, and by how much they differ."""
    gaps, divergences, labels = [], [], list[int]()
    for row, trained_row, served_row in zip(rows, ours, theirs, strict=True):
        targets = torch.tensor([label for label in row.labels[1:] if label != IGNORED])
        labels += targets.tolist()
        of_tokens = [
            one if one.dim() == 1 else one.gather(1, targets[:, None])[:, 0] for one in (trained_row, served_row)
        ]
        gaps.append((of_tokens[0] - of_tokens[1]).abs())
        if served_row.dim() == 2:
            width = min(trained_row.shape[1], served_row.shape[1])  # the vocabulary of one may be padded
            first, second = trained_row[:, :width], served_row[:, :width]
            divergences.append((first.exp() * (first - second)).sum(1))
    gap = torch.cat(gaps)
    worst = trained.tokenizer.decode([labels[int(gap.argmax())]])
    detail = f"mean difference {gap.mean():.2g} over {len(gap)} tokens of answers, largest {gap.max():.2g} at {worst!r}"
    if served.dtype in TOLERANCES:
        value, limit = gap.mean(), max(TOLERANCES.get(dtype, 0.0) for dtype in (trained.dtype, served.dtype))
    else:
        bits = max(count for count in DIVERGENCES if count <= max(2, count_bits(served.dtype)))
        value, limit = torch.cat(divergences).mean(), DIVERGENCES[bits]
        detail = f"mean divergence {value:.2g}, {detail}"
    # Written so that NaN is no small difference.
    return bool(value <= limit), f"{detail} (limit {limit:g} for {served.dtype})"
