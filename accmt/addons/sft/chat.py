"""Finds the tokens of a row to train: those of the assistant, and the end-of-turn token."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from math import isfinite
from numbers import Real
from operator import itemgetter
from os.path import commonprefix
from typing import Any, NamedTuple

from accmt.addons.sft.images import (
    Expanded,
    ImageError,
    ImageReader,
    RowImages,
    find_images,
    load_image,
    without_images,
)
from accmt.errors import DataError, fail

IGNORED = -100
"""The label of a token that is not a target."""

LOSS_WEIGHTS = "loss_weights"
"""The entry of samples and batches with the weight of each token's loss, if weights are not all 0 or 1."""

NO_TARGET = "without any token to train on"
STARTS_AFTER = "its answers start after"
"""The beginning of its detail if `max_length` is the reason."""

CUT = "with an answer truncated by max_length"
DOUBLED_BOS = "with two beginning-of-sequence tokens (one is dropped)"
REWRITTEN = "with assistant turns that are not trained because the chat template rewrites earlier turns"
NO_REASONING = "with reasoning that the chat template omits"
INCOMPLETE = "with assistant turns that are not trained because the chat template omits their content or tool calls"
NO_END = "with answers without an end token, so the model does not learn to stop"
OTHER_START = "with assistant turns that do not start with the chat template's generation prompt"
REJECTED = "rejected by the chat template or the processor"
CUT_IMAGE = "with an image that max_length would truncate"
NOT_WEIGHED = "with weights of messages that are not the assistant's (only the assistant's are trained)"

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ROLE = "assistant"
_REPEATED = 8
_OTHER_ROLES = {"system", "developer", "user", "tool"}
_WHERE = "a row for supervised fine-tuning"
_NAMES = ("messages", "prompt", "completion", "text")
_FORMS = '"messages"; "prompt" and "completion", both strings or both lists of messages; or "text"'


class Problem(NamedTuple):
    """A problem of a row.

    Attributes:
        kind: One of the constants above, by which problems are counted.
        detail: Details about this row.
    """

    kind: str
    detail: str = ""


class MaskedRow(NamedTuple):
    """The tokens of a row.

    Attributes:
        input_ids: All tokens.
        labels: The token id for each target, else -100.
        problems: Problems of the row.
        weights: The weight of each token's loss, 0 for tokens that are not targets; None if each target has weight 1.
        images: Its images, if it has any.
    """

    input_ids: list[int]
    labels: list[int]
    problems: tuple[Problem, ...] = ()
    weights: list[float] | None = None
    images: RowImages | None = None

    @property
    def has_target(self) -> bool:
        """Whether there is a target; the first token is never predicted."""
        return any(label != IGNORED for label in self.labels[1:])

    def sample(self) -> dict[str, Any]:
        """Return the row as a sample: without a target, two tokens without labels, which have weight 0."""
        if not self.has_target:
            return {"input_ids": [*self.input_ids, 0, 0][:2], "labels": [IGNORED, IGNORED]}
        weights = {} if self.weights is None else {LOSS_WEIGHTS: self.weights}
        sample = {"input_ids": self.input_ids, "labels": self.labels, **weights}
        return sample if self.images is None else sample | self.images.tokens | self.images.tensors

    def weigh(self, weight: float) -> MaskedRow:
        """Return the row with its weights multiplied by a number."""
        if weight == 1 or not self.has_target:
            return self
        if weight == 0:
            problems = (*self.problems, Problem(NO_TARGET, "its weight is 0"))
            return MaskedRow(self.input_ids, [IGNORED] * len(self.labels), problems)
        weights = self.weights or [float(label != IGNORED) for label in self.labels]
        return self._replace(weights=[weight * one for one in weights])

    def with_images(self, expanded: Expanded) -> MaskedRow:
        """Return the row with the tokens of its images, which are not trained."""
        ids, places, images = expanded
        labels = [IGNORED if place is None else self.labels[place] for place in places]
        weights = self.weights and [0.0 if place is None else self.weights[place] for place in places]
        return MaskedRow(ids, labels, self.problems, weights, images)

    def slice(self, start: int, stop: int | None) -> MaskedRow:
        """Return a part of the row."""
        weights = None if self.weights is None else self.weights[start:stop]
        images = self.images and self.images.slice(start, stop)
        return MaskedRow(self.input_ids[start:stop], self.labels[start:stop], self.problems, weights, images)

    def show(self, tokenizer: Any) -> str:
        """Return the text of the row, with the trained parts in brackets, followed by their weight if it is not 1."""
        weights = self.weights or [float(label != IGNORED) for label in self.labels]
        text = ""
        for weight, stretch in groupby(zip(self.input_ids, weights, strict=True), key=itemgetter(1)):
            part = _decode(tokenizer, [token for token, _ in stretch])
            text += part if weight == 0 else f"⟦{part}⟧" if weight == 1 else f"⟦{part}⟧×{weight:g}"
        return text


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens; one that is repeated many times, such as that of an image, is written once."""
    text, kept = "", list[int]()
    for token, repeated in ((token, len(list(same))) for token, same in groupby(tokens)):
        if repeated > _REPEATED:
            text, kept = f"{text}{tokenizer.decode(kept)}{tokenizer.decode([token])}×{repeated}", []
        else:
            kept += [token] * repeated
    return text + str(tokenizer.decode(kept))


def mask_row(
    tokenizer: Any,
    row: Mapping[str, Any],
    *,
    max_length: int | None = None,
    turn: int | None = None,
    images: ImageReader | None = None,
    where: str = _WHERE,
) -> MaskedRow:
    """Return the tokens of a row, with labels for the tokens of the assistant.

    Args:
        tokenizer: A fast tokenizer of transformers; conversations also need a chat template.
        row: A dict with "messages"; with "prompt" and "completion" (strings or lists of messages); or with "text", all
            of which is trained. Messages may come with "tools" and "chat_template_kwargs". The row and each message may
            have a "weight".
        max_length: The maximum number of tokens.
        turn: The index of the only message to train, with which the conversation ends; None trains all messages of the
            assistant.
        images: Reads the images of messages; None rejects them.
        where: The name of the row in error messages.

    Raises:
        DataError: The row has another format, an image that cannot be read or an invalid weight, or the tokenizer lacks
            a chat template or offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        expected, do = "a fast tokenizer", "AutoTokenizer.from_pretrained(...)"
        raise fail(
            DataError, _WHERE, got=f"{type(tokenizer).__name__}, which has no offset mapping", expected=expected, do=do
        )
    messages, first = find_messages(row, where)
    weight = read_number(row, "weight", 1.0, where, least=0.0)
    for index, message in enumerate(messages or ()):
        read_number(message, "weight", 1.0, f"{where}, message {index}", least=0.0)
    if messages is None:
        masked = _mask_text(tokenizer, row)
    elif tokenizer.chat_template is None:
        do = "set tokenizer.chat_template to the template of a similar instruct model (in the YAML, "
        do += "`chat_template: template.jinja` in the section of the data), or use rows of strings"
        raise fail(
            DataError,
            _WHERE,
            got="messages, but a tokenizer without a chat template",
            expected="a chat template",
            do=do,
        )
    else:
        masked = _mask_messages(tokenizer, messages, row, first, turn, images, where)
    bos = tokenizer.bos_token_id
    if bos is not None and masked.input_ids[:2] == [bos, bos]:
        masked = masked._replace(problems=(*masked.problems, Problem(DOUBLED_BOS))).slice(1, None)
    return _cut(masked.weigh(weight), max_length)


def find_messages(row: Any, where: str = _WHERE) -> tuple[list[Mapping[str, Any]] | None, int]:
    """Return the messages of a row (None if it has strings) and the index of the first message to train.

    Raises:
        DataError: The row has another format.
    """
    if isinstance(row, Mapping):
        if is_messages(row.get("messages")):
            return list(row["messages"]), 0
        prompt, completion = row.get("prompt"), row.get("completion")
        if prompt is not None and completion is not None and is_messages(prompt) and is_messages(completion):
            return [*prompt, *completion], len(prompt)
        if (isinstance(prompt, str) and isinstance(completion, str)) or isinstance(row.get("text"), str):
            return None, 0
    # Another format: say what the row has, and how to convert it.
    names = set(row) if isinstance(row, Mapping) else set()
    do = '[{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}'
    turns = next((name for name in ("conversations", "conversation", "messages") if name in names), None)
    first = row[turns][0] if turns and isinstance(row[turns], list | tuple) and row[turns] else None
    if isinstance(first, Mapping) and {"from", "value"} <= set(first):
        do = '[{"role": {"human": "user", "gpt": "assistant"}.get(one["from"], one["from"]), "content": one["value"]}'
        do += f' for one in row["{turns}"]]}}'
    do = f'convert each row, for example to {{"messages": {do}'
    if {"instruction", "output"} <= names:
        do = 'convert each row, for example to {"prompt": row["instruction"], "completion": row["output"]}'
    if not isinstance(row, Mapping):
        got = type(row).__name__
    elif turns == "messages" and isinstance(first, Mapping):
        got = f'"messages" with an entry without "role"; the first has the keys {", ".join(map(str, first))}'
    else:
        kinds = [f'"{name}" of type {type(row[name]).__name__}' for name in _NAMES if row.get(name) is not None]
        got = " and ".join(kinds) or f"the keys {', '.join(map(str, row))}"
    raise fail(DataError, where, got=got, expected=_FORMS, do=do)


def find_answers(messages: Sequence[Mapping[str, Any]], first: int = 0) -> list[int]:
    """Return the messages to train: the assistant's from `first` on, except those with OpenAI's `"weight": 0`."""
    answers = (index for index, one in enumerate(messages) if one["role"] == _ROLE and one.get("weight") != 0)
    return [index for index in answers if index >= first]


def read_number(row: Mapping[str, Any], name: str, default: float, where: str, least: float | None = None) -> float:
    """Return a number of a row or message; `default` if it has none.

    Raises:
        DataError: It is not a finite number of at least `least`.
    """
    value = row.get(name)
    if value is None:
        return default
    if isinstance(value, Real) and isfinite(float(value)) and (least is None or float(value) >= least):
        return float(value)
    expected = "a finite number" if least is None else f"a finite number of at least {least:g}"
    raise fail(DataError, where, got=f'"{name}": {value!r}', expected=expected, do=f'remove "{name}", or correct it')


def is_messages(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(one, Mapping) and "role" in one for one in value)


class _Turn(NamedTuple):
    """The position of an assistant turn in the text of a conversation, and its problems."""

    start: int
    end: int
    whole_end: int
    is_trained: bool
    problems: tuple[Problem, ...]


class _TemplateError(Exception):
    """A chat template rejected some messages."""


class _Conversation:
    """Renders a conversation, and parts of it."""

    def __init__(self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.messages = [_normalize(index, message) for index, message in enumerate(messages)]
        tools = row.get("tools") or None
        try:
            self._tools = json.loads(tools) if isinstance(tools, str) else tools
            self._arguments = dict(row.get("chat_template_kwargs") or {})
        except (TypeError, ValueError) as error:
            raise _TemplateError(f"invalid tools or chat_template_kwargs: {error}") from error
        self._tokens = "|".join(map(re.escape, sorted(tokenizer.added_tokens_encoder, key=len, reverse=True)))

    @property
    def has_markers(self) -> bool:
        """Whether the template itself marks the assistant's text."""
        return _MARKER.search(self._template) is not None

    @property
    def _template(self) -> str:
        template: str = self.tokenizer.get_chat_template(None, self._tools)
        return template

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Return the text of messages."""
        arguments = {"tokenize": False, **self._arguments, **arguments}
        text: str = self._try_calls(
            messages, lambda own: self.tokenizer.apply_chat_template(own, tools=self._tools, **arguments)
        )
        return text

    def find_marked(self) -> list[tuple[int, int]]:
        """Return the character spans that the template marks as the assistant's text.

        The mask of `apply_chat_template` is not used: at white space, for which some tokenizers have no offsets, it
        omits or includes everything that follows.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        arguments = {**self.tokenizer.special_tokens_map, **self._arguments, "chat_template": self._template}
        marked: list[tuple[int, int]] = self._try_calls(
            self.messages,
            lambda own: render_jinja_template([own], self._tools, return_assistant_tokens_mask=True, **arguments)[1][0],
        )
        return marked

    @staticmethod
    def _try_calls(messages: Sequence[Mapping[str, Any]], function: Callable[[Any], Any]) -> Any:
        """Call a function with messages: the arguments of tool calls are dicts, or JSON if a template rejects those."""
        own = [dict(one) for one in messages]
        try:
            return _call(function, own)
        except _TemplateError:
            written = [_with_arguments(one, json.dumps) for one in own]
            if written == own:
                raise
            with suppress(_TemplateError):  # the first error is more informative
                return _call(function, written)
            raise

    def find_turn(self, index: int, whole: str) -> _Turn:
        """Find the assistant's text in one turn, from the generation prompt to the end-of-turn token."""
        through = self.render(self.messages[: index + 1])
        probes = [self.render([*self.messages[:index], _probe(self.messages[index], word)]) for word in "AZ"]
        # What comes before the turn, without and with the generation prompt; nothing if the template rejects it.
        context, asked = "", ""
        if index:
            with suppress(_TemplateError):
                before = self.messages[:index]
                context, asked = (self.render(before, add_generation_prompt=asks) for asks in (False, True))
        start, is_behind_prompt = self._find_start(index, through, probes, context, asked)
        # What all answers end with is the end token, and perhaps a line break, which belongs to the next turn.
        tail = _common_end([*probes, through[start:]])
        first = len(through) - len(tail)
        end = first + (len(tail.rstrip()) if tail.strip() else len(tail))
        if context and context == asked and context.rstrip() == through[:start].rstrip():
            # The template may append the generation prompt even if it is not requested, but not before a user message.
            with suppress(_TemplateError):
                followed = self.render([*self.messages[: index + 1], {"role": "user", "content": "A"}])
                ended = re.search(self._tokens, through[first:end]) if self._tokens else None
                if ended is not None and not followed.startswith(through[:end]):
                    end = first + ended.end()
        if not whole.startswith(through[:end]):  # templates may mark the end of the conversation
            # Up to the last token that ends a turn, behind `first`, in both texts.
            common = len(commonprefix([through, whole]))
            found = re.finditer(self._tokens, through[:common]) if self._tokens else ()
            end = max((token.end() for token in found if token.start() >= first), default=end)
        kinds = _find_losses(self.messages[index], through[start:end])
        if not whole.startswith(through[:end]):  # a later message changes this turn, or what it answers
            kinds = [REWRITTEN]
        is_trained = not {REWRITTEN, INCOMPLETE}.intersection(kinds)
        if is_trained:
            has_end = tail.strip() or re.search(rf"(?:{self._tokens or '(?!)'})\s*$", through[start:end])
            kinds += [] if has_end else [NO_END]
            kinds += [] if is_behind_prompt else [OTHER_START]
        return _Turn(start, end, len(through), is_trained, tuple(Problem(kind, f"message {index}") for kind in kinds))

    def _find_start(self, index: int, through: str, probes: list[str], context: str, asked: str) -> tuple[int, bool]:
        """Return where the assistant's text starts, and whether this is the end of the generation prompt (if any).

        A template may have no generation prompt, ignore the flag, reject messages that end there, or insert something
        that the turn lacks, such as an empty reasoning block. Then it is where texts with different answers diverge.
        """
        if asked != context and through.startswith(asked):
            return len(asked), True
        parted = len(commonprefix([*probes, through]))
        if asked == context:
            return parted, True
        # The turn may change the text before it; then look for the prompt after the previous message.
        prompt = asked[len(context) :] if asked.startswith(context) else ""
        if prompt:
            earlier, previous, turn = self.messages[: index - 1], self.messages[index - 1], self.messages[index]
            with suppress(_TemplateError):
                others = [self.render([*earlier, _probe(previous, word), turn]) for word in "AZ"]
                behind = len(through) - len(_common_end([through, *others]))
                found = through.rfind(prompt, behind, parted)
                return (parted, False) if found < 0 else (found + len(prompt), True)
        return parted, False


def _common_end(texts: Sequence[str]) -> str:
    return commonprefix([text[::-1] for text in texts])[::-1]


def _probe(message: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return a one-word message in the same format; an answer keeps no other entries."""
    has_parts = isinstance(message.get("content"), list | tuple)
    others = {} if message["role"] == _ROLE else message
    return {**others, "role": message["role"], "content": [{"type": "text", "text": word}] if has_parts else word}


def _call(function: Callable[[Any], Any], messages: list[dict[str, Any]]) -> Any:
    try:
        return function(messages)
    except Exception as error:  # a template may raise any error of jinja2 or Python
        raise _TemplateError(f"{type(error).__name__}: {error}") from error


def _normalize(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without None entries, and with tool call arguments as dicts.

    Arguments that are JSON strings, as in OpenAI's format, would be encoded twice by most templates.
    """
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else []
    if not isinstance(content, str | list | tuple | None) or not all(isinstance(part, Mapping) for part in parts):
        kind = f"a list of {type(parts[0]).__name__}" if parts else type(content).__name__
        raise _TemplateError(f"the content of message {index} is {kind} instead of a string or a list of parts")
    own = {name: entry for name, entry in message.items() if entry is not None}

    def parse(arguments: Any) -> Any:
        try:
            parsed = json.loads(arguments)
        except (TypeError, ValueError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments

    return _with_arguments(own, parse)


def _with_arguments(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a message whose tool call arguments are replaced by `change(arguments)`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        return message
    changed = []
    for call in calls:
        function = call.get("function", call)
        if isinstance(function, Mapping) and "arguments" in function:
            other = {**function, "arguments": change(function["arguments"])}
            changed.append({**call, "function": other} if "function" in call else other)
        else:
            changed.append(call)
    return {**message, "tool_calls": changed}


def _find_losses(message: Mapping[str, Any], text: str) -> list[str]:
    """Return the problems of a turn whose text omits content, tool calls or reasoning."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    thoughts, said = ([one.rpartition("</think>")[side] for one in parts] for side in (0, 2))
    calls = [(call.get("function") or call).get("name") or "" for call in message.get("tool_calls") or ()]
    if any(one.strip() not in text for one in (*said, *calls)):
        return [INCOMPLETE]
    own = (message.get(name) or "" for name in ("reasoning_content", "thinking", "reasoning"))
    reasoning = [one.rpartition("<think>")[2].strip() for one in (*thoughts, *own)]
    return [] if all(one in text for one in reasoning) else [NO_REASONING]


def _mask_messages(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    row: Mapping[str, Any],
    first: int,
    turn: int | None,
    images: ImageReader | None,
    where: str,
) -> MaskedRow:
    sources = find_images(messages, row, where)
    if sources and images is None:
        expected, do = "a processor of text and images", "SFTModule(model, AutoProcessor.from_pretrained(...))"
        do += "; in the YAML, `type: AutoModelForImageTextToText` in `model`"
        raise fail(
            DataError,
            f"{where}, message {sources[0][0]}",
            got="an image, but only a tokenizer",
            expected=expected,
            do=do,
        )
    messages = [without_images(message) for message in messages] if sources else messages
    messages = messages if turn is None else messages[: turn + 1]
    indices = [index for index in find_answers(messages, first) if turn in (None, index)]
    weights = [1.0 if (own := messages[index].get("weight")) is None else float(own) for index in indices]
    try:
        conversation = _Conversation(tokenizer, messages, row)
        whole = conversation.render(conversation.messages)
        turns = [conversation.find_turn(index, whole) for index in indices]
        marked = conversation.find_marked() if conversation.has_markers else None
    except _TemplateError as error:
        return MaskedRow([], [], (Problem(REJECTED, str(error)),))
    problems = [problem for one in turns for problem in one.problems]
    roles = list(dict.fromkeys(str(one["role"]) for one in messages))
    if _ROLE not in roles and not _OTHER_ROLES.issuperset(roles):
        problems.append(Problem(NO_TARGET, f"its roles are {', '.join(roles)}, without {_ROLE}"))
    trained = [(one, weight) for one, weight in zip(turns, weights, strict=True) if one.is_trained]
    spans = [_Span(one.start, one.end, weight) for one, weight in trained]
    if marked is not None:
        is_all = turn is None and len(trained) == sum(one["role"] == _ROLE for one in messages)
        allowed = [_Span(one.start, one.whole_end, weight) for one, weight in trained]
        if is_all and len(set(weights)) == 1:
            allowed = [_Span(0, len(whole), weights[0])]
        spans = [_Span(max(start, a), min(end, b), weight) for start, end in marked for a, b, weight in allowed]
    if any(one.get("weight") not in (None, 0, 1) for one in messages if one["role"] != _ROLE):
        problems.append(Problem(NOT_WEIGHED))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    labels, of_tokens = _label(whole, encoded, spans, tokenizer.added_tokens_decoder)
    is_weighed = any(one.weight != 1 for one in spans)
    masked = MaskedRow(encoded["input_ids"], labels, tuple(problems), of_tokens if is_weighed else None)
    if images is None or not masked.has_target:
        return masked
    of_row = [load_image(one, f"{where}, message {index}") for index, one in sources if index < len(messages)]
    try:
        expanded = images.expand(whole, masked.input_ids, of_row)
    except ImageError as error:
        return MaskedRow([], [], (Problem(REJECTED, str(error)),))
    return masked if expanded is None else masked.with_images(expanded)


def _mask_text(tokenizer: Any, row: Mapping[str, Any]) -> MaskedRow:
    """Mask a row of strings; the end-of-sequence token is also trained."""
    is_split = isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)
    prompt, answer = (row["prompt"], row["completion"]) if is_split else ("", row["text"])
    encoded = tokenizer(prompt + answer, return_offsets_mapping=True)
    spans = [_Span(len(prompt), len(prompt) + len(answer))]
    ids, (labels, _) = encoded["input_ids"], _label(prompt + answer, encoded, spans, tokenizer.added_tokens_decoder)
    end = tokenizer.eos_token_id
    if end is None:
        return MaskedRow(ids, labels, (Problem(NO_END),))
    if answer:
        if ids[-1:] != [end]:
            ids, labels = [*ids, end], [*labels, end]
        elif ids[-2:] == [end, end] and encoded["offset_mapping"][-1] == (0, 0):  # the tokenizer appended a second one
            ids, labels = ids[:-1], labels[:-1]
        labels[-1] = end
    return MaskedRow(ids, labels)


class _Span(NamedTuple):
    """Characters to train, and the weight of their tokens."""

    start: int
    end: int
    weight: float = 1.0


def _label(
    text: str, encoded: Mapping[str, Any], spans: Sequence[_Span], added: Container[int]
) -> tuple[list[int], list[float]]:
    """Return the ids of tokens that contain any character of the spans, and -100 for all others; and their weights.

    A token that starts before an answer, because it includes a space, is therefore trained. Of overlapping spans, the
    later one begins where the earlier one ends.
    """
    parted: list[_Span] = []
    for span in sorted(span for span in spans if span.start < span.end):
        start = max(span.start, parted[-1].end) if parted else span.start
        if start < span.end:
            parted.append(span._replace(start=start))
    ends = [one.end for one in parted]
    labels, weights, before = list[int](), list[float](), 0
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if token in added:  # the token may include surrounding white space, which does not decide whether it is trained
            piece = text[start:end]
            start, end = end - len(piece.lstrip()), start + len(piece.rstrip())
        elif start == end:  # white space, for which some tokenizers have no offsets
            start = before
        before = max(before, end)
        place = bisect_right(ends, start)  # the first span that ends after the token's start
        is_target = start < end and place < len(parted) and parted[place].start < end
        labels.append(token if is_target else IGNORED)
        weights.append(parted[place].weight if is_target else 0.0)
    return labels, weights


def _cut(masked: MaskedRow, max_length: int | None) -> MaskedRow:
    if masked.images is not None and max_length is not None and masked.images.end > max_length:
        problem = Problem(CUT_IMAGE, f"its images end after {masked.images.end} tokens")
        return MaskedRow([], [], (*masked.problems, problem))
    kept = masked.slice(0, max_length)
    if not kept.has_target:
        detail = f"{STARTS_AFTER} {max_length} tokens" if masked.has_target else ""
        is_named = any(one.kind in (REJECTED, NO_TARGET) for one in masked.problems)
        reasons = () if is_named else (Problem(NO_TARGET, detail),)
        return kept._replace(problems=masked.problems + reasons)
    if any(label != IGNORED for label in masked.labels[len(kept.labels) :]):
        return kept._replace(problems=(*masked.problems, Problem(CUT, f"{len(masked.input_ids)} tokens")))
    return kept
