"""Which tokens of a row are trained: those that the assistant writes, and the one with which it ends its turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

from accmt.errors import DataError, explain

IGNORED = -100
"""The label of a token that is no target."""

NO_TARGET = "without a token to train on"
CUT = "with an answer that max_length cuts"
DOUBLED_BOS = "with two beginning-of-sequence tokens, one of which is dropped"
REWRITTEN = "with turns that are not trained, because the chat template rewrites earlier turns"
NO_REASONING = "with reasoning that the chat template leaves out"
INCOMPLETE = "with turns that are not trained, because the chat template leaves out their content or tool calls"
REJECTED = "that the chat template rejects"

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ROLE = "assistant"
_WHERE = "a row for supervised fine-tuning"


class Problem(NamedTuple):
    """What is odd about a row.

    Attributes:
        kind: One of the constants above, to be counted by.
        detail: What is said of this row alone.
    """

    kind: str
    detail: str = ""


class MaskedRow(NamedTuple):
    """The tokens of a row.

    Attributes:
        input_ids: All tokens.
        labels: The same where a token is trained, else -100.
        problems: What is odd.
    """

    input_ids: list[int]
    labels: list[int]
    problems: tuple[Problem, ...] = ()

    @property
    def has_target(self) -> bool:
        """Whether anything is trained; the first token is predicted by none."""
        return any(label != IGNORED for label in self.labels[1:])


def mask_row(
    tokenizer: Any, row: Mapping[str, Any], *, max_length: int | None = None, turn: int | None = None
) -> MaskedRow:
    """Return the tokens of a row, with labels for what the assistant writes.

    Args:
        tokenizer: A fast tokenizer of transformers; with a chat template where rows are conversations.
        row: A dict with "messages"; with "prompt" and "completion", strings or lists of messages; or with "text", all
            of which is trained. Beside messages there may be "tools" and "chat_template_kwargs".
        max_length: How many tokens are kept.
        turn: Index of the one message to train, up to which the conversation is rendered; None is all of the
            assistant's.

    Raises:
        DataError: The row has none of these forms, or the tokenizer lacks a chat template or offsets.
    """
    if not getattr(tokenizer, "is_fast", False):
        expected, do = "a tokenizer that knows where its tokens lie in the text", "AutoTokenizer.from_pretrained(...)"
        raise DataError(explain(_WHERE, f"{type(tokenizer).__name__}, which has no offsets", expected, do))
    messages, first = find_messages(row)
    if messages is None:
        masked = _mask_text(tokenizer, row)
    elif tokenizer.chat_template is None:
        do = (
            "tokenizer.chat_template = Path('template.jinja').read_text(), that of an instruct model such as yours (in "
        )
        do += 'the YAML `sft.chat_template: template.jinja`); or rows with "prompt" and "completion" as strings'
        raise DataError(explain(_WHERE, "messages, and a tokenizer without a chat template", "a chat template", do))
    else:
        masked = _mask_messages(_Conversation(tokenizer, messages, row), first, turn)
    return _cut(_with_one_bos(masked, tokenizer.bos_token_id), max_length)


def find_messages(row: Any) -> tuple[list[Mapping[str, Any]] | None, int]:
    """Return the messages of a row, None where it holds strings, and the index from which they are trained.

    Raises:
        DataError: The row has another form.
    """
    if isinstance(row, Mapping):
        if _is_messages(row.get("messages")):
            return list(row["messages"]), 0
        prompt, completion = row.get("prompt"), row.get("completion")
        if prompt is not None and completion is not None and _is_messages(prompt) and _is_messages(completion):
            return [*prompt, *completion], len(prompt)
        if (isinstance(prompt, str) and isinstance(completion, str)) or isinstance(row.get("text"), str):
            return None, 0
    got = f"the entries {list(row)}" if isinstance(row, Mapping) else type(row).__name__
    expected = '"messages"; "prompt" and "completion", both strings or both lists of messages; or "text"'
    do = 'dataset.map(lambda row: {"messages": [{"role": "user", "content": row["question"]}, ...]}), say'
    raise DataError(explain(_WHERE, got, expected, do))


def _is_messages(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return is_list and all(isinstance(one, Mapping) and "role" in one for one in value)


class _Turn(NamedTuple):
    """Where a turn of the assistant lies in the text of a conversation, and what is odd about it."""

    start: int
    end: int
    whole_end: int
    is_trained: bool
    problem: Problem | None


class _TemplateError(Exception):
    """A chat template that does not take some messages."""


class _Conversation:
    """Renders a conversation, and parts of it."""

    def __init__(self, tokenizer: Any, messages: list[Mapping[str, Any]], row: Mapping[str, Any]) -> None:
        tools = row.get("tools") or None
        self.tokenizer = tokenizer
        self.messages = messages
        self._tools = json.loads(tools) if isinstance(tools, str) else tools
        self._arguments = dict(row.get("chat_template_kwargs") or {})

    @property
    def has_markers(self) -> bool:
        """Whether the template itself says what the assistant writes."""
        return _MARKER.search(self.tokenizer.get_chat_template(None, self._tools)) is not None

    def render(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> Any:
        """Return the text of messages, or what the tokenizer makes of it."""
        arguments = {"tokenize": False, **self._arguments, **arguments}
        own = [dict(one) for one in messages]
        try:
            return self.tokenizer.apply_chat_template(own, tools=self._tools, **arguments)
        except Exception as error:  # a template raises what it likes, of jinja2 and of Python
            raise _TemplateError(f"{type(error).__name__}: {error}") from error

    def find_turn(self, index: int, whole: str) -> _Turn:
        """Find what the assistant writes in one turn, from where it is asked to write, to the mark of its end."""
        through = self.render(self.messages[: index + 1])
        probes = [self.render([*self.messages[:index], _probe(self.messages[index], word)]) for word in "AZ"]
        start = self._find_start(index, through, probes)
        # What all answers end with is the end token, and perhaps a line break, which belongs to the next turn.
        tail = commonprefix([text[::-1] for text in (*probes, through[start:])])[::-1]
        end = len(through) - (len(tail) - len(tail.rstrip()) if tail.strip() else 0)
        if not whole.startswith(through[:end]):  # a further mark may stand at the end of a conversation only
            end = self._find_common_end(through, whole, len(through) - len(tail)) or end
        kind = _find_loss(self.messages[index], through[start:end])
        if not whole.startswith(through[:end]):  # a later message changes this turn, or what it answers
            kind = REWRITTEN
        problem = None if kind is None else Problem(kind, f"message {index}")
        return _Turn(start, end, len(through), kind in (None, NO_REASONING), problem)

    def _find_start(self, index: int, through: str, probes: list[str]) -> int:
        """Return where the assistant begins to write: behind the generation prompt, if a template has one.

        It may have none, ignore the flag, raise an error about messages that end so, or put something there that the
        turn has not, such as an empty block of reasoning. Then it is where texts with different answers part.
        """
        try:
            asked, context = (
                self.render(self.messages[:index], add_generation_prompt=asks) if index else ""
                for asks in (True, False)
            )
        except _TemplateError:
            asked = context = ""
        if asked != context and through.startswith(asked):
            return len(asked)
        return len(commonprefix([*probes, through]))

    def _find_common_end(self, through: str, whole: str, first: int) -> int | None:
        """Return where the last token that ends a turn, behind `first`, ends in both texts; None if there is none."""
        common = len(commonprefix([through, whole]))
        tokens = "|".join(re.escape(token) for token in self.tokenizer.added_tokens_encoder)
        ends = (
            [found.end() for found in re.finditer(tokens, through[:common]) if found.start() >= first] if tokens else []
        )
        return ends[-1] if ends else None


def _probe(message: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Return an answer of one word, with parts where the answer has parts."""
    has_parts = isinstance(message.get("content"), list | tuple)
    return {"role": message["role"], "content": [{"type": "text", "text": word}] if has_parts else word}


def _find_loss(message: Mapping[str, Any], text: str) -> str | None:
    """Return what a template has left out of a turn, if anything."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
    said = [part.rpartition("</think>")[2].strip() for part in parts]
    calls = [(call.get("function") or call).get("name") or "" for call in message.get("tool_calls") or ()]
    if any(one not in text for one in (*said, *calls)):
        return INCOMPLETE
    reasoning = next(
        (message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name)), ""
    )
    return None if reasoning.strip() in text else NO_REASONING


def _mask_messages(conversation: _Conversation, first: int, turn: int | None) -> MaskedRow:
    if turn is not None:
        conversation.messages = conversation.messages[: turn + 1]
    indices = [index for index, one in enumerate(conversation.messages) if one["role"] == _ROLE and index >= first]
    try:
        whole = conversation.render(conversation.messages)
        turns = [conversation.find_turn(index, whole) for index in indices if turn in (None, index)]
    except _TemplateError as fault:
        return MaskedRow([], [], (Problem(REJECTED, str(fault)),))
    trained = [one for one in turns if one.is_trained]
    problems = tuple(one.problem for one in turns if one.problem is not None)
    if not conversation.has_markers:
        encoded = conversation.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        spans = [(one.start, one.end) for one in trained]
        return MaskedRow(encoded["input_ids"], _label(encoded, spans), problems)
    encoded = conversation.render(
        conversation.messages,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    spans = (
        [(0, len(whole))]
        if trained == turns and turn is None and first == 0
        else [(a.start, a.whole_end) for a in trained]
    )
    marks, labels = encoded["assistant_masks"], _label(encoded, spans)
    labels = [label if mark else IGNORED for label, mark in zip(labels, marks, strict=True)]
    return MaskedRow(encoded["input_ids"], labels, problems)


def _mask_text(tokenizer: Any, row: Mapping[str, Any]) -> MaskedRow:
    """Mask a row of strings, of which the end is trained, too."""
    is_split = isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)
    prompt, answer = (row["prompt"], row["completion"]) if is_split else ("", row["text"])
    encoded = tokenizer(prompt + answer, return_offsets_mapping=True)
    ids, labels = encoded["input_ids"], _label(encoded, [(len(prompt), len(prompt) + len(answer))])
    end = tokenizer.eos_token_id
    if end is not None and answer:
        if ids[-1:] != [end]:
            ids, labels = [*ids, end], [*labels, end]
        labels[-1] = end
    return MaskedRow(ids, labels)


def _label(encoded: Mapping[str, Any], spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ids of tokens that hold any character of the spans, -100 for the others.

    So a token that begins before an answer, such as a space that it takes in, is trained: with it the answer begins.
    """
    labels = []
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        labels.append(token if any(max(start, a) < min(end, b) for a, b in spans) else IGNORED)
    return labels


def _with_one_bos(masked: MaskedRow, bos: int | None) -> MaskedRow:
    if bos is None or masked.input_ids[:2] != [bos, bos]:
        return masked
    return MaskedRow(masked.input_ids[1:], masked.labels[1:], (*masked.problems, Problem(DOUBLED_BOS)))


def _cut(masked: MaskedRow, max_length: int | None) -> MaskedRow:
    kept = MaskedRow(masked.input_ids[:max_length], masked.labels[:max_length], masked.problems)
    if not kept.has_target:
        detail = f"its answers lie behind the first {max_length} tokens" if masked.has_target else ""
        reasons = () if any(one.kind == REJECTED for one in masked.problems) else (Problem(NO_TARGET, detail),)
        return kept._replace(problems=masked.problems + reasons)
    if any(label != IGNORED for label in masked.labels[len(kept.labels) :]):
        return kept._replace(problems=(*masked.problems, Problem(CUT, f"{len(masked.input_ids)} tokens")))
    return kept
